"""What must hold after every event of every run. The first that does not says when, and what."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glowplug.simulator.hardware.batching import BatchEngine
    from glowplug.simulator.hardware.engine import SimEngine
    from glowplug.simulator.hardware.node import SimNode
    from glowplug.simulator.world import World


class Checker:
    """Runs a world step by step and looks after each. A failure names the run: `World.label`."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self._last_s = 0.0

    def run(self, end_s: float) -> None:
        kernel = self.world.kernel
        while (next_s := kernel.next_s) is not None and next_s <= end_s:
            kernel.step()
            self.look()
        kernel.run(end_s)

    def look(self) -> None:
        """Raises AssertionError."""
        now_s = self.world.kernel.now_s
        self._demand(now_s >= self._last_s, f"time ran back from {self._last_s}")
        self._last_s = now_s
        traffic, total = self.world.traffic, self.world.results.by_model.values()
        ended = sum(one.num_finished + sum(one.num_refused.values()) for one in total)
        self._demand(
            traffic.num_arrived == ended + traffic.num_open,
            f"{traffic.num_arrived} requests came, {ended} ended, {traffic.num_open} are open",
        )
        for node in self.world.nodes.values():
            if not node.is_down:
                self._node(node, now_s)

    def _demand(self, holds: bool, what: str) -> None:
        assert holds, f"{self.world.label}, at {self.world.kernel.now_s - self.world.began_s:.6f} s: {what}"

    def _node(self, node: "SimNode", now_s: float) -> None:
        self._demand(not (wrong := node.agent.violations()), f"{node.node_id}: {'; '.join(wrong)}")
        held = node.agent.ledger.holders
        known_as = {h.engine for i, h in node.agent.holdings.items() if i in held}  # its source's name, at first
        for gpu in node.agent.ledger.gpus:
            self._demand(gpu.used_bytes <= gpu.total_bytes, f"{gpu.gpu_id} holds {gpu.used_bytes} bytes")
            self._demand(all(g.num_bytes >= 0 for g in gpu.grants), f"{gpu.gpu_id} has a grant below 0")
        for engine in node.engines.values():
            name = engine.instance_id
            self._demand(engine.is_swapped or name in held | known_as, f"{name} runs without a grant")
            self._demand(not (engine.is_replica and engine.tickets), f"replica {name} has requests")
            self._demand(engine.num_migrations <= 1, f"the KV of {name} has moved {engine.num_migrations} times")
            if engine.serving is not None:
                self._serving(node, engine, engine.serving, now_s)
        for link in (node.network, *node.lanes.values()):
            rate = sum(transfer.rate for transfer in link.transfers)
            self._demand(rate <= link.bytes_per_s * (1 + 1e-9), f"{link.name} carries {rate} bytes/s")

    def _serving(self, node: "SimNode", engine: "SimEngine", serving: "BatchEngine", now_s: float) -> None:
        name, used, limits = engine.instance_id, serving.kv_tokens_used(now_s), serving.limits
        self._demand(used <= limits.kv_tokens, f"{name} has {used} tokens of {limits.kv_tokens}")
        self._demand(
            serving.num_sequences <= limits.max_sequences or engine.num_migrations == 1,
            f"{name} has {serving.num_sequences} sequences of {limits.max_sequences}",
        )
        self._demand(serving.num_sequences <= len(engine.tickets), f"{name} runs what nobody asked for")
        if engine.num_stages > 1 and engine.tickets:
            later = [self.world.find(f"{name}.{r}") for r in range(1, engine.num_stages)]
            self._demand(all(later), f"{name} answers with {sum(map(bool, later))} later stages")
