"""HydraServe section 6.1: the last window's arrivals and the queue over the batch; erratum E22."""

from dataclasses import replace

import pytest

from glowplug.domain.instance import InstanceState
from glowplug.policies.scaling.hydraserve import (
    ConsolidationKind,
    HydraserveParams,
    HydraserveState,
    consolidate,
    is_quiet,
    scale,
)
from glowplug.policies.scaling.port import ScalingView
from tests.fleet_builder import a_model, an_instance
from tests.unit.policies.scaling.rig import Asked, load, ready, starting


def test_the_queue_over_the_batch_says_how_many_are_needed_and_one_start_may_bring_four():
    decision = Asked(scale)(100.0, load(waiting=20))
    assert (decision.num_wanted, decision.group_size) == (3, 4)


@pytest.mark.parametrize(("literal", "expected", "beside_full"), [(False, 3, 4), (True, 2, 2)])
def test_arrivals_of_the_window_before_are_expected_again_unless_read_as_the_code_does(literal, expected, beside_full):
    params = HydraserveParams(literal_code=literal)
    asked = Asked(scale)
    asked(100.0, load(arrived=50, i1=8), ready(1), params=params)
    decision = asked(101.0, load(waiting=2, arrived=60, i1=8), ready(1), params=params)
    assert decision.num_wanted == expected, "10 came in that second: 2 waiting + 10 expected, or the 2 alone"
    assert decision.inputs["arrived"] == 10
    assert asked(101.5, load(waiting=8, arrived=60, i1=8), ready(1), params=params).num_wanted == beside_full


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
    assert asked(102.0, load(i1=1), ready(1)).inputs["arrived"] == 0, "it fell"


def test_a_window_closes_when_it_is_over_and_those_without_a_look_were_empty():
    params = HydraserveParams(num_windows=3, window_s=2.0)
    asked = Asked(scale)
    assert asked(100.0, load(arrived=100), params=params).inputs["arrived"] == 0
    assert asked(101.0, load(arrived=103), params=params).inputs["arrived"] == 0, "it is open"
    assert asked(106.0, load(arrived=130), params=params).inputs["arrived"] == 30
    assert asked(108.0, load(arrived=130), params=params).inputs["arrived"] == 0, "three empty ones"


@pytest.mark.parametrize("stood_until", [102.2, 110.2])
def test_windows_in_which_an_answer_stood_are_passed_over(stood_until):
    """The next arrival falls in the window that is open then."""
    params = HydraserveParams(window_s=2.0)
    asked = Asked(scale)
    asked(100.0, load(arrived=5), params=params)
    opened_at = stood_until - 0.2
    seen = [
        asked(opened_at + at_s, load(arrived=9), params=params, unchanged_until=until).inputs["arrived"]
        for at_s, until in ((0.5, stood_until), (1.9, 0.0), (2.0, 0.0))
    ]
    assert seen == [0, 0, 4]


@pytest.mark.parametrize(
    ("fields", "waiting", "quiet"),
    [
        ({"arrivals": (0, 0)}, 0, True),
        ({"arrivals": (0, 0)}, 1, False),
        ({"arrivals": (0, 3)}, 0, False),
        ({"arrivals": ()}, 0, False),
        ({"arrivals": (0, 0), "opened_at": 99.5}, 0, False),
    ],
)
def test_a_model_is_quiet_when_its_closed_windows_were_empty_and_nothing_runs(fields, waiting, quiet):
    view = ScalingView(now_s=100.0, model=a_model(), load=load(waiting))
    assert is_quiet(view, HydraserveState(**({"opened_at": 100.0} | fields))) is quiet


def test_what_fits_and_what_does_not_is_told():
    full = Asked(scale)
    assert full(100.0, load(waiting=8, i1=8), ready(1)).num_wanted == 2
    decision = full(100.5, load(waiting=9, i1=8), ready(1))
    said = "9 requests wait and none may come in 1 s, but only no slot of its instances is free"
    assert (decision.num_wanted, decision.reason) == (3, said)
    assert "1 slot of its instances is free" in full(100.6, load(waiting=9, i1=7), ready(1)).reason
    assert "2 slots of its instances are free" in full(100.7, load(waiting=9, i1=6), ready(1)).reason
    asked = Asked(scale)
    decision = asked(100.0, load(arrived=10, i1=1), ready(2))
    assert decision.reason == "1 request and none that may come fit 2 instances"
    decision = asked(101.0, load(arrived=18, i1=4), ready(2))
    assert decision.reason == "4 requests and 8 that may come fit 2 instances" and decision.num_required == 2
    assert "and 8 may come in 1 s" in asked(101.5, load(waiting=9, arrived=18, i1=4), ready(2)).reason


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
    assert Asked(scale, keep_alive_s=0)(100.0, load(i1=2), ready(2)).drain == ("i-2",)
    asked = Asked(scale, keep_alive_s=-1)
    assert [asked(at, load(i1=2), ready(2)).drain for at in (100.0, 1e6)] == [(), ()]


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


def test_a_pipeline_that_becomes_one_instance_leaves_the_next_one_fewer_to_be():
    rows = [an_instance(name, num_stages=num) for name, num in (("x", 4), ("y", 2), ("z", 2))]
    made = [(one.becomes, one.reason) for one in consolidate(rows, 1, 4)]
    assert made == [
        ("consolidate_down", "3 of 4 wanted instances are missing, so one instance is made of its stages"),
        ("consolidate_up", "2 of 4 wanted instances are missing, so each of its 2 stages becomes an instance"),
        ("consolidate_down", "none of 4 wanted instances is missing, so one instance is made of its stages"),
    ]
    (one,) = consolidate(rows[:1], 1, 2)
    assert one.reason.startswith("1 of 2 wanted instances is missing")
    (one,) = consolidate(rows[:1], 3, 2)
    assert one.reason.startswith("none of 2 wanted instances is missing")
