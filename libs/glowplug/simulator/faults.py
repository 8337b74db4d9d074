"""What breaks, and when: a node that falls silent with all it ran, one engine that dies, or a stage that does not
become whole, and says so or not."""

from collections.abc import Mapping

from glowplug.simulator.hardware.node import SimNode
from glowplug.simulator.run import Run
from glowplug.simulator.setup import Fault


def break_down(run: Run, nodes: Mapping[str, SimNode]) -> None:
    """Set the clock for every fault of the setup. Raises ValueError for a node that is not there."""
    for fault in run.setup.faults:
        if fault.node_id not in nodes:
            raise ValueError(f"faults: there is no node {fault.node_id!r}")
        run.kernel.at(run.began_s + fault.at_s, _break, nodes[fault.node_id], fault)


def _break(node: SimNode, fault: Fault) -> None:
    if fault.kind in ("consolidation", "hang"):
        (node.pipelines.failing if fault.kind == "consolidation" else node.pipelines.hanging).append(fault.model)
        return
    if fault.model:
        for engine in list(node.engines.values()):
            if engine.model.model.key == fault.model and engine.serving is not None:
                node.kill(engine.instance_id, "killed by a fault")
                return
        return
    node.is_down = True
    node.control.down |= {fault.node_id, f"prefetcher-{fault.node_id}"}
    for instance_id in list(node.engines):
        node.end(instance_id)
