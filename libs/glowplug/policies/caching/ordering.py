"""The order in which weights or engines are evicted: each algorithm is an `Ordering` with a small memory of its own.

The caller reports every use and every departure; the ordering returns those present in the order of eviction. `evict`
decides for all algorithms alike which of them may be evicted and how many, so that they differ in nothing else. mCache
section 6.3 compares its own importance with others, of which LRU and LFU are policies here and the rest are in
bench/papers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from glowplug.domain.decision import Rival
from glowplug.domain.units import show_bytes
from glowplug.policies.decisions import EvictDecision

ONLY_ONE = "nobody else may leave"
STAYS = "it stays: enough is free without it"
NOT_ENOUGH = "it might leave, and that would not be enough"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A cached set of weights (`name` is its digest) or a running engine (`name` is its instance_id).

    `num_bytes` is what evicting it would free; `last_used_at` is in epoch seconds; `held` says why it must stay ("3
    requests in flight", "pinned", "used by i-7f2") and is "" when it may be evicted. A higher `priority` leaves later.
    `num_waiting` requests wait for its model. `has_copy`: its bytes lie on a GPU of the same node as well. `saves_s`:
    seconds of waiting that evicting it is expected to cost (`policies/worth.py`), where the caller knows.
    """

    name: str
    num_bytes: int
    last_used_at: float
    priority: int = 0
    held: str = ""
    num_waiting: int = 0
    has_copy: bool = False
    saves_s: float = 0.0


class Ordering(Protocol):
    """The order of eviction by one algorithm, and what the algorithm remembers for it."""

    name: str
    rule: str  # what is evicted first, as a sentence
    unit: str  # unit of the scores: see Rival

    def used(self, name: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        """Note that `name` was asked for: it was present (`hit`), or has to be brought in now."""

    def left(self, name: str) -> None:
        """Note that `name` is gone, whether evicted by this order or not."""

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        """Return everything present with its score, the first to evict first. Ties break by name."""


def evict(ordering: Ordering, residents: Iterable[Resident], need_bytes: int, now_s: float) -> EvictDecision:
    """Choose what to evict so that at least `need_bytes` become free: the first in order that may be, until it is
    enough.

    All or nothing. Nothing `held` is chosen, and a lower `priority` leaves before a higher one. A victim that a later
    and larger one made needless is spared, the last chosen first (erratum E26).
    """
    everybody = list(residents)
    if need_bytes <= 0:
        return EvictDecision(reason="nothing has to be freed")
    ordered = sorted(ordering.order(everybody, now_s), key=lambda entry: entry[1].priority)
    may_go = [resident for _, resident in ordered if not resident.held and resident.num_bytes > 0]
    could_free = sum(resident.num_bytes for resident in may_go)
    if could_free < need_bytes:
        some = f"only {show_bytes(could_free)} may be freed" if could_free else "nobody may leave"
        reason = f"{show_bytes(need_bytes)} are lacking, and {some}"
        return EvictDecision(reason=reason, rivals=_rivals(ordering, ordered, frozenset()))
    victims = without_needless(first_enough(may_go, need_bytes), need_bytes)
    freed = sum(resident.num_bytes for resident in victims)
    names = tuple(resident.name for resident in victims)
    return EvictDecision(
        victims=names,
        freed_bytes=freed,
        need_bytes=need_bytes,
        reason=ordering.rule if len(may_go) > len(victims) else ONLY_ONE,
        rivals=_rivals(ordering, ordered, frozenset(names)),
    )


def first_enough(ordered: Sequence[Resident], need_bytes: int) -> list[Resident]:
    """The shortest prefix of `ordered` that holds `need_bytes`."""
    victims: list[Resident] = []
    freed = 0
    for resident in ordered:
        if freed >= need_bytes:
            break
        victims.append(resident)
        freed += resident.num_bytes
    return victims


def without_needless(victims: Sequence[Resident], need_bytes: int) -> list[Resident]:
    """The victims without those whose bytes are not needed; the last chosen are spared first."""
    surplus = sum(resident.num_bytes for resident in victims) - need_bytes
    kept: list[Resident] = []
    for resident in reversed(victims):
        if resident.num_bytes <= surplus:
            surplus -= resident.num_bytes
        else:
            kept.append(resident)
    return list(reversed(kept))


def _rivals(ordering: Ordering, ordered: Sequence[tuple[float, Resident]], chosen: frozenset[str]) -> tuple[Rival, ...]:
    stays = STAYS if chosen else NOT_ENOUGH
    return tuple(
        Rival(name=r.name, score=score, why="it leaves" if r.name in chosen else r.held or stays, unit=ordering.unit)
        for score, r in ordered
    )
