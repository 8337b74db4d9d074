"""Scaling policies: Llumnix-like, static and union."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Slo
from glowplug.policies.registry import choose, installed
from glowplug.policies.scaling import baselines, hydraserve, union
from glowplug.policies.scaling.port import ScalingView
from glowplug_lab.policies import llumnix_like, muxserve_like
from tests.fleet_builder import a_model, an_instance
from tests.unit.policies.scaling.rig import Asked, a_forecast, load, outlooks, ready, starting

COPY = an_instance("p-1", state=InstanceState.PREWARMED, replica=True)
MU = {"prompt_per_s": 10.0, "response_per_s": 5.0, "total_per_s": 12.0}


def held(asked, demand, instances, seconds=5.0, **given):
    """The decision after `seconds` of the same."""
    for tick in range(int(seconds * 2) + 1):
        decision = asked(100.0 + tick / 2, demand, instances, **given)
    return decision


def test_llumnix_like_grows_when_the_steps_left_are_few_for_a_while():
    """Freeness (M - sum V) / B: (1 - 0.95) x 1000 / 8 = 6 steps, below 10."""
    tight = outlooks(load(i1=8), i1=(0.95, 0.1))
    assert held(Asked(llumnix_like.scale), tight, ready(1, kv_tokens=1000), 4.0).num_wanted == 1
    assert held(Asked(llumnix_like.scale), tight, ready(1, kv_tokens=1000)).num_wanted == 2
    roomy = outlooks(load(i1=8), i1=(0.8, 0.0))
    assert held(Asked(llumnix_like.scale), roomy, ready(1, kv_tokens=1000)).num_wanted == 1, "25 steps: in range"


def test_llumnix_like_shrinks_by_the_one_with_the_fewest_requests_when_much_is_free():
    loose = outlooks(load(i1=2, i2=1), i1=(0.2, 0.0), i2=(0.1, 0.0))
    assert held(Asked(llumnix_like.scale), loose, ready(2, kv_tokens=1000)).drain == ("i-2",)


def test_llumnix_like_without_a_look_ahead_goes_by_the_share_of_the_batch():
    assert held(Asked(llumnix_like.scale), load(i1=8, i2=7), ready(2)).num_wanted == 3
    assert held(Asked(llumnix_like.scale), load(i1=2, i2=1), ready(2)).drain == ("i-2",)
    assert held(Asked(llumnix_like.scale), load(i1=4, i2=4), ready(2)).num_wanted == 2


def test_llumnix_like_waits_for_one_that_is_coming():
    decision = held(Asked(llumnix_like.scale), load(i1=8), [*ready(1), starting()], 20.0)
    assert decision.num_wanted == 2


def test_static_is_the_minimum_whatever_the_load():
    asked = Asked(baselines.static, min_instances=3)
    assert asked(100.0, load()).num_wanted == 3
    assert asked(100.0, load(waiting=100), ready(3)).num_wanted == 3
    assert Asked(baselines.static)(100.0, load(waiting=1)).num_wanted == 1, "a model with no minimum can answer"
    assert Asked(baselines.static)(100.0, load()).num_wanted == 0


def test_muxserve_like_has_one_of_every_model_before_anybody_asks_and_lets_none_go():
    """WarmServe section 7.1: "LLM serving instances are created in prior"."""
    asked = Asked(muxserve_like.scale)
    assert asked(100.0, load()).num_wanted == 1
    after_a_day = asked(86_400.0, load(), ready(1))
    assert (after_a_day.num_wanted, after_a_day.drain) == (1, ())
    assert asked(86_401.0, load(waiting=100), ready(1)).num_wanted == 1
    assert Asked(muxserve_like.scale, min_instances=3)(100.0, load()).num_wanted == 3


def test_what_is_expected_neither_brings_the_first_instance_nor_keeps_the_last():
    """PreServe keeps one while anything is expected (erratum E32)."""
    little, much = a_forecast(250, 50, **MU), a_forecast(2500, 500, **MU)
    assert Asked(union.scale)(100.5, load(), forecast=little).num_wanted == 0
    asked, idle = Asked(union.scale), load(last_active_at=100.0)
    assert asked(100.0, idle, ready(1), forecast=little).drain == ()
    assert asked(129.0, idle, ready(1), forecast=little).drain == ()
    assert asked(131.0, idle, ready(1), forecast=little).drain == ("i-1",)
    assert Asked(union.scale)(100.5, load(), forecast=much).num_wanted == 3
    assert Asked(union.scale)(131.0, load(i1=1), ready(1), forecast=little).num_wanted == 1


def test_the_union_is_the_larger_of_plan_and_demand():
    plan = a_forecast(2500, 500, **MU)
    assert Asked(union.scale)(100.5, load(i1=1), ready(1), forecast=plan).num_wanted == 3, "PreServe's plan"
    assert Asked(union.scale)(100.5, load(waiting=33), ready(3), forecast=plan).num_wanted >= 5, "what is here now"
    decision = held(Asked(union.scale), load(i1=7, i2=7, i3=7), ready(3), forecast=plan)
    assert decision.num_wanted == 3, "nearly full is not full: WarmServe's four fifths are no reason here"


def test_a_plan_waits_until_another_model_is_less_probably_in_want_of_gpus():
    """Ours. A model that lacked GPUs t ago lacks them again within its window of 100 s with 100 / (100 + t)."""
    asked, plan = Asked(union.scale), a_forecast(2500, 500, **MU)
    assert asked(100.5, load(i1=1), ready(1), forecast=plan, short_elsewhere=True).num_wanted == 1
    assert asked(101.0, load(waiting=9, i1=8), ready(1), forecast=plan, short_elsewhere=True).num_wanted == 3, (
        "9 + 8 over 8"
    )
    assert asked(200.5, load(i1=1), ready(1), forecast=plan).num_wanted == 1, "99.5 s ago"
    assert asked(201.0, load(i1=1), ready(1), forecast=plan).num_wanted == 3


@pytest.mark.parametrize(("window_s", "held_s"), [(None, 600.0), (0.0, 600.0), (1.0, 1.0)])
def test_an_instance_more_for_a_full_cache_waits_as_long_for_the_gpus_of_another_model(window_s, held_s):
    """PreServe's window where none is known."""
    told = None if window_s is None else a_forecast(100, 10, window_s=window_s)
    full = outlooks(load(i1=1), i1=(1.0, 0.5))
    for after_s, wanted in ((held_s - 0.1, 1), (held_s, 2)):
        asked = Asked(union.scale)
        asked(100.0, load(i1=1), ready(1), forecast=told, short_elsewhere=True)
        decision = asked(100.0 + after_s, full, ready(1), forecast=told)
        assert (decision.num_wanted, decision.inputs["planned"]) == (wanted, -1)


def test_the_union_lets_a_start_bring_a_group():
    decision = Asked(union.scale)(100.0, load(waiting=20))
    assert (decision.num_wanted >= 3, decision.group_size) == (True, 4)
    assert decision.reason.startswith("20 requests wait")


def test_the_union_counts_on_arrivals_only_when_requests_wait_already():
    asked = Asked(union.scale)
    asked(100.0, load(arrived=10, i1=4), ready(1))
    assert asked(101.0, load(arrived=30, i1=6), ready(1)).num_wanted == 1
    asked = Asked(union.scale)
    asked(100.0, load(arrived=10, i1=8), ready(1))
    short = load(waiting=1, arrived=30, i1=8)
    assert asked(101.0, short, [*ready(1), COPY]).num_wanted == 1 + 3, "1 waiting + 20 expected"
    asked = Asked(union.scale)
    asked(100.0, load(arrived=10, i1=8), ready(1))
    assert asked(101.0, short, ready(1)).num_wanted == 2, "no copy of it lies prewarmed: a start is a fetch"


PRICED = union.UnionParams(price=0.005)


def started(num, took_s=0.5):
    """READY instances, started from host memory in this time."""
    return ready(num, created_at=50.0, ready_at=50.0 + took_s, start_kind="cached")


def test_the_union_keeps_what_was_planned_through_a_lull_and_lets_go_with_the_plan():
    asked, plan = Asked(union.scale), a_forecast(2500, 500, **MU)
    assert held(asked, load(last_active_at=99.0), started(3), forecast=plan, seconds=100.0).drain == ()
    over = a_forecast(0, 0, made_at=200.0, starts_at=200.0, **MU)
    idle = load(i3=1, last_active_at=199.0)
    assert asked(200.5, idle, started(3), forecast=over).drain == ("i-1", "i-2"), "idle for 100 s"


def test_a_spare_instance_of_the_union_goes_when_it_has_run_nothing_for_the_keep_alive():
    """HydraServe section 8.1: 30 s, or the model's own value; 10 s if endless."""
    for keep_alive_s, held_s in ((30.0, 30.0), (5.0, 5.0), (0.5, 0.5), (0.0, 0.0), (-1.0, 10.0)):
        asked = Asked(union.scale, keep_alive_s=keep_alive_s)
        asked(100.0, load(i1=8, i2=8), started(2))
        spare = load(i1=1, last_active_at=1e6)
        drained = [asked(105.0 + t / 2, spare, started(2), params=PRICED).drain for t in range(100)]
        first = next(n for n, gone in enumerate(drained) if gone)
        assert drained[first] == ("i-2",)
        assert first / 2 == held_s


def test_a_spare_instance_of_the_union_stays_while_it_is_worth_its_gpus():
    """c / (t + c) >= 0.005 for each GPU: 199 times the start time on one, 99 on two."""
    for took_s, num_gpus, stays_s in ((1.0, 1, 199.0), (0.5, 1, 99.5), (1.0, 2, 99.0)):
        asked, rows = Asked(union.scale, keep_alive_s=30.0, num_gpus=num_gpus), started(2, took_s)
        asked(100.0, load(i1=8, i2=8), rows, params=PRICED)
        spare = load(i1=1, i2=1, last_active_at=1e6)
        drained = [asked(100.0 + t, spare, rows, params=PRICED).drain for t in range(300)]
        first = next(at for at, gone in enumerate(drained) if gone)
        assert len(drained[first]) == 1
        assert first == pytest.approx(stays_s, abs=1.5)


@pytest.mark.parametrize(("min_instances", "becomes"), [(0, "consolidate_down"), (4, "consolidate_up")])
def test_a_pipeline_grows_for_what_is_needed_and_not_for_what_may_be_kept(min_instances, becomes):
    asked = Asked(union.scale, min_instances=min_instances)
    row = an_instance("i-1", num_stages=4, created_at=0.0, ready_at=0.0, max_concurrency=8)
    decision = asked(100.0, load(i1=1), [row])
    assert (decision.num_wanted, decision.drain) == (4, ()), "the pipeline itself stays"
    assert min_instances or decision.reason == "4 instances may be needed again before one could start"
    assert decision.num_required == max(1, min_instances)
    (made,) = hydraserve.consolidate([row], 0, decision.num_required)
    assert made.becomes == becomes


@pytest.mark.parametrize(
    ("starts", "start_s"),
    [
        ([("cold", 0.0)], 1.0),
        ([("growth", 0.5)], 1.0),
        ([("growth", 3.0)], 3.0),
        ([("cold", 0.25)], 0.25),
        ([("cold", 5.0), ("growth", 9.0)], 5.0),
        ([("cold", 5.0), ("disk", 4.0)], 4.0),
        ([], 1.0),
    ],
)
def test_a_start_takes_what_the_newest_from_nothing_took_and_without_one_the_longest_seen(starts, start_s):
    asked = Asked(union.scale)
    rows = [
        an_instance(f"i-{at}", created_at=float(at), ready_at=at + took_s, start_kind=kind)
        for at, (kind, took_s) in enumerate(starts)
    ]
    asked(100.0, load(i1=1), rows)
    assert asked.state.start_s == start_s


@pytest.mark.parametrize(
    ("figures", "problem"),
    [
        ({"other": 1.0}, "no figure 'other'"),
        ({"m": float("nan"), "start_s": 1.0}, "not finite"),
        ({"m": 4.61}, "out of bounds"),
        ({"m": -4.61}, "out of bounds"),
        ({"start_s": -0.1}, "out of bounds"),
        ({"start_s": 86_401.0}, "out of bounds"),
    ],
)
def test_learned_figures_that_cannot_be_are_refused(figures, problem):
    with pytest.raises(ValueError, match=problem):
        union.UnionState.with_figures(figures, 10.0)


def test_learned_figures_are_read_up_to_their_bounds_and_no_time_is_to_come():
    for edge in ({"m": union.MOST_M, "start_s": 0.0, "raised_at": 9.0}, {"m": -union.MOST_M, "start_s": 86_400.0}):
        assert union.UnionState.with_figures(edge, 10.0).figures() == edge
    assert union.UnionState.with_figures({"raised_at": 11.0}, 10.0).figures() == {"raised_at": 10.0}


def test_a_start_across_a_clock_that_was_set_leaves_figures_that_are_read_again():
    asked = Asked(union.scale)
    asked(200_000.0, load(i1=1), ready(1, created_at=1.0, ready_at=100_001.0))
    figures = asked.state.figures()
    assert figures["start_s"] == 86_400.0
    assert union.UnionState.with_figures(figures, 200_000.0).figures() == figures


def test_a_spare_instance_is_held_against_a_start_from_nothing():
    """The copy it leaves occupies the GPU."""
    asked, spare = Asked(union.scale, keep_alive_s=30.0), load(i1=1, i2=1, last_active_at=1e6)
    asked(100.0, load(i1=8, i2=8), started(2, 2.0), params=PRICED)
    grown = ready(2, created_at=50.0, ready_at=50.1, start_kind="growth")
    assert asked(300.0, spare, grown, params=PRICED).drain == (), "200 s, of 398"
    assert asked(500.0, spare, grown, params=PRICED).drain == ("i-1",)


def test_an_answer_stands_only_while_nobody_drains():
    asked = Asked(union.scale)
    (serving,) = ready(1)
    quiet = load(last_active_at=99.0)
    assert asked(100.0, quiet, [serving]).stands_until == 0.0, "at first it looks at recent arrivals"
    decision = asked(110.0, quiet, [serving])
    assert decision.stands_until == pytest.approx(129.0, abs=1e-5)
    assert (decision.num_required, decision.reason) == (0, "its keep-alive is not over")
    draining = replace(serving, instance_id="i-2", state=InstanceState.DRAINING)
    assert asked(111.0, quiet, [serving, draining]).stands_until == 0.0
    assert asked(112.0, quiet, [serving]).stands_until > 112.0
    over = asked(130.0, quiet, [serving])
    assert (over.drain, over.stands_until) == (("i-1",), 0.0)


@pytest.mark.parametrize(
    ("fields", "model", "shorts_at", "until"),
    [
        ({}, {}, (), 129.0),
        ({"created_at": 50.0, "ready_at": 105.0}, {}, (), 135.0),
        ({"created_at": 107.0, "ready_at": 108.0}, {}, (), 112.0),
        ({"created_at": 105.0, "ready_at": 105.0}, {}, (), 135.0),
        ({}, {"keep_alive_s": -1.0}, (), math.inf),
        ({}, {"keep_alive_s": 9e9}, (100.0,), 700.0),
        ({}, {}, (100.0, 110.0), 0.0),
        ({"num_stages": 2}, {"keep_alive_s": -1.0}, (), 0.0),
        ({"num_stages": 2}, {"keep_alive_s": -1.0, "min_instances": 2}, (), math.inf),
    ],
)
def test_an_answer_stands_until_the_first_moment_that_may_change_it(fields, model, shorts_at, until):
    asked = Asked(union.scale, **model)
    for now_s in (100.0, 110.0):
        decision = asked(now_s, load(last_active_at=99.0), ready(1, **fields), short_elsewhere=now_s in shorts_at)
    assert decision.stands_until == pytest.approx(until, abs=1e-5)
    assert decision.stands_until < until or until in (0.0, math.inf), "sums of times are rounded"


def of_model(demand, *instances, **model):
    return ScalingView(now_s=100.0, model=a_model(**model), instances=instances, load=demand)


def test_a_model_grows_while_requests_wait_or_an_instance_starts_or_is_young():
    (old, young, five_s) = (ready(1, created_at=at)[0] for at in (0.0, 95.1, 95.0))
    for growing in (of_model(load(1), old), of_model(load(), old, starting()), of_model(load(), old, young)):
        assert union.is_growing(growing, union.UnionParams())
    for still in (of_model(load()), of_model(load(), old, five_s)):
        assert not union.is_growing(still, union.UnionParams())


@pytest.mark.parametrize(("waiting", "running", "short"), [(0, 9, False), (1, 7, False), (1, 8, True), (3, 5, False)])
def test_requests_lack_a_slot_where_more_are_there_than_slots_or_any_waits_without_an_objective(
    waiting, running, short
):
    demand = load(waiting, i1=running)
    assert union.is_short(of_model(demand, *ready(1), slo=Slo(tpot_s=0.2))) is short
    assert union.is_short(of_model(demand, *ready(1))) is (waiting > 0)


def test_spare_instances_go_at_once_while_another_model_finds_no_free_memory():
    for is_short, gone in ((False, ()), (True, ("i-1",))):
        asked = Asked(union.scale, keep_alive_s=30.0)
        asked(100.0, load(i1=8, i2=8), started(2), params=PRICED)
        spare, tight = load(i1=1, i2=1, last_active_at=1e6), {"short_elsewhere": is_short}
        decisions = [asked(105.0 + t / 2, spare, started(2), params=PRICED, **tight) for t in range(20)]
        assert decisions[-1].drain == gone


def test_the_union_keeps_spare_instances_that_the_forecast_may_need():
    """A peak of 17 requests, 8 on each: the third is as probable as not, the fourth hardly."""
    peak = a_forecast(concurrency_mean=5.0, concurrency_peak=17.0, error_ratio=0.3)
    asked, rows = Asked(union.scale), started(4, 1.0)
    asked(100.0, load(i1=8, i2=8, i3=8, i4=8), rows, forecast=peak)
    spare = load(i1=1, i2=1, i3=1, i4=1, last_active_at=1e6)
    assert asked(190.0, spare, rows, forecast=peak, params=PRICED).num_wanted == 4, "lately"
    long_after = replace(peak, made_at=2000.0, starts_at=2000.0)
    later = asked(2000.0, spare, rows, forecast=long_after, params=PRICED)
    assert later.num_wanted == 3, "6.9 ms a second; the fourth 0.7"
    dear, cheap = union.UnionParams(price=0.02), union.UnionParams(price=0.0005)
    assert asked(2001.0, spare, rows, forecast=long_after, params=dear).num_wanted == 2, "the second 30 ms"
    assert asked(2002.0, spare, rows, forecast=long_after, params=cheap).num_wanted == 4


def test_beside_a_plan_the_time_since_instances_were_wanted_keeps_none():
    """199 times a 30 s start would be 99 minutes more."""
    asked, rows, plan = Asked(union.scale), started(4, 30.0), a_forecast(2500, 500, **MU)
    spread = load(i1=1, i2=1, i3=1, i4=1, last_active_at=1e6)
    assert held(asked, spread, rows, forecast=plan).num_wanted >= 3
    less = a_forecast(400, 50, made_at=300.0, starts_at=300.0, **MU)
    decision = asked(390.0, spread, rows, forecast=less, params=PRICED)
    assert len(decision.drain) == 3 and decision.inputs["planned"] == 1


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_last_pipeline_that_has_run_nothing_for_the_keep_alive_goes_as_an_instance_does(num_stages):
    asked, rows = Asked(union.scale, keep_alive_s=30.0), ready(1, num_stages=num_stages)
    asked(100.0, load(i1=1), rows)
    over = load(last_active_at=100.0)
    drained = [asked(100.0 + t, over, rows).drain for t in range(1, 40)]
    assert drained[20] == () and drained[-1] == ("i-1",)


POLICIES = [(name, choose("scaling", name)) for name in installed("scaling")]
instances = st.lists(st.tuples(st.sampled_from(["ready", "starting", "draining"]), st.integers(0, 8)), max_size=5)


@pytest.mark.parametrize(("name", "policy"), POLICIES)
@given(
    rows=instances,
    waiting=st.integers(0, 40),
    low=st.integers(0, 2),
    high=st.integers(1, 6),
    pinned=st.booleans(),
    suspended=st.booleans(),
    forecast=st.none() | st.floats(0, 5000),
    gaps=st.lists(st.floats(0.1, 40.0), min_size=1, max_size=5),
)
def test_every_policy_stays_within_the_models_bounds(
    name, policy, rows, waiting, low, high, pinned, suspended, forecast, gaps
):
    """Also: drains only READY instances, resumes only draining ones, and starts nothing of a suspended model."""
    asked = Asked(policy, min_instances=min(low, high), max_instances=high, pinned=pinned, suspended=suspended)
    there = [an_instance(f"i-{n}", state=InstanceState(state), max_concurrency=8) for n, (state, _) in enumerate(rows)]
    demand = load(waiting, 100.0, **{f"i{n}": count for n, (_, count) in enumerate(rows)})
    told = a_forecast(forecast, forecast / 5, starts_at=0.0, **MU) if forecast is not None else None
    now_s, floor = 100.0, max(min(low, high), 1 if pinned else 0)
    states = {i.instance_id: i.state for i in there}
    num_running = sum(i.state is not InstanceState.DRAINING for i in there)
    for gap in gaps:
        now_s += gap
        made = asked(now_s, demand, there, forecast=told)
        assert all(states[i] is InstanceState.READY for i in made.drain)
        assert all(states[i] is InstanceState.DRAINING for i in made.resume)
        left = num_running - len(made.drain)
        if suspended:
            assert made.num_wanted <= num_running and made.num_required == 0
            continue
        assert made.num_wanted <= max(high, floor, num_running)
        assert left >= min(floor, num_running) and max(made.num_wanted, left) >= min(floor, high)
        if waiting:
            assert max(made.num_wanted, left) >= 1


def test_who_is_held_beside_a_free_slot_is_no_burst_to_start_instances_for():
    """Ours."""
    assert wanted_after(load(waiting=3, arrived=40, i1=5)) == 1
    assert wanted_after(load(waiting=3, arrived=40, i1=8)) > 2
    assert wanted_after(load(waiting=3, arrived=40, i1=5), slo=Slo()) > 2, "nobody is held where there is no objective"


def wanted_after(burst, slo=Slo(tpot_s=0.2)):
    """The union's wish on one READY instance of 8 slots, for a burst after a quiet minute."""
    asked = Asked(union.scale, slo=slo)
    for tick in range(120):
        asked(100.0 + tick / 2, load(last_active_at=100.0, arrived=1, i1=1), ready(1))
    return asked(160.0, burst, [*ready(1), COPY]).num_wanted
