"""What lies dormant on a node: replicas (weights alone, on their GPUs) and engines asleep outside the GPUs.

Papers: WarmServe section 4 (universal workers, Fig. 5), SwapServeLLM section 3 (swap out and in). Departures:
- A drained engine keeps its own weights only when the placer asks for it (`becomes`); WarmServe always keeps them.
- SwapServeLLM lets a victim finish what it runs; here its grace bounds that, then what still runs ends.
- An engine that is swapped out holds no GPU bytes in the ledger. Real ones keep a rest there, a CUDA context and what
  the allocator does not give back: 0.4 GB (RTX 3080) to 1.1 GB a GPU were measured of vLLM. Nothing is set aside for
  it: on an 80 GB GPU seven sleepers would be 3 to 8 GB short. No driver of a real engine declares `swap`.
- Host memory for engines asleep is bounded (`swap_host_bytes`); past it an engine simply stops.
"""

from collections.abc import Mapping
from dataclasses import replace

from glowplug.controllers.agent.grants import own_workers
from glowplug.controllers.agent.lifecycle import Lifecycle
from glowplug.controllers.agent.messages import AgentParams, EngineKind, Holding
from glowplug.controllers.agent.transaction import Turn
from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import InstanceState

_ABILITIES = {"prewarmed": "prewarm", "swapped_out": "swap"}


class Dormancy:
    """How instances fall asleep, and which of them can."""

    def __init__(self, life: Lifecycle, engines: Mapping[str, EngineKind], params: AgentParams) -> None:
        self._life, self._engines, self._params = life, engines, params

    def can(self, engine: str, ability: str) -> bool:
        """Whether engines of that name have the ability here."""
        kind = self._engines.get(engine)
        return kind is not None and not kind.unavailable and ability in kind.abilities

    def stop(self, turn: Turn, holding: Holding, reason: str, grace_s: float, becomes: str) -> None:
        """Drain, then stop or become `becomes`, where the engine can and host memory is left."""
        if becomes not in _ABILITIES:
            self._life.drain(turn, holding, reason, grace_s)
            return
        instance = holding.instance
        if instance.state.is_dormant or (instance.replica and instance.state.is_coming):
            return  # it lies dormant already: a command that came twice
        able = instance.is_whole and not instance.part_of and self.can(instance.engine, _ABILITIES[becomes])
        if able and becomes == "swapped_out" and not holding.snapshot_bytes:
            holding = replace(holding, snapshot_bytes=int(holding.model.weights_bytes * self._params.snapshot_ratio))
            able = self._fits_host(turn, holding)
        if able:
            turn.keep(holding)
        self._life.drain(
            turn, holding if able else turn.holdings[instance.instance_id], reason, grace_s, becomes * able
        )
        after = turn.holdings[instance.instance_id]
        if after.snapshot_bytes and after.becomes != "swapped_out":
            turn.keep(replace(after, snapshot_bytes=0))

    def _fits_host(self, turn: Turn, holding: Holding) -> bool:
        others = sum(h.snapshot_bytes for i, h in turn.holdings.items() if i != holding.instance.instance_id)
        budget = self._params.swap_host_bytes
        return not budget or others + holding.snapshot_bytes <= budget

    def prewarmed(self, turn: Turn, holding: Holding) -> None:
        """A replica has its weights on its GPUs."""
        instance = holding.instance
        if instance.replica and instance.state is InstanceState.LOADING and not holding.is_stopping:
            turn.tell(
                holding,
                state=InstanceState.PREWARMED,
                ready_at=turn.now_s,
                reason=f"its weights came to the GPU within {turn.now_s - instance.created_at:.2f} s",
            )

    def asleep(self, turn: Turn, holding: Holding) -> None:
        """A drained engine has left its GPUs: for its weights a replica's grant stays, or nothing at all."""
        if not holding.is_sleeping or holding.is_stopping or holding.instance.state is not InstanceState.DRAINING:
            return
        was, leaves = holding.shares, holding.becomes == "swapped_out"
        holding = replace(self._life.ungrant(holding), is_sleeping=False, becomes="", num_misses=0)
        if leaves:
            turn.tell(holding, state=InstanceState.SWAPPED_OUT, url="", reason="it sleeps in host memory")
            return
        weights = {gpu_id: of_gpu.get(GrantOwner.WEIGHTS, 0) for gpu_id, of_gpu in was.items()}
        workers = tuple(replace(w, num_bytes=weights[w.gpu_id]) for w in own_workers(holding.instance))
        instance = replace(holding.instance, replica=True, workers=workers, url="")
        holding = self._life.grant(replace(holding, instance=instance))
        turn.tell(holding, state=InstanceState.PREWARMED, reason="it has drained, and its weights stay on the GPU")
