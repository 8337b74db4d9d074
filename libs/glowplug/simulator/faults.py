"""What breaks, and when: a node that falls silent with all it ran, one engine that dies, or a stage that does not
become whole, and says so or not."""

from typing import TYPE_CHECKING

from glowplug.controllers.agent import messages as aw
from glowplug.simulator.setup import Fault

if TYPE_CHECKING:
    from glowplug.simulator.world import World


def break_down(world: "World") -> None:
    """Set the clock for every fault of the setup. Raises ValueError for a node that is not there."""
    for fault in world.setup.faults:
        if fault.node_id not in world.nodes:
            raise ValueError(f"faults: there is no node {fault.node_id!r}")
        world.kernel.at(world.began_s + fault.at_s, _break, world, fault)


def _break(world: "World", fault: Fault) -> None:
    node = world.nodes[fault.node_id]
    if fault.kind in ("consolidation", "hang"):
        (node.pipelines.failing if fault.kind == "consolidation" else node.pipelines.hanging).append(fault.model)
        return
    if fault.model:
        for engine in list(node.engines.values()):
            if engine.model.model.key == fault.model and engine.serving is not None:
                node.starting.end(engine.instance_id)
                node.tell_agent(aw.EngineExited(engine.instance_id, "killed by a fault"))
                return
        return
    node.is_down = True
    world.fleet.down |= {fault.node_id, f"prefetcher-{fault.node_id}"}
    for instance_id in list(node.engines):
        node.starting.end(instance_id)
