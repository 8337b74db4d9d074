"""The union's plan."""

import math
from dataclasses import replace
from statistics import NormalDist

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


def asked(
    expected: tuple[Forecast, ...], num: int = 1, now_s: float = 100.0, *, state: PlanState | None = None,
    params: PlanParams = PLAIN, **fields: object,
) -> tuple[WantedNumber, PlanState]:  # fmt: skip
    given: dict[str, object] = {"load": load(i1=1), "start_s": 30.0} | fields
    view = ScalingView(now_s=now_s, model=a_model(max_instances=16), instances=tuple(ready(num)), windows=expected,
                       forecast=expected[0] if expected else None, **given)  # type: ignore[arg-type]  # fmt: skip
    return union.plan_for(view, state or PlanState(), params)


def test_a_start_is_asked_for_when_it_is_in_time_for_the_window_that_needs_it():
    expected = windows(2.4, 5.1)
    assert asked(expected, now_s=100.0)[0].num_wanted == 3, "the next one begins in 100 s, and a start takes 30"
    assert asked(expected, now_s=169.0)[0].num_wanted == 3
    assert asked(expected, now_s=171.0)[0].num_wanted == 6
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


def test_there_are_as_many_as_what_runs_and_waits_fills():
    full = outlooks(load(i1=3, i2=3), i1=(1.5, 0.2), i2=(1.3, 0.2))
    target, _ = asked(windows(1.2), num=2, load=full)
    assert target.num_wanted == 4
    assert "the KV caches of 3.1 instances" in target.reason, "2.8 caches, filled to 90 %"
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


def test_with_cold_data_preserves_plan_stands():
    assert asked(())[0].is_cold
    unknown = tuple(replace(one, prompt_per_s=0.0) for one in windows(4.0))
    assert asked(unknown)[0].is_cold
    assert asked(windows(0.0, 0.0))[0].num_wanted == 0
    assert asked(windows(0.0, 0.0))[1] == PlanState()
