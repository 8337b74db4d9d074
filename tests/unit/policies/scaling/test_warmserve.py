"""WarmServe section 3 and its authors' constants: load of 5 s against 0.8 and 0.5."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.instance import InstanceState
from glowplug_lab.policies.warmserve_scaling import Level, one_way, scale
from tests.unit.policies.scaling.rig import Asked, load, ready, starting


def after_5s(asked, demand, instances, **given):
    for tick in range(11):
        decision = asked(100.0 + tick / 2, demand, instances, **given)
    return decision


def test_above_eighty_percent_it_grows_to_where_eighty_percent_is_enough():
    """ceil(L / 0.8 / B): 13 requests on two of 8 are 0.81, and want ceil(13 / 6.4) = 3."""
    assert after_5s(Asked(scale), load(i1=7, i2=6), ready(2)).num_wanted == 3
    assert after_5s(Asked(scale), load(i1=6, i2=6), ready(2)).num_wanted == 2, "0.75: left as it is"


def test_below_fifty_percent_it_shrinks_to_where_fifty_percent_is_reached():
    """ceil(L / 0.5 / B): 5 requests on two of 8 are 0.31, and want ceil(5 / 4) = 2; 4 want 1."""
    assert after_5s(Asked(scale), load(i1=3, i2=2), ready(2)).drain == ()
    decision = after_5s(Asked(scale), load(i1=3, i2=1), ready(2))
    assert decision.drain == ("i-2",), "the least loaded goes"


def test_the_load_is_its_mean_of_five_seconds():
    asked = Asked(scale)
    after_5s(asked, load(i1=8, i2=8), ready(2))
    assert asked(105.5, load(i1=0, i2=0), ready(2)).drain == (), "a gap of half a second is no lull"
    for tick in range(1, 11):
        decision = asked(105.5 + tick / 2, load(), ready(2))
    assert "i-2" in decision.drain


def test_an_instance_is_protected_for_five_seconds():
    asked = Asked(scale)
    pair = [*ready(1), *ready(1, first=2, created_at=103.0)]
    assert after_5s(asked, load(i1=1), pair).drain == (), "the least loaded one is 2 s old, the other is needed"
    assert asked(108.1, load(i1=1), pair).drain == ("i-2",)


def test_a_request_that_finds_no_slot_starts_one_at_once_unless_one_is_coming():
    """Section 6."""
    asked = Asked(scale)
    after_5s(asked, load(i1=5), ready(1))
    full = load(waiting=1, i1=8)
    assert asked(105.1, full, ready(1)).num_wanted == 2
    assert asked(105.2, full, ready(1), num_pending=1).num_wanted <= 2
    assert asked(105.3, full, [*ready(1), starting()]).num_wanted == 2


def test_the_first_request_of_a_cold_model_starts_one():
    assert Asked(scale)(100.0, load(waiting=1)).num_wanted == 1


def test_between_looks_nothing_changes():
    asked = Asked(scale)
    assert asked(100.0, load(i1=5), ready(1)).num_wanted == 1
    assert asked(100.2, load(i1=8), ready(1)).num_wanted == 1, "looked at every 0.5 s"
    assert asked(100.5, load(i1=8), ready(1)).num_wanted in (1, 2)


def test_what_is_pending_counts_so_that_it_is_neither_asked_twice_nor_cancelled():
    asked = Asked(scale)
    assert after_5s(asked, load(i1=7), ready(1)).num_wanted == 2
    assert asked(105.5, load(i1=7), ready(1), num_pending=1).num_wanted == 2


def test_the_last_one_goes_by_its_keep_alive_and_at_once_where_that_is_nothing():
    busy = load(last_active_at=99.0)
    assert after_5s(Asked(scale), busy, ready(1)).drain == ()
    assert after_5s(Asked(scale, keep_alive_s=0.0), busy, ready(1)).drain == ("i-1",)


@given(st.lists(st.tuples(st.floats(0.05, 3.0), st.integers(0, 50)), min_size=1, max_size=30))
def test_a_level_is_its_mean_weighted_by_time(steps):
    """Exact at the marks; the grain is 0.25 s over a span of five."""
    level, now_s, history = Level(), 100.0, []
    for gap, value in steps:
        level = level.seen(now_s, value, 5.0, 0.25)
        history.append((now_s, value))
        now_s += gap
    begin = max(now_s - 5.0, 100.0)
    ends = [at for at, _ in history[1:]] + [now_s]
    total = sum(v * max(0.0, end - max(at, begin)) for (at, v), end in zip(history, ends, strict=True))
    assert level.mean(now_s, 5.0) == pytest.approx(total / (now_s - begin), abs=50 * 0.25 / 5.0)
    assert len(level.marks) <= 5.0 / 0.25 + 3


def test_what_drains_comes_back_first_or_to_the_letter_never():
    """Section 4.1: instances in their grace period "no longer receive additional requests"."""
    fleet = ready(1) + ready(1, first=2, state=InstanceState.DRAINING)
    full = load(waiting=3, i1=8)
    assert Asked(scale)(100.0, full, fleet).resume == ("i-2",)
    decision = Asked(one_way)(100.0, full, fleet)
    assert decision.resume == ()
    assert decision.num_wanted == 2, "so another one starts"
