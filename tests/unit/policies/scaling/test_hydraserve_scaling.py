"""HydraServe section 6.1: the last window's arrivals and the queue over the batch; erratum E22."""

from dataclasses import replace

import pytest

from glowplug.domain.instance import InstanceState
from glowplug.policies.scaling.hydraserve import ConsolidationKind, HydraserveParams, consolidate, scale
from tests.fleet_builder import an_instance
from tests.unit.policies.scaling.rig import Asked, load, ready, starting


def test_the_queue_over_the_batch_says_how_many_are_needed_and_one_start_may_bring_four():
    decision = Asked(scale)(100.0, load(waiting=20))
    assert (decision.num_wanted, decision.group_size) == (3, 4)


@pytest.mark.parametrize(("literal", "expected"), [(False, 3), (True, 2)])
def test_arrivals_of_the_window_before_are_expected_again_unless_read_as_the_code_does(literal, expected):
    params = HydraserveParams(literal_code=literal)
    asked = Asked(scale)
    asked(100.0, load(arrived=50, i1=8), ready(1), params=params)
    decision = asked(101.0, load(waiting=2, arrived=60, i1=8), ready(1), params=params)
    assert decision.num_wanted == expected, "10 came in that second: 2 waiting + 10 expected, or the 2 alone"
    assert decision.inputs["arrived"] == 10


def test_the_busiest_of_several_windows_may_be_expected():
    params = HydraserveParams(num_windows=3)
    asked = Asked(scale)
    for second, arrived in enumerate((0, 30, 31, 32)):
        decision = asked(100.0 + second, load(waiting=1, arrived=arrived + 100, i1=8), ready(1), params=params)
    assert decision.inputs["arrived"] == 30 and decision.num_wanted == 1 + 4
    decision = asked(104.0, load(waiting=1, arrived=132, i1=8), ready(1), params=params)
    assert decision.inputs["arrived"] == 1, "the busy one is no longer among the last three"


def test_without_a_count_of_arrivals_the_growth_of_demand_stands_for_it():
    asked = Asked(scale)
    asked(100.0, load(i1=2), ready(1))
    assert asked(101.0, load(i1=8), ready(1)).inputs["arrived"] == 6


def test_requests_that_fit_what_runs_or_comes_need_no_new_worker():
    assert Asked(scale)(100.0, load(waiting=5, i1=3), ready(1)).num_wanted == 1
    assert Asked(scale)(100.0, load(waiting=8, i1=8), [*ready(1), starting(max_concurrency=8)]).num_wanted == 2
    assert Asked(scale)(100.0, load(waiting=8, i1=8), ready(1), num_pending=1).num_wanted == 2


def test_a_pipeline_takes_a_batch_for_each_stage():
    """Section 6.1 with mechanism (9): 8 x s while pipelined."""
    (group,) = ready(1, num_stages=4, max_concurrency=32)
    decision = Asked(scale)(100.0, load(waiting=4, i1=28), [group])
    assert (decision.num_wanted, decision.num_required) == (4, 4)
    assert Asked(scale)(100.0, load(waiting=4, i1=4), [group]).num_required == 1


def test_each_instance_goes_when_it_has_run_nothing_for_its_keep_alive():
    """Section 8.1: 30 s each."""
    asked = Asked(scale)
    asked(100.0, load(i1=2, i2=0), ready(2))
    assert asked(129.0, load(i1=2, last_active_at=129.0), ready(2)).drain == ()
    assert asked(130.0, load(i1=2, last_active_at=130.0), ready(2)).drain == ("i-2",)
    assert asked(131.0, load(i1=2, i2=1, last_active_at=131.0), ready(2)).drain == (), "it runs again"


def test_a_stage_that_serves_for_itself_stays_as_long_as_its_pipeline():
    """Section 6.2, scale up."""

    def drained(*instances):
        asked = Asked(scale)
        asked(60.0, load(), [*instances])
        return asked(100.0, load(), [*instances]).drain

    first, later = (*ready(1, num_stages=2, max_concurrency=16), an_instance("i-1.1", max_concurrency=8))
    assert drained(later, first) == ("i-1",)
    assert drained(later, replace(first, state=InstanceState.DRAINING)) == ()
    assert drained(later) == ("i-1.1",)


@pytest.mark.parametrize("bounds", [{"max_instances": 1}, {"suspended": True}])
def test_what_must_go_goes_behind_its_pipeline_too(bounds):
    first, later = (*ready(1, num_stages=2, max_concurrency=16), an_instance("i-1.1", max_concurrency=8))

    def drained(*instances):
        return Asked(scale, **bounds)(100.0, load(i1=2), [*instances]).drain

    assert drained(later, first) == ("i-1",)
    assert drained(later, replace(first, num_stages=1, stages_busy=True)) == ("i-1",)
    assert drained(later) == (("i-1.1",) if "suspended" in bounds else ()), "in the next pass"


@pytest.mark.parametrize(
    ("required", "whole", "expected"),
    [(1, 0, "DD"), (3, 0, "DD"), (4, 0, "UD"), (5, 0, "UD"), (8, 0, "UU"), (8, 4, "UD"), (8, 5, "DD")],
)
def test_pipelines_are_decided_on_together_oldest_first(required, whole, expected):
    """Section 6.1: each becomes one instance (down), or one of each stage (up)."""
    pipelines = [an_instance(name, num_stages=4, max_concurrency=32, created_at=1.0) for name in ("x", "y")]
    made = consolidate(pipelines, whole, required)
    wanted = [ConsolidationKind.UP if letter == "U" else ConsolidationKind.DOWN for letter in expected]
    assert [d.becomes for d in made] == wanted and [d.instance_id for d in made] == ["x", "y"]
