"""mCache, evaluation baselines: LRU removes the least recently used item when the cache is full."""

import pytest

from glowplug.policies.caching.ordering import Resident
from glowplug.policies.eviction.lru import LruParams, evict


def resident(name: str, num_bytes: int, last_used_at: float, *, held: str = "", priority: int = 0) -> Resident:
    return Resident(name=name, num_bytes=num_bytes, last_used_at=last_used_at, held=held, priority=priority)


def test_oldest_leave_first_until_enough() -> None:
    decision = evict([resident("c", 10, 3), resident("a", 10, 1), resident("b", 10, 2)], 15)
    assert decision.victims == ("a", "b")
    assert decision.freed_bytes == 20


def test_held_never_leave() -> None:
    decision = evict([resident("a", 10, 1, held="pinned"), resident("b", 10, 2)], 10)
    assert decision.victims == ("b",)
    assert [r.why for r in decision.rivals] == ["pinned", "it leaves"]


def test_not_enough_evicts_nobody() -> None:
    decision = evict([resident("a", 10, 1), resident("b", 10, 2, held="in use")], 11)
    assert decision.victims == ()
    assert decision.freed_bytes == 0
    assert "11 B are lacking, and only 10 B may be freed" in decision.reason
    assert {r.why for r in decision.rivals} == {"in use", "it might leave, and that would not be enough"}


def test_priority_goes_before_age_and_name_breaks_ties() -> None:
    residents = [resident("old", 10, 1, priority=1), resident("z", 10, 5), resident("y", 10, 5)]
    assert evict(residents, 10).victims == ("y",)


@pytest.mark.parametrize(("spare", "victims"), [(True, ("big",)), (False, ("small", "big"))])
def test_a_large_victim_spares_the_small_ones_before_it(spare: bool, victims: tuple[str, ...]) -> None:
    residents = [resident("small", 5, 1), resident("big", 100, 2)]
    assert evict(residents, 50, LruParams(spare=spare)).victims == victims


@pytest.mark.parametrize("need_bytes", [0, -1])
def test_nothing_needed_evicts_nobody(need_bytes: int) -> None:
    assert evict([resident("a", 10, 1)], need_bytes).victims == ()
