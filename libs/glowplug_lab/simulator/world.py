"""One run: servers, controllers, traffic and a virtual clock that starts at an epoch time."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from glowplug_lab.simulator.clocks import Apart
from glowplug_lab.simulator.control_plane import ControlPlane, Delivery
from glowplug_lab.simulator.hardware.batching import BatchEngine, State
from glowplug_lab.simulator.hardware.engine import SimEngine
from glowplug_lab.simulator.hardware.node import SimNode
from glowplug_lab.simulator.results import Accounts, Results
from glowplug_lab.simulator.run import Run
from glowplug_lab.simulator.setup import Fault, Setup
from glowplug_lab.simulator.traffic import Traffic
from glowplug_lab.simulator.workload.arrival import Arrival


class Checker:
    """Check invariants after each event; a failure names `Run.label`."""

    def __init__(self, run: Run, control: ControlPlane, nodes: Mapping[str, SimNode], traffic: Traffic) -> None:
        self._run, self._control, self._nodes, self._traffic = run, control, nodes, traffic
        self._last_s = 0.0

    def run(self, end_s: float) -> None:
        kernel = self._run.kernel
        while (next_s := kernel.next_s) is not None and next_s <= end_s:
            kernel.step()
            self.look()
        kernel.run(end_s)

    def look(self) -> None:
        """Raises AssertionError."""
        now_s = self._run.kernel.now_s
        self.demand(now_s >= self._last_s, f"time ran back from {self._last_s}")
        self._last_s = now_s
        traffic, total = self._traffic, self._run.results.by_model.values()
        ended = sum(one.num_finished + one.num_refused.total() for one in total)
        self.demand(
            traffic.num_arrived == ended + traffic.num_open,
            f"{traffic.num_arrived} requests came, {ended} ended, {traffic.num_open} are open",
        )
        for node in self._nodes.values():
            if not node.is_down:
                self.look_at(node, now_s)

    def demand(self, holds: bool, what: str) -> None:
        """Raise AssertionError, with run and time, unless `holds`."""
        assert holds, f"{self._run.label}, at {self._run.kernel.now_s - self._run.began_s:.6f} s: {what}"

    def look_at(self, node: SimNode, now_s: float) -> None:
        """Raises AssertionError."""
        self.demand(not (wrong := node.agent.violations()), f"{node.node_id}: {'; '.join(wrong)}")
        held = node.agent.ledger.holders
        known_as = {h.engine for i, h in node.agent.holdings.items() if i in held}  # at first by its source's name
        for gpu in node.agent.ledger.gpus:
            self.demand(0 <= gpu.used_bytes <= gpu.total_bytes, f"{gpu.gpu_id} holds {gpu.used_bytes} bytes")
            self.demand(all(g.num_bytes >= 0 for g in gpu.grants), f"{gpu.gpu_id} has a grant below 0")
        for engine in node.engines.values():
            name = engine.instance_id
            self.demand(engine.is_swapped or name in held | known_as, f"{name} runs without a grant")
            self.demand(not (engine.is_replica and engine.tickets), f"replica {name} has requests")
            self.demand(engine.num_migrations <= 1, f"the KV of {name} has moved {engine.num_migrations} times")
            if engine.serving is not None:
                self._serving(node, engine, engine.serving, now_s)
        for link in (node.network, *node.lanes.values()):
            rate = sum(transfer.rate for transfer in link.transfers)
            self.demand(rate <= link.bytes_per_s * (1 + 1e-9), f"{link.name} carries {rate} bytes/s")

    def _serving(self, node: SimNode, engine: SimEngine, serving: BatchEngine, now_s: float) -> None:
        name, used, limits = engine.instance_id, serving.kv_tokens_used(now_s), serving.limits
        self.demand(used <= limits.kv_tokens, f"{name} has {used} tokens of {limits.kv_tokens}")
        num = sum(sequence.state is not State.ABORTED for sequence in serving.sequences())
        self.demand(
            num <= limits.max_sequences or engine.num_migrations == 1,
            f"{name} has {num} sequences of {limits.max_sequences}",
        )
        known, num_sent = self._control.router.fleet.instances.get(name), self._control.router.in_flight.get(name, 0)
        self.demand(
            known is None or num_sent <= known.max_concurrency or engine.num_migrations == 1,
            f"the router has sent {num_sent} requests to {name}",
        )
        self.demand(num <= len(engine.tickets), f"{name} runs what no request asked for")
        if engine.num_stages > 1 and engine.tickets:
            later = [node.find(f"{name}.{r}") for r in range(1, engine.num_stages)]
            self.demand(all(later), f"{name} answers with {sum(map(bool, later))} later stages")


OBJECTS_PER_COLLECTION = 100_000


class World(Run):
    """`arrivals` are in order, with times from 0; `delivery` is calm and `clocks` are alike by default."""

    def __init__(
        self,
        setup: Setup,
        arrivals: Iterable[Arrival],
        *,
        check: bool = False,
        label: str = "a run",
        delivery: Delivery | None = None,
        clocks: Apart | None = None,
    ) -> None:
        super().__init__(setup, label)
        self.control = ControlPlane(
            setup.policies,
            setup.params,
            self.kernel,
            models=[one.model for one in setup.models],
            history=setup.history,
            delivery=delivery,
            clocks=clocks,
        )
        self.nodes: dict[str, SimNode] = {}
        self.traffic = Traffic(self, self.control, self.nodes, iter(arrivals))
        for server in setup.servers:
            for number in range(1, server.num_servers + 1):
                node_id = f"{server.name}-{number}"
                self.nodes[node_id] = SimNode(self, self.control, self.traffic, node_id, server, self.nodes)
        self.accounts = Accounts(self.began_s)
        self.control.on_save.append(self.accounts.saved)
        self._checker = Checker(self, self.control, self.nodes, self.traffic) if check else None

    def run(
        self, seconds: float, *, drain_s: float = 300.0, progress: Callable[[float], None] | None = None
    ) -> Results:
        """Simulate `seconds` of traffic, and up to `drain_s` more for the last answers. With `check`, raises
        AssertionError for the first broken invariant."""
        with _few_collections():
            return self._run(seconds, drain_s, progress)

    def _run(self, seconds: float, drain_s: float, progress: Callable[[float], None] | None) -> Results:
        self.start()
        end_s = self.began_s + seconds
        step_s = max(1.0, seconds / 100)
        while self.kernel.now_s < end_s or (self.traffic.num_open and self.kernel.now_s < end_s + drain_s):
            self.run_until(
                min(self.kernel.now_s + step_s, end_s) if self.kernel.now_s < end_s else self.kernel.now_s + 1.0
            )
            if progress is not None:
                progress(min(1.0, (self.kernel.now_s - self.began_s) / seconds))
        self.results.seconds = self.kernel.now_s - self.began_s
        self.results.normalised_peak.close()
        self.accounts.close(self.results, self.kernel.now_s)
        return self.results

    def start(self) -> None:
        """Advance to the beginning of the traffic. Raises ValueError for a fault of an unknown node."""
        for node in self.nodes.values():
            node.start()
        self.control.start()
        self.kernel.run(self.began_s)
        for fault in self.setup.faults:
            if fault.node_id not in self.nodes:
                raise ValueError(f"faults: there is no node {fault.node_id!r}")
            self.kernel.at(self.began_s + fault.at_s, break_at, self.nodes[fault.node_id], fault)
        self.traffic.start()

    def run_until(self, end_s: float) -> None:
        """`end_s` is in epoch seconds."""
        if self._checker is None:
            self.kernel.run(end_s)
        else:
            self._checker.run(end_s)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Millions of objects have hardly any cycles, and Python's default collection every 700 objects takes a tenth of
    the time."""
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_PER_COLLECTION, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def break_at(node: SimNode, fault: Fault) -> None:
    if fault.kind in ("consolidation", "hang"):
        (node.pipelines.failing if fault.kind == "consolidation" else node.pipelines.hanging).append(fault.model)
    elif fault.model:
        serving = (one for one in node.engines.values() if one.model.model.key == fault.model and one.serving)
        if (engine := next(serving, None)) is not None:
            node.kill(engine.instance_id, "killed by a fault")
    else:
        node.is_down = True
        node.control.down |= {fault.node_id, f"prefetcher-{fault.node_id}"}
        for instance_id in list(node.engines):
            node.end(instance_id)
