"""The union's plan: the band, the time of a start, what came so far and what missed."""

import math
from dataclasses import replace
from statistics import NormalDist

import pytest

from glowplug.domain.snapshot import Forecast, Outlook, Quantile
from glowplug.policies.scaling import union_plan
from glowplug.policies.scaling.port import ScalingView
from glowplug.policies.scaling.preserve import Target
from glowplug.policies.scaling.union_plan import PlanParams, PlanState
from tests.fleet_builder import a_model
from tests.unit.policies.scaling.rig import a_forecast, load, outlooks, ready

SHARE = 0.9
WIDE = 0.2  # spread of the log error in the forecasts below


def windows(*needs: float, ratio: float = 0.0, made_at: float = 100.0, width_s: float = 100.0) -> tuple[Forecast, ...]:
    """Forecasts that take so many instances each, with a band as wide as `WIDE` says."""
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
    params: PlanParams = PlanParams(z=0.0), **fields: object,
) -> tuple[Target, PlanState]:  # fmt: skip
    given: dict[str, object] = {"load": load(i1=1), "start_s": 30.0} | fields
    view = ScalingView(now_s=now_s, model=a_model(max_instances=16), instances=tuple(ready(num)), windows=expected,
                       forecast=expected[0] if expected else None, **given)  # type: ignore[arg-type]  # fmt: skip
    return union_plan.plan_for(view, state or PlanState(), params)


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


@pytest.mark.parametrize(("z", "wanted"), [(-2.0, 3), (0.0, 4), (1.0, 5), (2.0, 6), (4.0, 9)])
def test_the_plan_is_for_so_many_spreads_of_the_band(z: float, wanted: int):
    assert math.ceil(4 * math.exp(z * WIDE)) == wanted
    assert asked(windows(4.0), params=PlanParams(z=z))[0].num_wanted == wanted


def test_a_policy_without_a_band_is_planned_for_as_it_is():
    (one,) = windows(4.0)
    assert asked((replace(one, quantiles=()),), params=PlanParams(z=3.0))[0].num_wanted == 4


def test_each_closed_window_moves_z_once_by_what_it_took_of_its_objective():
    params = PlanParams(z=1.0, gain=0.5, aim=0.6, most=2.0, z_most=1.5)
    _, state = asked(windows(4.0, ratio=0.4), params=params)
    assert state.z == pytest.approx(0.9)
    _, state = asked(windows(4.0, ratio=0.4), state=state, params=params, now_s=150.0)
    assert state.z == pytest.approx(0.9), "it is the same forecast"
    _, state = asked(windows(4.0, ratio=9.0, made_at=200.0), state=state, params=params)
    assert state.z == 1.5, "0.9 + 0.5 (2 - 0.6), but no more than z_most"
    _, state = asked(windows(4.0, ratio=0.0, made_at=300.0), state=state, params=params)
    assert state.z == 1.5, "nothing ended in that window"


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
    queue = Outlook(peak_ratio=0.1, over_share=0.0, queued_tokens=610)  # of 10 a second: 61 s, less 1 of patience
    waits = replace(load(i1=9), outlook_by_instance={"i-1": queue})
    target, _ = asked(windows(2.0), load=waits)
    assert (target.num_wanted, target.reason[-39:]) == (4, "and prompts wait for 2.0 instances more")
    assert asked(windows(2.0), load=replace(load(i1=9), num_waiting=61))[0].num_wanted == 4, "61 prompts of 10 tokens"


def test_one_that_will_be_too_full_brings_another_and_none_goes_meanwhile():
    full = outlooks(load(i1=3, i2=3), i1=(0.99, 0.2), i2=(0.5, 0.0))
    target, state = asked(windows(1.2), num=2, load=full)
    assert (target.num_wanted, target.reason) == (3, "i-1 will fill more than 95% of the KV cache")
    calm = outlooks(load(i1=3, i2=3), i1=(0.5, 0.0), i2=(0.5, 0.0))
    assert asked(windows(1.2), num=3, now_s=120.0, load=calm, state=state)[0].num_wanted == 3
    assert asked(windows(1.2), num=3, now_s=131.0, load=calm, state=state)[0].num_wanted == 2


def test_with_cold_data_preserves_plan_stands():
    assert asked(())[0].is_cold
    unknown = tuple(replace(one, prompt_per_s=0.0) for one in windows(4.0))
    assert asked(unknown)[0].is_cold
    assert asked(windows(0.0, 0.0))[0].num_wanted == 0
    assert asked(windows(0.0, 0.0))[1] == PlanState()
