"""One run: a fleet of servers, the services' own controllers, traffic, and a virtual clock that starts at an epoch."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from glowplug.domain.instance import InstanceState
from glowplug.simulator.accounts import Accounts
from glowplug.simulator.checkers import Checker
from glowplug.simulator.control_plane import Fleet
from glowplug.simulator.faults import break_down
from glowplug.simulator.hardware.engine import Sharing, SimEngine
from glowplug.simulator.hardware.fetching import digest_of
from glowplug.simulator.hardware.links import Links
from glowplug.simulator.hardware.node import SimNode
from glowplug.simulator.kernel import Kernel
from glowplug.simulator.results import Results
from glowplug.simulator.setup import ModelSetup, Setup, StartSeconds
from glowplug.simulator.traffic import Traffic
from glowplug.simulator.workload.arrival import Arrival

T = TypeVar("T")
SETTLE_S = 5.0  # nodes and routers have spoken before the first request comes
OBJECTS_PER_COLLECTION = 100_000


class World:
    """`setup` and `arrivals` (in order, times from 0) decide everything: nothing here is random."""

    def __init__(self, setup: Setup, arrivals: Iterable[Arrival], *, check: bool = False, label: str = "a run") -> None:
        self.setup = setup
        self.label = label
        self.began_s = setup.began_at
        self.kernel = Kernel(self.began_s - SETTLE_S)
        self.links = Links(self.kernel)
        self.sharing = Sharing(self)
        self.models: dict[str, ModelSetup] = {one.model.key: one for one in setup.models}
        self.keys_of: dict[str, tuple[str, ...]] = {}  # digest of weights -> models they are of
        for one in setup.models:
            digest = digest_of(one.model.weights)
            self.keys_of[digest] = (*self.keys_of.get(digest, ()), one.model.key)
        self.results = Results()
        self.fleet = Fleet(setup, self.kernel)
        self.nodes: dict[str, SimNode] = {}
        for server in setup.servers:
            for number in range(1, server.num_servers + 1):
                node_id = f"{server.name}-{number}"
                self.nodes[node_id] = SimNode(self, node_id, server)
        self.traffic = Traffic(self, iter(arrivals))
        self.accounts = Accounts(self.began_s)
        self._num_taken: dict[tuple[str, str], int] = {}  # of what was measured of each model
        self.fleet.on_save.append(self.accounts.saved)
        self._checker = Checker(self) if check else None

    def engine(self, node_id: str, instance_id: str) -> SimEngine | None:
        node = self.nodes.get(node_id)
        return node.engines.get(instance_id) if node else None

    def find(self, instance_id: str) -> SimEngine | None:
        """An engine by its id, on whatever node."""
        row = self.fleet.tables["instances"].get(instance_id)
        return self.engine(row.node_id, instance_id) if row is not None else None

    def start_of(self, model: ModelSetup) -> StartSeconds:
        """What the next start of a model takes: as its starts were measured, one after the other."""
        return self._next("start", model, model.starts) or model.start

    def wake_of(self, model: ModelSetup) -> StartSeconds:
        """What the next time takes that an engine of a model leaves its GPUs and comes back."""
        return self._next("wake", model, model.wakes) or model.start

    def pace_of(self, model: ModelSetup) -> tuple[float, float]:
        """How many times as long as its costs say the next request of a model takes: its prompt, its later tokens."""
        return self._next("pace", model, model.pace) or (1.0, 1.0)

    def _next(self, what: str, model: ModelSetup, measured: Sequence[T]) -> T | None:
        if not measured:
            return None
        number = self._num_taken.get((what, model.model.key), 0)
        self._num_taken[what, model.model.key] = number + 1
        return measured[number % len(measured)]

    def drained_a_little(self, engine: SimEngine) -> None:
        """A request has ended: an agent that drains its engine hears of it at once (WarmServe section 4.1)."""
        node = self.nodes[engine.node_id]
        holding = node.agent.holdings.get(engine.instance_id)
        if holding is not None and holding.instance.state is InstanceState.DRAINING:
            node.starting.count(engine)

    def run(
        self, seconds: float, *, drain_s: float = 300.0, progress: Callable[[float], None] | None = None
    ) -> Results:
        """Let `seconds` of traffic pass, and up to `drain_s` more for the last answers. With `check`, invariants are
        watched after every event and AssertionError names the first that breaks."""
        with _few_collections():
            return self._run(seconds, drain_s, progress)

    def _run(self, seconds: float, drain_s: float, progress: Callable[[float], None] | None) -> Results:
        for node in self.nodes.values():
            node.start()
        self.fleet.start()
        self.kernel.run(self.began_s)
        break_down(self)
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
        self.results.normalised_peak.close()
        self.accounts.close(self.results, self.kernel.now_s)
        return self.results

    def _until(self, end_s: float) -> None:
        if self._checker is None:
            self.kernel.run(end_s)
        else:
            self._checker.run(end_s)


@contextmanager
def _few_collections() -> Iterator[None]:
    """A run makes millions of objects and hardly any circle of them: to look for circles every 700 objects, as Python
    does, takes a tenth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
