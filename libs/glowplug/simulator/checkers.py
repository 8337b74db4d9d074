"""What must hold after every event of every run. The first that does not says when, and what."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glowplug.simulator.world import World


class Checker:
    """Runs a world step by step and looks after each."""

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
        world = self.world
        now_s = world.kernel.now_s
        assert now_s >= self._last_s, f"time ran from {self._last_s} back to {now_s}"
        self._last_s = now_s
        for node in world.nodes.values():
            held = node.agent.ledger.holders
            for gpu in node.agent.ledger.gpus:
                assert gpu.used_bytes <= gpu.total_bytes, f"{now_s}: {gpu.gpu_id} holds {gpu.used_bytes} bytes"
            for engine in node.engines.values():
                assert engine.instance_id in held, f"{now_s}: {engine.instance_id} runs without a grant"
                serving = engine.serving
                if serving is not None:
                    used = serving.kv_tokens_used(now_s)
                    assert used <= serving.limits.kv_tokens, f"{now_s}: {engine.instance_id} has {used} tokens"
                    assert serving.num_sequences <= serving.limits.max_sequences, (
                        f"{now_s}: {engine.instance_id} is over"
                    )
            for link in (node.network, *node.lanes.values()):
                rate = sum(transfer.rate for transfer in link.transfers)
                assert rate <= link.bytes_per_s * (1 + 1e-9), f"{now_s}: {link.name} carries {rate} bytes/s"
