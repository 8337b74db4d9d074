"""What must hold of every eviction policy, whatever it is asked."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.caching.mcache_importance import Importance, ImportanceParams
from glowplug.policies.caching.ordering import Resident
from glowplug.policies.decisions import EvictDecision
from glowplug.policies.registry import KINDS

POLICIES: list[Callable[..., EvictDecision]] = list(KINDS["eviction"].values())

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
