"""Invariants of the policies of kinds `eviction` and `caching`."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.caching.mcache_importance import CacheFacts, Importance, ImportanceParams
from glowplug.policies.caching.ordering import Resident, evict
from glowplug.policies.decisions import EvictDecision
from glowplug.policies.registry import choose, installed

POLICIES: list[Callable[..., EvictDecision]] = [choose("eviction", name) for name in installed("eviction")]

residents = st.lists(
    st.builds(
        Resident,
        name=st.text("abcdef", min_size=1, max_size=4),
        num_bytes=st.integers(0, 1000),
        last_used_at=st.floats(0, 100),
        priority=st.integers(0, 2),
        held=st.sampled_from(["", "", "in use"]),
        num_waiting=st.integers(0, 5),
    ),
    unique_by=lambda r: r.name,
    max_size=12,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(residents=residents, need_bytes=st.integers(-10, 4000))
def test_all_or_nothing_and_never_the_held(
    policy: Callable[..., EvictDecision], residents: list[Resident], need_bytes: int
) -> None:
    decision = policy(residents, need_bytes)
    by_name = {r.name: r for r in residents}
    freed = sum(by_name[name].num_bytes for name in decision.victims)
    assert len(set(decision.victims)) == len(decision.victims)
    assert not any(by_name[name].held for name in decision.victims)
    assert freed == decision.freed_bytes
    could_free = sum(r.num_bytes for r in residents if not r.held)
    if 0 < need_bytes <= could_free:
        assert freed >= need_bytes
        assert all(freed - by_name[name].num_bytes < need_bytes for name in decision.victims)
    else:
        assert decision.victims == ()


@pytest.mark.parametrize("policy", POLICIES)
@given(residents=residents, need_bytes=st.integers(1, 4000), chance=st.randoms(use_true_random=False))
def test_the_order_they_are_listed_in_changes_nothing(
    policy: Callable[..., EvictDecision], residents: list[Resident], need_bytes: int, chance: Random
) -> None:
    turned = list(residents)
    chance.shuffle(turned)
    one, other = policy(residents, need_bytes), policy(turned, need_bytes)
    assert (one.victims, one.freed_bytes, one.reason) == (other.victims, other.freed_bytes, other.reason)


@given(
    uses=st.lists(st.floats(0, 500), min_size=1, max_size=8),
    num_bytes=st.integers(1, 1000),
    penalty_s=st.floats(0.1, 100),
    spread=st.sampled_from([1.0, 10.0]),
)
def test_a_model_is_worth_more_the_more_often_it_is_asked_for_the_dearer_a_miss_and_the_smaller_it_is(
    uses: list[float], num_bytes: int, penalty_s: float, spread: float
) -> None:
    """mCache Eq. 1: utility = P / S 1 / T."""

    def utility(times: list[float], penalty: float, size: int, at_s: float = 600.0) -> float:
        order = Importance(lambda name, num: penalty, ImportanceParams(spread=spread))
        for now_s in times:
            order.used("m", size, now_s, hit=True)
        return order.utility(Resident(name="m", num_bytes=size, last_used_at=0.0), at_s)

    uses = sorted(uses)
    here = utility(uses, penalty_s, num_bytes)
    assert here > 0
    assert utility([*uses, max(uses)], penalty_s, num_bytes) > here
    assert utility(uses, penalty_s * 2, num_bytes) > here
    assert utility(uses, penalty_s, num_bytes + 1) < here
    assert utility(uses, penalty_s, num_bytes, 700.0) < here, "and less the longer ago that was"


# caches

CAPACITY = 100
NAMES = "abcdefgh"
SIZES = dict(zip(NAMES, (10, 20, 30, 40, 50, 60, 100, 1), strict=True))

asks = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 100)), max_size=60)
holds = st.frozensets(st.sampled_from(NAMES), max_size=3)


@pytest.mark.parametrize("caching", installed("caching"))
@given(asks=asks, held=holds, dropped=st.sets(st.integers(0, 59), max_size=5))
def test_held_stay_bytes_fit_and_the_same_asks_give_the_same_victims(
    caching: str, asks: list[tuple[str, float]], held: frozenset[str], dropped: set[int]
) -> None:
    assert play(caching, asks, held, dropped) == play(caching, asks, held, dropped)


def play(caching: str, asks: list[tuple[str, float]], held: frozenset[str], dropped: set[int]) -> list[str]:
    """Returns the victims in order."""
    facts = CacheFacts(penalty_s=lambda name, num_bytes: 1.0 + ord(name) % 3)
    memory = choose("caching", caching)(facts)
    present: dict[str, float] = {}
    victims: list[str] = []
    now_s = 0.0
    for at, (name, later_s) in enumerate(asks):
        now_s += later_s
        if at in dropped and present:
            gone = min(present)
            del present[gone]
            memory.left(gone)
        memory.used(name, SIZES[name], now_s, hit=name in present)
        if name not in present:
            residents = [
                Resident(name=n, num_bytes=SIZES[n], last_used_at=used, held="in use" if n in held else "")
                for n, used in present.items()
            ]
            need_bytes = SIZES[name] - (CAPACITY - sum(r.num_bytes for r in residents))
            decision = evict(memory, residents, need_bytes, now_s)
            assert not set(decision.victims) & held
            assert evict(memory, residents[::-1], need_bytes, now_s) == decision, "whatever order they are listed in"
            assert {r.name for r in decision.rivals} in (set(), set(present))
            if need_bytes > 0 and not decision.victims:
                memory.left(name)
                continue
            for victim in decision.victims:
                del present[victim]
                memory.left(victim)
            victims += decision.victims
        present[name] = now_s
        assert sum(SIZES[n] for n in present) <= CAPACITY
    return victims
