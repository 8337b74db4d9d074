"""Invariants that must hold after every event of every run. The first violation names the time and what broke."""

from collections.abc import Mapping

from glowplug_lab.simulator.control_plane import ControlPlane
from glowplug_lab.simulator.hardware.batching import BatchEngine, State
from glowplug_lab.simulator.hardware.engine import SimEngine
from glowplug_lab.simulator.hardware.node import SimNode
from glowplug_lab.simulator.run import Run
from glowplug_lab.simulator.traffic import Traffic


class Checker:
    """A checker that steps through a run and checks its parts after each event. A failure names the run:
    `Run.label`."""

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
        """Check all invariants now. Raises AssertionError."""
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
        """Raise AssertionError, with the run and the time, unless the condition `holds`."""
        assert holds, f"{self._run.label}, at {self._run.kernel.now_s - self._run.began_s:.6f} s: {what}"

    def look_at(self, node: SimNode, now_s: float) -> None:
        """Check the invariants of one node. Raises AssertionError."""
        self.demand(not (wrong := node.agent.violations()), f"{node.node_id}: {'; '.join(wrong)}")
        held = node.agent.ledger.holders
        known_as = {h.engine for i, h in node.agent.holdings.items() if i in held}  # by its source's name, at first
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
