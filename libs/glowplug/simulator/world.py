"""One run: a fleet of servers, the services' own controllers, traffic, and a virtual clock that starts at an epoch."""

from collections.abc import Callable, Iterable

from glowplug.simulator.checkers import Checker
from glowplug.simulator.fleet import Fleet
from glowplug.simulator.kernel import Kernel
from glowplug.simulator.links import Links
from glowplug.simulator.node import SimEngine, SimNode
from glowplug.simulator.results import Results
from glowplug.simulator.setup import ModelSetup, Setup
from glowplug.simulator.traffic import Traffic
from glowplug.simulator.workload.arrival import Arrival

BEGAN_S = 1_700_000_000.0
SETTLE_S = 5.0  # nodes and routers have spoken before the first request comes


class World:
    """`setup` and `arrivals` (in order, times from 0) decide everything: nothing here is random."""

    def __init__(self, setup: Setup, arrivals: Iterable[Arrival], *, check: bool = False) -> None:
        self.setup = setup
        self.kernel = Kernel(BEGAN_S)
        self.links = Links(self.kernel)
        self.models: dict[str, ModelSetup] = {one.model.key: one for one in setup.models}
        self.results = Results()
        self.fleet = Fleet(setup, self.kernel)
        self.nodes: dict[str, SimNode] = {}
        for server in setup.servers:
            for number in range(1, server.num_servers + 1):
                node_id = f"{server.name}-{number}"
                self.nodes[node_id] = SimNode(self, node_id, server)
        self.traffic = Traffic(self, iter(arrivals))
        self.began_s = BEGAN_S + SETTLE_S
        self._checker = Checker(self) if check else None
        self._gpus_since = BEGAN_S

    def engine(self, node_id: str, instance_id: str) -> SimEngine | None:
        node = self.nodes.get(node_id)
        return node.engines.get(instance_id) if node else None

    def run(
        self, seconds: float, *, drain_s: float = 300.0, progress: Callable[[float], None] | None = None
    ) -> Results:
        """Let `seconds` of traffic pass, and up to `drain_s` more for the last answers. With `check`, invariants are
        watched after every event and AssertionError names the first that breaks."""
        for node in self.nodes.values():
            node.start()
        self.fleet.start()
        self.kernel.run(self.began_s)
        self._account()
        self.traffic.start()
        end_s = self.began_s + seconds
        step_s = max(1.0, seconds / 100)
        while self.kernel.now_s < end_s or (self.traffic.num_open and self.kernel.now_s < end_s + drain_s):
            self._until(
                min(self.kernel.now_s + step_s, end_s) if self.kernel.now_s < end_s else self.kernel.now_s + 1.0
            )
            if progress is not None:
                progress(min(1.0, (self.kernel.now_s - self.began_s) / seconds))
        self.results.seconds = self.kernel.now_s - self.began_s
        return self.results

    def _until(self, end_s: float) -> None:
        if self._checker is None:
            self.kernel.run(end_s)
        else:
            self._checker.run(end_s)

    def _account(self) -> None:
        """GPU-seconds: each GPU whose ledger holds anything counts, second by second."""
        used = sum(bool(gpu.grants) for node in self.nodes.values() for gpu in node.agent.ledger.gpus)
        self.results.gpu_seconds += used * 1.0
        self.kernel.after(1.0, self._account)
