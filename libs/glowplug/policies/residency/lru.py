"""Least recently used: the baseline that every residency policy is measured against.

Paper: mCache ("Enable importance-aware model cacheability for inference serving"), the evaluation's baseline list:
"removes the least recently used item when the cache is full". SwapServeLLM uses the oldest access to break ties among
victims. No equation: victims leave in the order (priority, last_used_at, name) until enough bytes are free.

Departures: classic LRU keeps everybody it passed, even when a later victim alone would do. Here a second pass spares
the most recently used victims that turn out not to be needed, so that one large victim does not drag small ones along.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from glowplug.domain.decision import Rival
from glowplug.domain.units import show_bytes
from glowplug.policies.decisions import EvictDecision
from glowplug.policies.residency.resident import Resident


@dataclass(frozen=True, slots=True, kw_only=True)
class LruParams:
    spare: bool = True  # take back victims that a later, larger one makes needless


def evict(residents: Iterable[Resident], need_bytes: int, params: LruParams = LruParams()) -> EvictDecision:
    """Choose who leaves so that at least `need_bytes` become free. Nobody `held` is ever chosen.

    All or nothing: when those who may go do not suffice the decision is empty and says so. Each rival's score is
    its `last_used_at`.
    """
    everybody = sorted(residents, key=_order)
    if need_bytes <= 0:
        return EvictDecision(reason="nothing to free")
    free_to_go = [r for r in everybody if not r.held and r.num_bytes > 0]
    could_free = sum(r.num_bytes for r in free_to_go)
    if could_free < need_bytes:
        some = f"{show_bytes(could_free)} could be freed by {len(free_to_go)} of {len(everybody)}"
        reason = f"{show_bytes(need_bytes)} needed, {some}"
        return EvictDecision(reason=reason, rivals=_rivals(everybody, frozenset()))
    victims = _first_enough(free_to_go, need_bytes)
    if params.spare:
        victims = _spare(victims, need_bytes)
    freed = sum(r.num_bytes for r in victims)
    names = tuple(r.name for r in victims)
    return EvictDecision(
        victims=names,
        freed_bytes=freed,
        reason=f"least recently used of {len(free_to_go)}: {len(names)} free {show_bytes(freed)}, "
        f"{show_bytes(need_bytes)} needed",
        rivals=_rivals(everybody, frozenset(names)),
    )


def _order(resident: Resident) -> tuple[int, float, str]:
    return (resident.priority, resident.last_used_at, resident.name)


def _first_enough(ordered: list[Resident], need_bytes: int) -> list[Resident]:
    victims: list[Resident] = []
    freed = 0
    for resident in ordered:
        if freed >= need_bytes:
            break
        victims.append(resident)
        freed += resident.num_bytes
    return victims


def _spare(victims: list[Resident], need_bytes: int) -> list[Resident]:
    surplus = sum(r.num_bytes for r in victims) - need_bytes
    kept: list[Resident] = []
    for resident in reversed(victims):
        if resident.num_bytes <= surplus:
            surplus -= resident.num_bytes
        else:
            kept.append(resident)
    return list(reversed(kept))


def _rivals(everybody: list[Resident], chosen: frozenset[str]) -> tuple[Rival, ...]:
    return tuple(
        Rival(name=r.name, score=r.last_used_at, why="evicted" if r.name in chosen else r.held or "spared")
        for r in everybody
    )
