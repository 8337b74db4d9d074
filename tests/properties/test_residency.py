"""What must hold of every residency policy, whatever it is asked."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.decisions import EvictDecision
from glowplug.policies.residency import lru
from glowplug.policies.residency.resident import Resident

POLICIES: list[Callable[..., EvictDecision]] = [lru.evict]

residents = st.lists(
    st.builds(
        Resident,
        name=st.text("abcdef", min_size=1, max_size=4),
        num_bytes=st.integers(0, 1000),
        last_used_at=st.floats(0, 100),
        priority=st.integers(0, 2),
        held=st.sampled_from(["", "", "in use"]),
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
