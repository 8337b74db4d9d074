"""What a draining engine's KV cache keeps, while the rest of it holds other models' weights already.

Paper: WarmServe section 4.1, Eq. 1 (policies/prewarming/warmserve_reservation.py). Departures:
- Eq. 1 is asked at each answer to CountInFlight, which a shell gives on ticks and may give at each completion too.
- The paper names a cache that became too small, "forcing the eviction of the recently loaded weights", but not when.
  Here that is when less than a quarter of one request's mean share (M / C) is left above what is used: the cache then
  takes Eq. 1's value back, from free bytes first, then from replicas on its GPUs, the newest first.
"""

from dataclasses import replace

from glowplug.controllers.agent.grants import Shares, shares_of
from glowplug.controllers.agent.lifecycle import Lifecycle
from glowplug.controllers.agent.messages import AgentParams, Holding, InFlight, LimitKv
from glowplug.controllers.agent.transaction import Turn
from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import InstanceState
from glowplug.policies.prewarming.warmserve_reservation import ReservationParams, prewarmable_bytes

RESERVATIONS = ("", "paper", "literal_code")
MARGIN = 4  # a cache is too small once less than M / C / MARGIN of it is free


class Reservation:
    """Shrinks and restores the KV grants of draining engines. Raises ValueError for an unknown `params.reservation`."""

    def __init__(self, life: Lifecycle, params: AgentParams) -> None:
        if params.reservation not in RESERVATIONS:
            raise ValueError(f"reservation is one of {RESERVATIONS}, not {params.reservation!r}")
        self._life, self._params = life, params
        self._reading = ReservationParams(literal_code=params.reservation == "literal_code")

    def reserve(self, turn: Turn, holding: Holding, seen: InFlight) -> None:
        """Keep what its requests may need, free the rest: never below what is used."""
        instance = holding.instance
        draining = instance.state is InstanceState.DRAINING and turn.now_s >= holding.quiet_until
        busy = holding.is_stopping or holding.is_sleeping or holding.is_consolidating or holding.is_abandoning
        if not self._params.reservation or not draining or busy or seen.kv_bytes_used < 0:
            return
        whole = _kv_of(shares_of(instance, holding.model, self._life.node_id))
        held = _kv_of(holding.shares)
        total = sum(whole.values())  # M
        used = min(seen.kv_bytes_used, total)  # K
        running = min(seen.num_in_flight, instance.max_concurrency)  # R of C; those that wait inside count as well
        kept = total - prewarmable_bytes(running, instance.max_concurrency, used, total, self._reading)
        wanted = {gpu_id: -(-num_bytes * kept // max(total, 1)) for gpu_id, num_bytes in whole.items()}
        if sum(held.values()) - sum(wanted.values()) >= max(1, self._params.reservation_step_bytes):
            self._cut(turn, holding, {gpu_id: min(n, held[gpu_id]) for gpu_id, n in wanted.items()})
        elif sum(wanted.values()) > sum(held.values()):
            margin = total // instance.max_concurrency // MARGIN
            if running and seen.kv_bytes_used + margin > sum(held.values()):
                self._restore(turn, holding, {gpu_id: max(n, held[gpu_id]) for gpu_id, n in wanted.items()})

    def _cut(self, turn: Turn, holding: Holding, wanted: dict[str, int]) -> None:
        for gpu_id, num_bytes in wanted.items():
            self._life.ledger.shrink(gpu_id, holding.instance.instance_id, GrantOwner.KV, num_bytes)
        self._say(turn, holding, wanted)

    def _restore(self, turn: Turn, holding: Holding, wanted: dict[str, int]) -> None:
        """Take as much of `wanted` as there is, or can be made by dropping replicas."""
        instance_id, held = holding.instance.instance_id, _kv_of(holding.shares)
        for replica in self._replicas(turn, wanted):
            free = {gpu.gpu_id: gpu.free_bytes for gpu in self._life.ledger.gpus}
            short = {gpu_id for gpu_id, n in wanted.items() if n > held[gpu_id] + free[gpu_id]}
            if short & replica.shares.keys():
                self._life.drop(turn, replica, f"its bytes go back to the KV cache of {instance_id}")
        free = {gpu.gpu_id: gpu.free_bytes for gpu in self._life.ledger.gpus}
        given = {gpu_id: min(n, held[gpu_id] + free[gpu_id]) for gpu_id, n in wanted.items()}
        if given != held:
            shares = _with_kv(holding, given)
            self._life.ledger.exchange((instance_id,), instance_id, shares)
            self._say(turn, holding, given)

    def _replicas(self, turn: Turn, gpu_ids: dict[str, int]) -> list[Holding]:
        """Replicas on those GPUs, the newest first."""
        there = (h for h in turn.holdings.values() if h.instance.replica and h.is_granted and not h.is_stopping)
        on_them = [h for h in there if not h.instance.state.is_gone and h.shares.keys() & gpu_ids.keys()]
        return sorted(on_them, key=lambda h: (-h.instance.created_at, h.instance.instance_id))

    def _say(self, turn: Turn, holding: Holding, kv: dict[str, int]) -> None:
        turn.ask(LimitKv(holding.instance.instance_id, sum(kv.values())))
        turn.keep(replace(holding, shares=_with_kv(holding, kv)))


def _kv_of(shares: Shares) -> dict[str, int]:
    return {gpu_id: of_gpu.get(GrantOwner.KV, 0) for gpu_id, of_gpu in shares.items()}


def _with_kv(holding: Holding, kv: dict[str, int]) -> Shares:
    return {gpu_id: {**of_gpu, GrantOwner.KV: kv[gpu_id]} for gpu_id, of_gpu in holding.shares.items()}
