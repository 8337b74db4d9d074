"""The order of evicting weights or engines, by algorithms with a small memory (`Ordering`).

The caller reports uses and departures. `evict` applies the common rules of eligibility and number. mCache section 6.3
compares its importance with others: LRU and LFU are policies here, the rest in bench/papers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from glowplug.domain.decision import Rival
from glowplug.domain.units import show_bytes
from glowplug.policies.decisions import EvictDecision

ONLY_ONE = "no other may leave"
STAYS = "it stays: enough is free without it"
NOT_ENOUGH = "it might leave, and that would not be enough"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """A cached set of weights (`name` is its digest) or a running engine (`name` is its instance_id).

    `num_bytes` is freed by evicting it; `last_used_at` is in epoch seconds; `held` says why it must stay ("pinned"), or
    is "". Higher `priority` leaves later. `has_copy`: also on a GPU of the node. `saves_s`: seconds of waiting that
    evicting it costs (`policies/worth.py`), where known."""

    name: str
    num_bytes: int
    last_used_at: float
    priority: int = 0
    held: str = ""
    num_waiting: int = 0
    has_copy: bool = False
    saves_s: float = 0.0


class Ordering(Protocol):
    """One algorithm's order of eviction, with its memory."""

    name: str
    rule: str
    unit: str

    def used(self, name: str, num_bytes: int, now_s: float, *, hit: bool) -> None:
        """Note a use: present (`hit`), or to be loaded."""

    def left(self, name: str) -> None:
        """Note that `name` is gone."""

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        """Return everything with its score, first to evict first. Ties break by name."""


def evict(ordering: Ordering, residents: Iterable[Resident], need_bytes: int, now_s: float) -> EvictDecision:
    """Choose victims in order for at least `need_bytes`, or none. Never `held` ones; lower `priority` first. Victims
    made needless by a later, larger one are spared, the last chosen first (erratum E26)."""
    everybody = list(residents)
    if need_bytes <= 0:
        return EvictDecision(reason="nothing needs to be freed")
    ordered = sorted(ordering.order(everybody, now_s), key=lambda entry: entry[1].priority)
    may_go = [resident for _, resident in ordered if not resident.held and resident.num_bytes > 0]
    could_free = sum(resident.num_bytes for resident in may_go)
    if could_free < need_bytes:
        some = f"only {show_bytes(could_free)} may be freed" if could_free else "none may leave"
        reason = f"{show_bytes(need_bytes)} are missing, and {some}"
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
    victims: list[Resident] = []
    freed = 0
    for resident in ordered:
        if freed >= need_bytes:
            break
        victims.append(resident)
        freed += resident.num_bytes
    return victims


def without_needless(victims: Sequence[Resident], need_bytes: int) -> list[Resident]:
    """Spare needless victims, the last chosen first."""
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
