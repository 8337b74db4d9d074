"""One server in virtual time: its GPUs, host memory and links, and what its agent and prefetcher ask for."""

from typing import TYPE_CHECKING, Any

from glowplug.controllers.agent import messages as aw
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.prefetcher import messages as pw
from glowplug.domain import hardware
from glowplug.domain.hardware import Gpu
from glowplug.memory.ledger import ByteLedger
from glowplug.policies.placement.expect import STREAMS
from glowplug.simulator.control_plane import make_prefetcher
from glowplug.simulator.hardware.dormancy import Dormancy
from glowplug.simulator.hardware.engine import SimEngine
from glowplug.simulator.hardware.fetching import Fetching, digest_of
from glowplug.simulator.hardware.links import Link
from glowplug.simulator.hardware.pipeline import Pipelines
from glowplug.simulator.hardware.starting import Starting
from glowplug.simulator.setup import ServerSetup

if TYPE_CHECKING:
    from glowplug.simulator.world import World

EMULATED = "emulated"


class SimNode:
    """What the shells of one node's agent and prefetcher would do. `starting`, `dormancy`, `pipelines` and `fetching`
    carry the effects out; `engines` are the processes that live."""

    def __init__(self, world: "World", node_id: str, server: ServerSetup) -> None:
        self.world, self.node_id, self.server = world, node_id, server
        gpus = [
            Gpu(gpu_id=f"{node_id}/{n}", total_bytes=server.gpu_bytes, kind=EMULATED) for n in range(server.num_gpus)
        ]
        self.network = Link(f"{node_id}/nic", server.network_bytes_per_s)
        self.cpu = Link(f"{node_id}/cpu", server.start_cores) if server.start_cores else None
        self.lanes = {gpu.gpu_id: Link(f"{gpu.gpu_id}/pcie", server.pcie_bytes_per_s) for gpu in gpus}
        self.engines: dict[str, SimEngine] = {}
        self.is_down = self._looks = False
        self._links = (
            hardware.Link(link_id=self.network.name, bytes_per_s=self.network.bytes_per_s),
            hardware.Link(link_id=f"{node_id}/pcie", bytes_per_s=server.pcie_bytes_per_s),
        )
        names = sorted({one.model.engine for one in world.setup.models})
        kinds = {
            name: aw.EngineKind(name=name, emulated=True, abilities=server.abilities_of(name) | self._streams(name))
            for name in names
        }
        self.agent = AgentController(
            node_id, ByteLedger(gpus), kinds, agent_url=f"sim://{node_id}", params=world.setup.params.agent
        )
        self.prefetcher = make_prefetcher(node_id, server.host_cache_bytes, world.setup.policies.caching, digest_of)
        self.fetching = Fetching(self)
        self.starting = Starting(self)
        self.dormancy = Dormancy(self)
        self.pipelines = Pipelines(self)
        self._handlers = {
            **self.fetching.handlers,
            **self.starting.handlers,
            **self.dormancy.handlers,
            **self.pipelines.handlers,
        }
        world.fleet.add_node(node_id, self.agent, self.prefetcher, self)

    def _streams(self, engine: str) -> frozenset[str]:
        """Engines of a scenario stream what they fetch where all of their models do (`StartSeconds.overlap`)."""
        mine = (one.start.overlap for one in self.world.setup.models if one.model.engine == engine)
        return frozenset({STREAMS}) if all(mine) else frozenset()

    def start(self) -> None:
        """What the two find when they come up."""
        self.tell_agent(aw.Recalled(frozenset()))
        if self.server.weights_in_host:
            for one in self.world.setup.models:
                self.fetching.keep(digest_of(one.model.weights), one.model.weights.num_bytes)
        self.tell_prefetcher(pw.RegionsFound(tuple(self.fetching.regions.values())))
        self.look_around()

    def look_around(self) -> None:
        """The agent hears what its host memory and its links are: soon, and once for all that changes at one time."""
        if not self._looks:
            self._looks = True
            self.world.kernel.after(0.0, self._look)

    def _look(self) -> None:
        self._looks = False
        cached = tuple(self.fetching.regions.values())
        self.tell_agent(aw.Surroundings(cached, self.server.host_cache_bytes, self._links))

    def execute(self, effect: Any) -> None:
        """One effect of either controller; what needs no hands in a simulation is passed over."""
        handler = self._handlers.get(type(effect))
        if handler is not None:
            handler(effect)

    def tell_agent(self, stimulus: Any) -> None:
        self.world.fleet.give(self.node_id, stimulus)

    def answer_agent(self, stimulus: Any) -> None:
        """An answer over the wire: never inside the question."""
        self.world.kernel.after(self.world.setup.params.network_s, self.tell_agent, stimulus)

    def tell_prefetcher(self, stimulus: Any) -> None:
        self.world.fleet.give(f"prefetcher-{self.node_id}", stimulus)

    def lanes_of(self, engine: SimEngine) -> tuple[Link, ...]:
        """The PCIe lanes of its GPUs: they carry their parts side by side."""
        return tuple(self.lanes[gpu_id] for gpu_id in engine.gpu_ids)

    def lives(self, engine: SimEngine) -> bool:
        return self.engines.get(engine.instance_id) is engine
