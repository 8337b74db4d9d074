"""One node in virtual time: its server, the controllers of its agent and prefetcher, and the executors of both."""

from collections.abc import Callable
from typing import Any, Final

from glowplug.controllers.agent import messages as aw
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.prefetcher import messages as pw
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.domain import hardware
from glowplug.domain.hardware import Gpu
from glowplug.memory.ledger import ByteLedger
from glowplug.policies.placement.expect import STREAMS
from glowplug_lab.simulator.hardware.adapters import Adapters
from glowplug_lab.simulator.hardware.disk import Disk
from glowplug_lab.simulator.hardware.dormancy import Dormancy
from glowplug_lab.simulator.hardware.fetching import Fetching
from glowplug_lab.simulator.hardware.pipeline import Pipelines
from glowplug_lab.simulator.hardware.server import Server
from glowplug_lab.simulator.hardware.starting import Starting
from glowplug_lab.simulator.run import digest_of
from glowplug_lab.simulator.setup import ServerSetup, Setup

EMULATED: Final = "emulated"
UNHEEDED: Final = (aw.ReportStart, aw.ReportDrain, aw.ReportConsolidation, aw.ForgetEngine, pw.NameRegion)
"""Spans, logs and names, which a simulated node has none of."""


class SimNode(Server):
    """One node, in place of the shells of its agent and prefetcher. `starting`, `dormancy`, `pipelines`, `fetching` and
    `disk` carry out the effects."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._looks = False
        self._memory: aw.AgentMemory | None = None  # the memory that the agent saved last
        self._links = (
            hardware.Link(link_id=self.network.name, bytes_per_s=self.network.bytes_per_s),
            hardware.Link(link_id=f"{self.node_id}/pcie", bytes_per_s=self.server.pcie_bytes_per_s),
        )
        self.disk = Disk(self, self.look_around)
        self.fetching = Fetching(self, self.disk, self.look_around)
        self.starting = Starting(self, self.fetching)
        self.adapters = Adapters(self, self.fetching, self.starting)
        self.dormancy = Dormancy(self, self.fetching, self.starting)
        self.pipelines = Pipelines(self, self.fetching)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            **dict.fromkeys(UNHEEDED, lambda effect: None),
            aw.Remember: self._remember,
            **self.fetching.handlers,
            **self.disk.handlers,
            **self.starting.handlers,
            **self.adapters.handlers,
            **self.dormancy.handlers,
            **self.pipelines.handlers,
        }
        self.executes = self._handlers.keys()
        self.control.add_node(self.node_id, self._make_agent, self._make_prefetcher, self)

    def _make_agent(self, epoch: int) -> AgentController:
        names = sorted({one.model.engine for one in self.run.setup.models})
        abilities = {name: self.server.abilities_of(name) | self._streams(name) for name in names}
        kinds = {name: aw.EngineKind(name=name, emulated=True, abilities=abilities[name]) for name in names}
        gpus = [Gpu(gpu_id=gpu_id, total_bytes=self.server.gpu_bytes, kind=EMULATED) for gpu_id in self.gpu_ids]
        return AgentController(
            self.node_id,
            ByteLedger(gpus),
            kinds,
            agent_url=f"sim://{self.node_id}",
            params=self.run.setup.params.agent,
            memory=self._memory,
        )

    def _make_prefetcher(self, epoch: int) -> PrefetcherController:
        params = prefetcher_params(self.run.setup, self.server)
        return PrefetcherController(self.node_id, params, digest_of=digest_of)

    def _streams(self, engine: str) -> frozenset[str]:
        """The ability to stream weights while fetching, if all of an engine's models do so (`StartSeconds.overlap`)."""
        mine = (one.start.overlap for one in self.run.setup.models if one.model.engine == engine)
        return frozenset({STREAMS}) if all(mine) else frozenset()

    def start(self) -> None:
        """Start the agent and the prefetcher with what they find on the node."""
        self.tell_agent(aw.Recalled(frozenset()))
        if self.server.weights_in_host:
            for one in self.run.setup.models:
                self.fetching.keep(digest_of(one.model.weights), one.model.weights.num_bytes)
        self._find_weights()
        self.look_around()

    def _find_weights(self) -> None:
        """Notify the prefetcher of the weights in host memory and on disk."""
        regions, copies = tuple(self.fetching.regions.values()), tuple(self.disk.copies.values())
        self.tell_prefetcher(pw.RegionsFound(regions, on_disk=copies))

    def restarted(self, name: str) -> None:
        """Notify a restarted agent or prefetcher of what it finds. Engines survived; fetches ended with their
        process."""
        if name == self.node_id:
            self.fetching.wait_for_none()
            self.tell_agent(aw.Recalled(frozenset(self.engines)))
        else:
            self.fetching.stop_all()
            self.disk.stop_all()
            self._find_weights()
        self.look_around()

    def look_around(self) -> None:
        """Notify the agent of host memory and links, once for all changes of the same moment."""
        if not self._looks:
            self._looks = True
            self.run.kernel.after(0.0, self._look)

    def _look(self) -> None:
        self._looks = False
        cached = tuple(self.fetching.regions.values())
        disk = self.prefetcher.disk
        around = aw.Surroundings(
            cached, self.server.host_cache_bytes, self._links, on_disk=disk.whole, disk_bytes_per_s=disk.bytes_per_s
        )
        self.tell_agent(around)

    def execute(self, effect: Any) -> None:
        """Carry out one effect of the agent or the prefetcher."""
        self._handlers[type(effect)](effect)

    def _remember(self, effect: aw.Remember) -> None:
        self._memory = effect.memory


def prefetcher_params(setup: Setup, server: ServerSetup) -> PrefetcherParams:
    """The parameters of one node's prefetcher."""
    return PrefetcherParams(
        capacity_bytes=server.host_cache_bytes,
        caching=setup.policies.caching,
        heal_s=setup.params.heal_s,
        disk_bytes=server.disk_cache_bytes,
    )
