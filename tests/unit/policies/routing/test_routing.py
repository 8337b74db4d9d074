"""The three routing baselines: whom they choose, that they skip full instances, that ties break by id."""

import pytest

from glowplug.domain.snapshot import Target
from glowplug.policies.routing.counted import Choose, fewest, first_known, least_used, next_by_id

ALL = [fewest, next_by_id, least_used]


def test_least_loaded_counts_requests_not_shares() -> None:
    """PreServe section 3.2.2: LR routes to the instance with the fewest active requests."""
    targets = [Target("a", 3, 100), Target("b", 2, 4)]
    assert fewest(targets).instance_id == "b"


def test_minimum_use_counts_shares_not_requests() -> None:
    """PreServe section 3.2.2: MU routes to the instance that is used least."""
    targets = [Target("a", 3, 100), Target("b", 2, 4)]
    assert least_used(targets).instance_id == "a"


def test_round_robin_goes_on_after_the_last_and_wraps() -> None:
    targets = [Target("b", 0, 4), Target("a", 0, 4), Target("c", 0, 4)]
    chosen, last = [], ""
    for _ in range(4):
        last = next_by_id(targets, last).instance_id
        chosen.append(last)
    assert chosen == ["a", "b", "c", "a"]


def test_round_robin_skips_a_full_instance() -> None:
    assert next_by_id([Target("a", 0, 1), Target("b", 1, 1), Target("c", 0, 1)], "a").instance_id == "c"


def test_the_first_is_filled_before_the_second_has_any() -> None:
    """HydraServe, its code."""
    assert first_known([Target("b", 3, 4), Target("a", 0, 4)]).instance_id == "b"
    assert first_known([Target("b", 4, 4), Target("a", 0, 4)]).instance_id == "a"


@pytest.mark.parametrize("choose", [*ALL, first_known])
def test_no_free_slot_means_hold(choose: Choose) -> None:
    decision = choose([Target("a", 4, 4), Target("b", 9, 4)])
    assert decision.instance_id == "" and "as many requests as it may" in decision.reason


@pytest.mark.parametrize("choose", ALL)
def test_ties_break_by_id(choose: Choose) -> None:
    assert choose([Target("z", 1, 4), Target("b", 1, 4), Target("m", 1, 4)]).instance_id == "b"


@pytest.mark.parametrize("choose", [*ALL, first_known])
def test_no_targets_means_hold(choose: Choose) -> None:
    assert choose([]).instance_id == ""
