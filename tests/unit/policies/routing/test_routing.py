"""The three routing baselines: whom they choose, that they skip full instances, that ties break by id."""

import pytest

from glowplug.domain.snapshot import Target
from glowplug.policies.routing import first_room, least_loaded, minimum_use, round_robin

FIRST = first_room.route
ALL = [least_loaded.route, round_robin.route, minimum_use.route]


def test_least_loaded_counts_requests_not_shares() -> None:
    """PreServe section 3.2.2: LR routes to the instance with the fewest active requests."""
    targets = [Target("a", 3, 100), Target("b", 2, 4)]
    assert least_loaded.route(targets).instance_id == "b"


def test_minimum_use_counts_shares_not_requests() -> None:
    """PreServe section 3.2.2: MU routes to the instance that is used least."""
    targets = [Target("a", 3, 100), Target("b", 2, 4)]
    assert minimum_use.route(targets).instance_id == "a"


def test_round_robin_goes_on_after_the_last_and_wraps() -> None:
    targets = [Target("b", 0, 4), Target("a", 0, 4), Target("c", 0, 4)]
    chosen, last = [], ""
    for _ in range(4):
        last = round_robin.route(targets, state=last).instance_id
        chosen.append(last)
    assert chosen == ["a", "b", "c", "a"]


def test_round_robin_skips_a_full_instance() -> None:
    assert round_robin.route([Target("a", 0, 1), Target("b", 1, 1), Target("c", 0, 1)], state="a").instance_id == "c"


def test_the_first_is_filled_before_the_second_has_any() -> None:
    """HydraServe, its code."""
    assert FIRST([Target("b", 3, 4), Target("a", 0, 4)]).instance_id == "b"
    assert FIRST([Target("b", 4, 4), Target("a", 0, 4)]).instance_id == "a"


@pytest.mark.parametrize("route", [*ALL, FIRST])
def test_no_room_means_hold(route) -> None:  # type: ignore[no-untyped-def]
    decision = route([Target("a", 4, 4), Target("b", 9, 4)])
    assert decision.instance_id == "" and "as many requests as it may" in decision.reason


@pytest.mark.parametrize("route", ALL)
def test_ties_break_by_id(route) -> None:  # type: ignore[no-untyped-def]
    assert route([Target("z", 1, 4), Target("b", 1, 4), Target("m", 1, 4)]).instance_id == "b"


@pytest.mark.parametrize("route", [*ALL, FIRST])
def test_no_targets_means_hold(route) -> None:  # type: ignore[no-untyped-def]
    assert route([]).instance_id == ""
