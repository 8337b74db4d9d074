"""Which running engines are swapped out so that another can be swapped in.

Paper: SwapServeLLM section 3.5, demand-aware preemption: engines with the shortest queue of waiting requests go first,
of equals the one accessed longest ago; one after the other until enough bytes are free.

Departures: an engine at work, or younger than `min_residency_s`, is never chosen; with `fewest`, those are spared whom
a later and larger victim made needless (erratum E29, which names both as missing).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from glowplug.domain.decision import Rival
from glowplug.domain.phrasing import counted
from glowplug.domain.units import show_bytes
from glowplug.policies.caching.ordering import NOT_ENOUGH, ONLY_ONE, STAYS, Resident, first_enough, without_needless
from glowplug.policies.decisions import EvictDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """One engine on the GPU, and who waits for it."""

    instance_id: str
    num_bytes: int
    num_waiting: int
    num_in_flight: int
    last_used_at: float
    ready_at: float
    held: str = ""  # why it must stay, whatever its demand


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionParams:
    min_residency_s: float = 0.0
    fewest: bool = True


def preempt(
    engines: Iterable[RunningEngine], need_bytes: int, now_s: float, params: PreemptionParams = PreemptionParams()
) -> EvictDecision:
    """Who is swapped out, in order. Empty when those who may go do not free `need_bytes`. Scores are queue lengths."""
    ordered = sorted(engines, key=lambda e: (e.num_waiting, e.last_used_at, e.instance_id))
    why = {engine.instance_id: _held(engine, now_s, params) for engine in ordered}
    may_go = [e for e in ordered if not why[e.instance_id] and e.num_bytes > 0]
    could_free = sum(e.num_bytes for e in may_go)
    if need_bytes <= 0 or could_free < need_bytes:
        some = f"only {show_bytes(could_free)} may be freed" if could_free else "nobody may leave"
        short = f"{show_bytes(need_bytes)} are lacking, and {some}"
        reason = "nothing has to be freed" if need_bytes <= 0 else short
        return EvictDecision(reason=reason, rivals=_rivals(ordered, why, frozenset()))
    residents = [Resident(name=e.instance_id, num_bytes=e.num_bytes, last_used_at=e.last_used_at) for e in may_go]
    victims = first_enough(residents, need_bytes)
    if params.fewest:
        victims = without_needless(victims, need_bytes)
    names = tuple(v.name for v in victims)
    freed = sum(v.num_bytes for v in victims)
    return EvictDecision(
        victims=names,
        freed_bytes=freed,
        need_bytes=need_bytes,
        reason=_RULE if len(may_go) > len(victims) else ONLY_ONE,
        rivals=_rivals(ordered, why, frozenset(names)),
    )


def evict(
    residents: Iterable[Resident], need_bytes: int, params: PreemptionParams = PreemptionParams()
) -> EvictDecision:
    """`preempt` in the shape of the kind "eviction". Who may not go at all (at work, too young, pinned) is `held`; of
    the others a lower priority goes before a higher one, which the paper does not know."""
    by_priority: dict[int, list[Resident]] = {}
    for resident in residents:
        by_priority.setdefault(resident.priority, []).append(resident)
    gone: list[Resident] = []
    decision = EvictDecision(reason="nothing has to be freed")
    for priority in sorted(by_priority):
        gone += by_priority[priority]
        decision = preempt([_engine(r) for r in gone], need_bytes, 0.0, replace(params, min_residency_s=0.0))
        if decision.victims:
            break
    return decision


def _engine(resident: Resident) -> RunningEngine:
    return RunningEngine(
        instance_id=resident.name,
        num_bytes=resident.num_bytes,
        num_waiting=resident.num_waiting,
        num_in_flight=0,
        last_used_at=resident.last_used_at,
        ready_at=0.0,
        held=resident.held,
    )


def _held(engine: RunningEngine, now_s: float, params: PreemptionParams) -> str:
    if engine.held:
        return engine.held
    if engine.num_in_flight:
        return f"{counted(engine.num_in_flight, 'request')} in flight"
    if now_s - engine.ready_at < params.min_residency_s:
        return f"it has been ready for {now_s - engine.ready_at:.1f} s only"
    return ""


_RULE = "who has the shortest queue leaves first, and of equals who was used longest ago"


def _rivals(ordered: list[RunningEngine], why: dict[str, str], chosen: frozenset[str]) -> tuple[Rival, ...]:
    stays = STAYS if chosen else NOT_ENOUGH
    return tuple(
        Rival(
            name=e.instance_id,
            score=float(e.num_waiting),
            why="it leaves" if e.instance_id in chosen else why[e.instance_id] or stays,
            unit="requests wait",
        )
        for e in ordered
    )
