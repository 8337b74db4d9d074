"""`combined`: accuracy, bands, fast changes and bad input."""

import math
from itertools import pairwise

import numpy as np
import pytest

from glowplug.fleet.forecasts import WindowDemand
from glowplug.policies.prediction.combined import NAMES, UNITS, Alike, Combined, Experts, Mixture, prior_of
from glowplug.policies.prediction.learned import CombinedParams
from glowplug.policies.prediction.port import Forecaster, WindowTotals
from glowplug_lab.policies.warmserve_csp import WarmserveCsp
from glowplug_lab.policies.windows import LastWindow, SeasonalNaive

W = 600.0
PER_DAY = 24
SEASON_S = PER_DAY * W
PARAMS = CombinedParams(season_s=SEASON_S)


def window(at: int, value: float) -> WindowTotals:
    return WindowTotals(
        started_at=at * W, window_s=W, num_requests=value, prompt_tokens=100 * value, response_tokens=50 * value,
        concurrency_mean=value / 60, concurrency_peak=value / 20,
    )  # fmt: skip


def feed(forecaster: Forecaster, values, start=0) -> Forecaster:
    for at, value in enumerate(values, start):
        forecaster.closed(window(at, value))
    return forecaster


def days(num: int, seed: int = 3) -> list[float]:
    """Poisson counts of 120 to 600 a window, by the hour."""
    at = np.arange(num * PER_DAY)
    return list(np.random.default_rng(seed).poisson(360 - 240 * np.cos(2 * np.pi * at / PER_DAY)).astype(float))


def off(make, values, horizon: int, first: int) -> float:
    """Mean absolute percentage error at this horizon, from window `first` on."""
    forecaster, errors = make(), []
    for at, value in enumerate(values):
        forecaster.closed(window(at, value))
        target = at + horizon
        if first <= target < len(values):
            errors.append(abs(forecaster.forecast(0.0, horizon)[-1].num_requests - values[target]) / values[target])
    return float(np.mean(errors))


@pytest.mark.parametrize("horizon", [1, 6])
def test_on_a_load_with_a_season_it_is_no_worse_than_what_knows_the_season(horizon):
    values, first = days(8), 4 * PER_DAY
    ours = off(lambda: Combined(W, PARAMS), values, horizon, first)
    for alone in (
        lambda: LastWindow(W),
        lambda: SeasonalNaive(W, SEASON_S),
        lambda: WarmserveCsp(W, season_s=SEASON_S),
    ):
        assert ours <= 1.02 * off(alone, values, horizon, first)


def test_on_a_load_that_wanders_it_is_about_the_last_window():
    steps = np.random.default_rng(5).normal(0.0, 0.1, 8 * PER_DAY)
    values = [float(v) for v in np.round(1000 * np.exp(np.cumsum(steps)))]
    first = 4 * PER_DAY
    ours, last = (off(make, values, 1, first) for make in (lambda: Combined(W, PARAMS), lambda: LastWindow(W)))
    assert ours <= 1.05 * last


def test_the_band_holds_four_of_five_windows():
    values = days(14, seed=9)
    forecaster, inside = Combined(W, PARAMS), []
    for at, value in enumerate(values):
        if at >= 4 * PER_DAY:
            low, high = forecaster.forecast(0.0)[0].quantiles
            assert (low.share, high.share) == (0.1, 0.9) and low.num_requests <= high.num_requests
            inside.append(low.num_requests <= value <= high.num_requests)
        forecaster.closed(window(at, value))
    assert 0.75 <= np.mean(inside) <= 0.85


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_launch_or_a_holiday_is_followed_within_an_hour(factor):
    """Six windows of ten minutes."""
    values = days(6)
    changed = [v * factor for v in days(7, seed=4)[6 * PER_DAY :]]
    forecaster = feed(Combined(W, PARAMS), [*values, *changed[:6]])
    expected = forecaster.forecast(0.0)[0].num_requests
    assert expected == pytest.approx(changed[6], rel=0.25)


def test_a_spike_of_a_hundred_times_is_cut_named_and_leaves_the_past():
    values = days(6)
    calm = feed(Combined(W, PARAMS), [*values, values[0], values[1]]).forecast(0.0)[0]
    spiked = feed(Combined(W, PARAMS), [*values, 100 * max(values)])
    assert spiked.forecast(0.0)[0].anomaly == "spike"
    assert spiked.forecast(0.0)[0].num_requests <= 20 * max(values)
    spiked.closed(window(len(values) + 1, values[1]))
    after = feed(spiked, values[2:8], len(values) + 2).forecast(0.0)[0]
    assert after.anomaly == "" and after.num_requests == pytest.approx(values[8], rel=0.35)
    assert calm.anomaly == ""


@pytest.mark.parametrize("bad", [math.nan, -5.0, math.inf])
def test_a_window_that_is_no_number_counts_as_it_was_expected(bad):
    forecaster = feed(Combined(W, PARAMS), days(3))
    expected = forecaster.forecast(0.0)[0].num_requests
    forecaster.closed(WindowTotals(started_at=3 * SEASON_S, window_s=W, num_requests=bad, prompt_tokens=bad))
    (after,) = forecaster.forecast(0.0)
    assert after.anomaly == "missing"
    assert all(math.isfinite(value) for value in (after.num_requests, after.prompt_tokens, after.concurrency_mean))
    assert after.num_requests == pytest.approx(expected, rel=0.5)


def test_windows_left_out_are_missing_and_keep_the_hour():
    values = days(6)
    there, gap = values[: 4 * PER_DAY], PER_DAY // 2
    forecaster = feed(Combined(W, PARAMS), there)
    forecaster.closed(window(len(there) + gap, values[len(there) + gap]))
    (after,) = forecaster.forecast(0.0)
    assert after.anomaly == "missing" and after.starts_at == (len(there) + gap + 1) * W
    assert after.num_requests == pytest.approx(values[len(there) + gap + 1], rel=0.3)


def test_a_model_nobody_asks_for_costs_nothing_and_is_forecast_as_nothing():
    forecaster = feed(Combined(W, PARAMS), [0.0] * 100)
    assert forecaster._mixture is None and forecaster.experts() == {}
    assert [f.num_requests for f in forecaster.forecast(0.0, 3)] == [0.0] * 3
    params = CombinedParams(season_s=SEASON_S, max_windows=50)
    idle = feed(Combined(W, params), [5.0, 9.0, *[0.0] * 60])
    assert idle._mixture is None, "long idle, its memory is given back"


def test_after_more_than_a_day_of_missing_windows_the_past_begins_anew():
    forecaster = feed(Combined(W, PARAMS), days(3))
    forecaster.closed(window(5 * PER_DAY, 40.0))
    assert forecaster.forecast(0.0)[0].num_requests == pytest.approx(40.0, rel=0.01)


def test_the_same_windows_give_the_same_forecasts_and_all_are_possible_loads():
    values = [0, 3, 0, 0, 800, 2, 0, *days(2), 0, 0]
    first, second = (feed(Combined(W, PARAMS), values).forecast(1.0, 20) for _ in range(2))
    assert first == second and len(first) == 20
    assert [b.starts_at - a.starts_at for a, b in pairwise(first)] == [W] * 19
    for one in first:
        low, high = one.quantiles
        assert 0 <= low.num_requests <= one.num_requests <= high.num_requests
        assert one.concurrency_peak >= one.concurrency_mean


def test_experts_are_weighed_and_the_weights_sum_up():
    by_name = feed(Combined(W, PARAMS), days(3)).experts("concurrency_mean")
    assert tuple(by_name) == NAMES
    for horizon in range(PARAMS.num_horizons):
        assert sum(rows[horizon][1] for rows in by_name.values()) == pytest.approx(1.0)


def test_loads_side_by_side_are_forecast_as_each_by_itself():
    counts = np.array([days(3, seed=1), days(3, seed=2)])
    counts[1, 30] = 1e6  # cut, in one of them
    both, alone = Mixture(PER_DAY, PARAMS, np.ones(2)), [Mixture(PER_DAY, PARAMS, np.ones(1)) for _ in counts]
    for at in range(counts.shape[1]):
        both.close(counts[:, at], None)
        for row, one in enumerate(alone):
            one.close(counts[row : row + 1, at], None)
    for step in (0, 11):
        for ours, theirs in zip(both.at(step), zip(*(one.at(step) for one in alone), strict=True), strict=True):
            assert ours.tolist() == pytest.approx([float(value[0]) for value in theirs])


def test_the_expert_csp_is_warmserves():
    """WarmServe section 5.1, Eq. 2-4."""
    values = days(3)
    alone = feed(WarmserveCsp(W, season_s=SEASON_S), values).forecast(0.0, 12)
    said = feed(Combined(W, PARAMS), values).experts()["csp"]
    assert [value for value, _ in said] == pytest.approx([one.num_requests for one in alone], rel=1e-4)


def test_a_season_shorter_than_the_horizon_and_a_window_longer_than_a_day_are_forecast():
    for per_day in (1, 4):
        params = CombinedParams(season_s=per_day * W)
        forecaster = feed(Combined(W, params), [10.0, 50.0, 10.0, 50.0] * 12)
        assert all(math.isfinite(one.num_requests) for one in forecaster.forecast(0.0, 12))


def test_a_new_model_changes_as_others_do_at_that_time_of_the_day():
    alike, values = Alike(PER_DAY), days(4)
    for seed in range(3):
        feed(Combined(W, PARAMS, alike=alike), days(3, seed))
    born = 3 * PER_DAY
    known, alone = Combined(W, PARAMS, alike=alike), Combined(W, PARAMS)
    for forecaster in (known, alone):
        feed(forecaster, values[born - PER_DAY // 2 : born], born - PER_DAY // 2)
    came = np.array(values[born : born + 12])
    ours, theirs = (
        float(np.mean(np.abs(np.array([one.num_requests for one in f.forecast(0.0, 12)]) - came) / came))
        for f in (known, alone)
    )
    assert ours < 0.7 * theirs


def test_changes_that_say_nothing_are_not_learned():
    alike = Alike(4)
    alike.learn(1, 3.0, 900.0)
    assert alike.ahead(0, 2) is None
    for number in range(1, 5):
        alike.learn(number, 10.0, 1000.0)
    assert alike.ahead(0, 2).tolist() == [1.0, 2.0]


def test_memory_is_bounded_by_the_windows_kept():
    experts = Experts(len(UNITS), 1440, UNITS, 12, 4032)
    assert experts.num_days == 2 and experts._past.shape == (len(WindowDemand._fields), 2 * 1440 + 2)
    assert prior_of(24)[11:].tolist() == [prior_of(12)[11].tolist()] * 13
