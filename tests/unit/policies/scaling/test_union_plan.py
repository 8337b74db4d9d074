"""The union's plan."""

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest

from glowplug.domain.snapshot import ClassLoad, Forecast, Outlook, Quantile
from glowplug.policies.scaling import union
from glowplug.policies.scaling.port import ScalingView
from glowplug.policies.scaling.preserve import WantedNumber
from glowplug.policies.scaling.union import PlanParams, PlanState
from tests.fleet_builder import a_model
from tests.unit.policies.scaling.rig import a_forecast, load, outlooks, ready

SHARE = 0.9
PLAIN = PlanParams(z=0.0, slack=0.0)
WIDE = 0.2  # spread of the log error in the forecasts below


def windows(*needs: float, ratio: float = 0.0, made_at: float = 100.0, width_s: float = 100.0) -> tuple[Forecast, ...]:
    """Forecasts that take so many instances, in bands as wide as `WIDE`."""
    high = math.exp(NormalDist().inv_cdf(SHARE) * WIDE)
    return tuple(
        a_forecast(
            prompt=1000 * need,
            num_requests=100.0 * need,
            made_at=made_at,
            starts_at=100.0 + number * width_s,
            window_s=width_s,
            prompt_per_s=1000 / width_s,
            objective_ratio=ratio,
            quantiles=(Quantile(SHARE, prompt_tokens=1000 * need * high),),
        )
        for number, need in enumerate(needs)
    )


def seen(expected: tuple[Forecast, ...], num: int = 1, now_s: float = 100.0, **fields: Any) -> ScalingView:
    given = {"load": load(i1=1), "start_s": 30.0, "instances": tuple(ready(num))} | fields
    return ScalingView(now_s=now_s, model=a_model(max_instances=16), windows=expected,
                       forecast=expected[0] if expected else None, **given)  # fmt: skip


def asked(
    expected: tuple[Forecast, ...], num: int = 1, now_s: float = 100.0, *, state: PlanState | None = None,
    params: PlanParams = PLAIN, **fields: Any,
) -> tuple[WantedNumber, PlanState]:  # fmt: skip
    return union.plan_for(seen(expected, num, now_s, **fields), state or PlanState(), params)


def test_a_start_is_asked_for_when_it_is_in_time_for_the_window_that_needs_it():
    expected = windows(2.4, 5.1)
    assert asked(expected, now_s=100.0)[0].num_wanted == 3, "the next one begins in 100 s, and a start takes 30"
    assert asked(expected, now_s=169.0)[0].num_wanted == 3
    assert asked(expected, now_s=170.0)[0].num_wanted == 3, "it would be just in time"
    assert asked(expected, now_s=171.0)[0].num_wanted == 6
    assert [asked(expected, now_s=at_s, start_s=0.0)[0].num_wanted for at_s in (169.0, 171.0)] == [3, 6], "unknown: 30"
    assert asked(expected, now_s=120.0, start_s=90.0)[0].num_wanted == 6, "as long as the model's starts take"


def test_none_goes_that_a_later_window_would_start_again():
    target, _ = asked(windows(2.4, 5.1), num=8)
    assert target.num_wanted == 6
    assert target.reason == "a later window is expected to take as many as there are"
    assert asked(windows(2.4, 2.0), num=8)[0].num_wanted == 3


@pytest.mark.parametrize(("z", "wanted"), [(0.0, 4), (1.0, 5), (2.0, 6), (4.0, 9)])
def test_the_plan_is_for_so_many_spreads_of_the_band(z: float, wanted: int):
    assert math.ceil(4 * math.exp(z * WIDE)) == wanted
    assert asked(windows(4.0), params=replace(PLAIN, z=z))[0].num_wanted == wanted
    assert asked(windows(4.0), params=replace(PLAIN, z=z, widest=0.0))[0].num_wanted == 4, "no wider than that"


def test_a_need_about_a_whole_number_starts_and_stops_nothing():
    params = replace(PLAIN, slack=0.2)
    assert [asked(windows(need), num=3, params=params)[0].num_wanted for need in (2.7, 2.9, 3.1)] == [3, 3, 3]
    assert asked(windows(3.3), num=3, params=params)[0].num_wanted == 4
    assert asked(windows(1.7), num=3, params=params)[0].num_wanted == 2
    assert asked(windows(2.9), num=4, params=params)[0].num_wanted == 4
    assert asked(windows(0.1), params=params)[0].num_wanted == 1


def test_a_policy_without_a_band_is_planned_for_as_it_is():
    (one,) = windows(4.0)
    assert asked((replace(one, quantiles=()),), params=replace(PLAIN, z=3.0))[0].num_wanted == 4


def test_each_closed_window_moves_m_by_what_it_took_of_its_objective():
    params = replace(PLAIN, aim=0.8, up=0.2, down=0.1, most=2.0)
    state = PlanState()

    def after(ratio: float, at_s: float) -> float:
        nonlocal state
        _, state = asked(windows(4.0, 4.0, ratio=ratio, made_at=at_s), now_s=at_s, state=state, params=params)
        return state.m

    assert after(9.0, 100.0) == 0.0, "nothing had been planned for that window"
    assert after(0.4, 110.0) == pytest.approx(-0.04)
    assert after(0.4, 110.0) == pytest.approx(-0.04), "it is the same forecast"
    assert after(0.0, 120.0) == pytest.approx(-0.04), "nothing ended in that window"
    assert after(9.0, 130.0) == pytest.approx(-0.04 + 0.2 * 1.2)
    assert after(9.0, 140.0) == after(0.1, 150.0) == pytest.approx(0.2), (
        "what that brings serves 30 s and a window later"
    )
    state = replace(state, raised_at=0.0)
    assert after(9.0, 160.0) == pytest.approx(0.44)
    state = replace(state, raised_at=0.0)
    assert after(9.0, 170.0) == pytest.approx(math.log(params.most_share)), "no more than that"
    state = replace(state, raised_at=0.0, m=-0.5)
    assert after(0.4, 180.0) == pytest.approx(math.log(params.least_share)), "and no less"


def test_what_is_learned_is_planned_with():
    known = PlanState(m=math.log(1.5), made_at=100.0)
    assert asked(windows(4.0), state=known)[0].num_wanted == 6


def test_what_has_come_counts_as_far_as_the_forecast_is_unsure():
    expected = windows(4.0)  # 400 requests in 100 s
    _, state = asked(expected, load=load(arrived=1000, i1=1))
    weight = 1 / WIDE**2
    target, _ = asked(expected, state=state, now_s=150.0, load=load(arrived=1400, i1=1))
    assert target.num_wanted == math.ceil(4 * (weight + 400) / (weight + 200)) == 8, "twice of what was expected by now"
    assert "1.9 times" in target.reason
    assert asked(expected, state=state, now_s=150.0, load=load(arrived=1050, i1=1))[0].num_wanted == 4
    assert asked(expected, state=state, now_s=150.0, load=load(i1=1))[0].num_wanted == 4, "no router counts"


def test_prompts_that_wait_are_worked_off_within_the_time_of_a_start():
    queue = Outlook(peak_ratio=0.1, over_share=0.0, queued_tokens=610)  # at 10 a second: 61 s, less 1 of patience
    waits = replace(load(i1=9), outlook_by_instance={"i-1": queue})
    target, _ = asked(windows(2.0), load=waits)
    assert (target.num_wanted, target.reason[-39:]) == (4, "and prompts wait for 2.0 instances more")
    assert asked(windows(2.0), load=replace(load(i1=9), num_waiting=61))[0].num_wanted == 4, "61 prompts of 10 tokens"
    half = replace(waits, outlook_by_instance={"i-1": replace(queue, queued_tokens=160)})
    assert asked(windows(2.0), load=half)[0].reason.endswith(", and prompts wait for 0.5 instances more")
    assert asked(windows(2.0, 3.0))[0].reason == "2000 prompt and 0 response tokens are expected in this window"
    ahead, _ = asked(windows(2.0, 3.0), now_s=175.0)
    assert ahead.reason == "3000 prompt and 0 response tokens are expected in the window that begins in 25 s"


def test_there_are_as_many_as_what_runs_and_waits_fills():
    full = outlooks(load(i1=3, i2=3), i1=(1.5, 0.2), i2=(1.3, 0.2))
    target, _ = asked(windows(1.2), num=2, load=full)
    assert target.num_wanted == 4
    assert "the KV caches of 3.1 instances" in target.reason, "2.8 caches, filled to 90 %"
    as_many = outlooks(load(i1=3, i2=3), i1=(0.9, 0.0), i2=(0.9, 0.0))
    assert asked(windows(1.2), num=2, load=as_many)[0].reason.endswith("are expected in this window")
    uneven = outlooks(load(i1=3, i2=3), i1=(0.99, 0.2), i2=(0.3, 0.0))
    assert asked(windows(1.2), num=2, load=uneven)[0].num_wanted == 2, "there is free cache where requests go next"


def test_batch_asks_for_nothing_beyond_what_waits_and_runs():
    full = Outlook(peak_ratio=2.0, over_share=0.5, queued_tokens=610)
    people = replace(load(i1=8), num_waiting=61, outlook_by_instance={"i-1": full})
    batch = ClassLoad(num_waiting=61, in_flight_by_instance={"i-1": 8})
    assert asked(windows(1.2), load=people)[0].num_wanted > 2
    assert asked(windows(1.2), load=replace(people, by_class={"batch": batch}))[0].num_wanted == 2, "the forecast's"
    half = replace(batch, num_waiting=61, in_flight_by_instance={"i-1": 4})
    target, _ = asked(windows(1.2), load=replace(people, by_class={"batch": half}))
    assert "prompts wait for 1.0 instances more" in target.reason, "305 tokens, 10 a second, in 30 s"


def test_what_was_asked_for_serves_before_it_goes():
    full = outlooks(load(i1=3, i2=3), i1=(1.5, 0.2), i2=(1.3, 0.2))
    _, state = asked(windows(1.2), num=2, load=full, now_s=110.0)
    calm = outlooks(load(i1=3), i1=(0.1, 0.0))
    assert asked(windows(1.2), num=4, now_s=139.0, load=calm, state=state)[0].num_wanted == 4
    assert asked(windows(1.2), num=4, now_s=141.0, load=calm, state=state)[0].num_wanted == 2


def test_an_instance_more_is_held_as_long_as_its_start_takes_and_no_more_than_there_are():
    held = PlanState(num_held=4, held_until=140.0, made_at=100.0)
    said = "what was asked for a moment ago has hardly served yet"

    def found(need: float, num: int, now_s: float = 120.0) -> tuple[int, bool, int, float]:
        target, state = asked(windows(need), num=num, now_s=now_s, state=held)
        return target.num_wanted, target.reason == said, state.num_held, state.held_until

    assert found(1.8, 4) == (4, True, 4, 140.0)
    assert found(1.8, 3) == (3, True, 4, 140.0)
    assert found(1.8, 2) == (2, False, 4, 140.0), "no fewer than there are is no loss"
    assert found(2.8, 2) == (3, False, 4, 140.0)
    assert found(3.8, 3) == (4, False, 4, 150.0), "asked for again"
    assert found(1.8, 4, 140.0) == (2, False, 2, 170.0)


def a_view(expected: Forecast, **fields: Any) -> ScalingView:
    return seen((expected,), now_s=150.0, **fields)


SURE = a_forecast(prompt=100.0, prompt_per_s=2.0)


@pytest.mark.parametrize(
    ("share", "of", "high", "wide"),
    [
        (SHARE, 0.5, 160.0, math.log(0.8 / 0.5) / NormalDist().inv_cdf(SHARE)),
        (SHARE, 0.5, 90.0, 0.0),
        (SHARE, 0.5, 0.0, 0.0),
        (SHARE, 0.0, 160.0, 0.0),
        (0.5, 0.5, 160.0, 0.0),
        (1.0, 0.5, 160.0, 0.0),
        (None, 0.5, 160.0, 0.0),
    ],
)
def test_a_forecast_spreads_as_its_upper_quantile_is_above_it(
    share: float | None, of: float, high: float, wide: float
) -> None:
    bands = () if share is None else (Quantile(0.1), Quantile(share, prompt_tokens=high))
    assert union.spread(replace(SURE, quantiles=bands), of) == pytest.approx(wide)


@pytest.mark.parametrize(
    ("arrived", "num_requests", "seen_at", "wide", "ratio"),
    [
        (60, 20.0, 100.0, 0.5, (4 + 50) / (4 + 10)),
        (60, 1.0, 149.5, 0.5, (4 + 50) / (4 + 0.005)),
        (60, 20.0, -100.0, 0.5, (4 + 50) / (4 + 20)),
        (15, 20.0, 100.0, 0.5, 1.0),
        (0, 20.0, 100.0, 0.5, 1.0),
        (60, 0.0, 100.0, 0.5, 1.0),
        (60, 20.0, 150.0, 0.5, 1.0),
        (60, 20.0, 100.0, 0.0, 1.0),
    ],
    ids=["half a window", "half a second", "more than a window", "fewer", "uncounted", "none due", "at once", "sure"],
)
def test_what_came_is_held_against_what_was_due_by_now(
    arrived: int, num_requests: float, seen_at: float, wide: float, ratio: float
) -> None:
    now = replace(SURE, num_requests=num_requests)
    state = PlanState(seen_at=seen_at, arrived_before=10)
    assert union.seen_ratio(a_view(now, load=load(arrived=arrived)), now, wide, state) == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, (60 + 3 * 10) / 2 - 2 * 3),
        ({"prompt_per_s": 1.0}, 60 + 3 * 10 - 2 * 3),
        ({"num_requests": 1.0}, (60 + 3 * 100) / 2 - 2 * 3),
        ({"prompt_per_s": 0.0}, 0.0),
        ({"num_requests": 0.0}, 0.0),
        ({"prompt_per_s": 50.0}, 0.0),
    ],
)
def test_the_backlog_is_what_queues_and_waits_beyond_the_patience_at_each_instance(
    fields: dict[str, Any], seconds: float
) -> None:
    now = replace(SURE, **({"num_requests": 10.0} | fields))
    queues = {f"i-{n}": Outlook(peak_ratio=0.1, over_share=0.0, queued_tokens=30 * n) for n in (0, 1, 3)}
    queues["i-2"] = queues["i-1"]
    view = a_view(now, num=2, load=replace(load(waiting=3, i1=2), outlook_by_instance=queues))
    assert union.backlog(view, now, replace(PLAIN, patience_s=3.0)) == pytest.approx(seconds)


def test_kv_caches_fill_by_what_runs_and_what_waits() -> None:
    now = a_forecast(200.0, 100.0, num_requests=10.0)
    rows = (*ready(1, kv_tokens=1000), *ready(1, first=2, kv_tokens=400))
    waits = outlooks(load(waiting=3, i1=2), i1=(0.5, 0.0), i2=(0.25, 0.0))
    assert union.cached(a_view(now, instances=rows, load=waits), now) == pytest.approx(0.75 + 3 * 30 / 1000)
    one = replace(now, num_requests=1.0)
    assert union.cached(a_view(one, instances=rows, load=waits), one) == pytest.approx(0.75 + 3 * 300 / 1000)
    none = replace(now, num_requests=0.0)
    assert union.cached(a_view(none, instances=rows, load=waits), none) == 0.75
    assert union.cached(a_view(now, instances=rows, load=load(waiting=3)), now) == 0.0


@pytest.mark.parametrize(("start_s", "at_s"), [(50.0, 150.0), (0.0, 130.0)])
def test_m_grows_again_once_the_start_that_it_brought_has_served_a_window(start_s: float, at_s: float) -> None:
    grown = PlanState(m=0.1, raised_at=0.0, made_at=0.0)

    def after(now_s: float, ratio: float = 2.0) -> PlanState:
        expected = windows(4.0, ratio=ratio, made_at=now_s)
        return asked(expected, now_s=now_s, start_s=start_s, state=grown, params=replace(PLAIN, up=0.2))[1]

    assert (after(at_s - 1.0).m, after(at_s - 1.0).raised_at) == (0.1, 0.0)
    assert after(at_s).m == pytest.approx(0.1 + 0.2 * 1.2) and after(at_s).raised_at == at_s
    assert after(at_s, 1.3).m == pytest.approx(0.1 + 0.2 * 0.5) and after(at_s, 1.3).raised_at == at_s
    assert (after(at_s, PLAIN.aim).m, after(at_s, PLAIN.aim).raised_at) == (0.1, 0.0), "as aimed at"


def test_with_cold_data_preserves_plan_stands():
    assert asked(())[0].is_cold
    unknown = tuple(replace(one, prompt_per_s=0.0) for one in windows(4.0))
    assert asked(unknown)[0].is_cold
    assert asked(windows(0.0, 0.0))[0].num_wanted == 0
    assert asked(windows(0.0, 0.0))[1] == PlanState()
    assert [asked(windows(need, 0.0))[1].made_at for need in (0.001, 0.0009)] == [100.0, -1.0], "one token is some"
    assert asked(windows(0.0, 3.0), now_s=171.0)[0].num_wanted == 3
