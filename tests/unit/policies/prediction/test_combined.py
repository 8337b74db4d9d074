"""`combined`: accuracy, bands, fast changes and bad input."""

import math
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from glowplug.fleet.forecasts import WindowDemand
from glowplug.policies.prediction.baselines import Nothing
from glowplug.policies.prediction.combined import NAMES, UNITS, Alike, Combined, Experts, Mixture, prior_of
from glowplug.policies.prediction.learned import CombinedParams, combined
from glowplug.policies.prediction.port import Forecaster, WindowTotals, make_with, shared
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


def test_its_season_is_the_one_given_or_a_day_and_the_models_share_one_of_as_many_windows():
    assert [len(shared(combined, *of)._means) for of in ((300.0,), (600.0, 3600.0), (7200.0, 3600.0))] == [288, 6, 1]
    assert shared(Nothing, 300.0) is None
    alike = shared(combined, 300.0)
    seasons = [make_with(combined, 300.0, season_s, alike).params.season_s for season_s in (0.0, 0.5, 3600.0)]
    assert seasons == [86400.0, 0.5, 3600.0]
    assert combined(300.0, params=CombinedParams(season_s=7200.0)).params.season_s == 7200.0
    assert make_with(combined, 300.0, 0.0, alike)._alike is alike and make_with(combined, 300.0)._alike is None
    assert make_with(Nothing, 60.0, 3600.0, alike).window_s == 60.0, "which has neither"


def test_the_past_kept_is_a_season_at_least_and_a_week_at_most():
    kept_days = [Experts(1, per_day, np.ones(1), 2, 100).num_days for per_day in (1, 14, 15, 50, 51, 100, 101)]
    assert kept_days == [7, 7, 6, 2, 1, 1, 1]


def kept(forecaster: Combined) -> Mixture | None:
    return forecaster._mixture


def test_the_past_is_kept_over_a_day_of_missing_windows_and_the_idle_ones_that_are_allowed():
    for num_missing, is_kept in ((PER_DAY, True), (PER_DAY + 1, False)):
        forecaster = feed(Combined(W, PARAMS), [5.0, 9.0])
        before = kept(forecaster)
        forecaster.closed(window(2 + num_missing, 7.0))
        assert (kept(forecaster) is before) is is_kept
        assert forecaster.forecast(0.0)[0].anomaly == "missing"
    for idle, start, is_kept in (
        ([0.0] * 9, 2, True),
        ([0.0] * 10, 2, False),
        ([0.0] * 8, 4, False),
        ([0.0] * 7, 4, True),
    ):
        forecaster = feed(Combined(W, CombinedParams(season_s=SEASON_S, max_windows=10)), [5.0, 9.0])
        feed(forecaster, idle, start)
        assert (kept(forecaster) is not None) is is_kept, (len(idle), start)
    busy = feed(Combined(W, CombinedParams(season_s=SEASON_S, max_windows=3)), [5.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    assert kept(busy) is not None, "a request between begins the count anew"


def test_a_window_of_no_numbers_alone_is_idle_and_one_of_zeros_is_no_past():
    nothing = feed(Combined(W, PARAMS), [math.nan, 0.0, -1.0])
    assert kept(nothing) is None and nothing.forecast(0.0)[0].starts_at == 3 * W
    assert Combined(W, PARAMS).forecast(0.0) == ()
    small = Combined(W, PARAMS)
    small.closed(WindowTotals(started_at=0.0, window_s=W, concurrency_peak=0.001))
    assert kept(small) is not None


def test_windows_that_come_twice_or_early_are_none_that_are_missing():
    forecaster = feed(Combined(W, PARAMS), days(2))
    forecaster.closed(window(2 * PER_DAY - 1, 300.0))
    assert forecaster.forecast(0.0)[0].anomaly == ""
    forecaster.closed(window(2 * PER_DAY + 1, 300.0))
    assert forecaster.forecast(0.0)[0].anomaly == "missing"
    spiked = feed(forecaster, [1e7], 2 * PER_DAY + 4)
    assert spiked.forecast(0.0)[0].anomaly == "spike", "and not the windows missing before it"


def test_windows_beyond_the_horizons_repeat_the_last():
    made = feed(Combined(W, PARAMS), days(2)).forecast(5.0, 14)
    assert made[11].num_requests == made[12].num_requests == made[13].num_requests != made[10].num_requests
    assert [one.starts_at for one in made] == [(2 * PER_DAY + at) * W for at in range(14)]
    assert {(one.window_s, one.made_at, one.source) for one in made} == {(W, 5.0, "combined")}


def closed(mixture: Mixture, *loads: float) -> list[str]:
    return [mixture.close(np.array([load]), None) for load in loads]


def test_a_spike_is_what_lies_above_ten_times_the_highest_or_twenty_times_a_small_amount():
    for before, load, said in ((7.0, 70.0, ""), (7.0, 70.1, "spike"), (0.5, 20.0, ""), (0.5, 20.1, "spike")):
        mixture = Mixture(PER_DAY, PARAMS, np.ones(1))
        assert closed(mixture, before, load) == ["", said], load
        assert mixture._experts.last()[0] == pytest.approx(min(load, max(10 * before, 20.0)), rel=1e-6)
    assert closed(Mixture(PER_DAY, PARAMS, np.ones(1)), 1e9) == [""], "the first is the highest"


@pytest.mark.parametrize(("then", "leaves"), [(0.9, True), (1.1, False)])
def test_a_spike_leaves_the_past_if_the_next_window_is_less_than_half_as_far_above_what_was_expected(then, leaves):
    mixture = Mixture(PER_DAY, PARAMS, np.ones(1))
    closed(mixture, *[10.0] * 8)
    expected = float(mixture.at(0)[0][0])
    assert closed(mixture, 5000.0) == ["spike"]
    closed(mixture, 5 * expected * then)
    past = np.exp(mixture._experts._past[0, 8]) - 1
    assert past == pytest.approx(expected if leaves else 100.0, rel=1e-3)
    closed(mixture, 10.0)
    assert np.exp(mixture._experts._past[0, 8]) - 1 == pytest.approx(past, rel=1e-6), "it is looked at once"


def test_a_change_counts_from_five_requests_on_as_a_mean_over_the_last_fifty_at_its_time():
    alike = Alike(2)
    for before, after in ((4.9, 9.0), (9.0, 4.9)):
        alike.learn(1, before, after)
    assert alike.ahead(0, 1) is None
    alike.learn(1, 5.0, 5.0)
    alike.learn(1, 10.0, 5.0)
    assert alike.ahead(0, 1) == pytest.approx([-math.log(2) / 2]) and alike.ahead(0, 2) is None
    alike.learn(4, 9.0, 9.0)
    assert alike.ahead(4, 3) == pytest.approx([-math.log(2) / 2 * num for num in (1, 1, 2)])
    for _ in range(48):
        alike.learn(1, 5.0, 5.0)
    mean = alike.ahead(0, 1)[0]
    for _ in range(2):
        alike.learn(1, 10.0, 1000.0)
    assert alike.ahead(0, 1)[0] == pytest.approx(1 - (1 - mean) * 0.98**2)
    alike.learn(1, 1000.0, 10.0)
    assert alike.ahead(0, 1)[0] < 1 - (1 - mean) * 0.98**2


def test_only_neighbouring_windows_teach_a_change():
    alike = Alike(PER_DAY)
    forecaster = Combined(W, PARAMS, alike=alike)
    for at, value in ((0, 10.0), (1, 20.0), (3, 80.0), (4, math.nan), (5, 10.0), (6, 5.0)):
        forecaster.closed(window(at, value))
    assert [float(alike._nums[at]) for at in range(7)] == [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert alike._means[1] == pytest.approx(math.log(2)) and alike._means[6] == pytest.approx(-math.log(2))


def a_week_and_more(forecaster: Combined, seed: int, windows: range) -> None:
    """Eight windows a day: a wave, a weekend, a launch, a spike, and windows that are missing or no numbers."""
    chance = Random(seed)
    for at in range(windows.stop):
        wave = (1.3 - math.cos(math.pi * at / 4)) * (0.4 if at // 8 % 7 > 4 else 1.0) * (3.0 if at > 60 else 1.0)
        by_kind = [scale * wave * chance.lognormvariate(0.0, 0.2) for scale in (90.0, 2e4, 7e3, 1.5, 4.0)]
        if at == 50:
            by_kind[0], by_kind[2] = 9e4, 9e6
        if at in (21, 22):
            by_kind[1] = 0.0
        if at in windows and at % 17 != 13:
            by_kind[3] = math.nan if at % 19 == 11 else by_kind[3]
            loads = dict(zip(WindowDemand._fields, by_kind, strict=True))
            forecaster.closed(WindowTotals(started_at=at * W, window_s=W, **loads))


def logs(forecaster: Combined) -> list[float]:
    """Per kind, of what is expected and of its band: the mean logarithm over twelve windows ahead."""
    made = [(one, *one.quantiles) for one in forecaster.forecast(0.0, 12)]
    rows = [[[getattr(part, kind) for part in three] for kind in WindowDemand._fields] for three in made]
    return [float(value) for value in np.log1p(rows).mean(axis=0).ravel()]


RECORDED_LOGS = (
    (
        4.73197, 4.33992, 5.13848, 10.43224, 10.024, 10.85608, 8.97161, 8.59499, 9.36334, 0.91938, 0.70633, 1.1767,
        1.72911, 1.41314, 2.06499,
    ),
    (
        4.25414, 3.35946, 5.17133, 9.52978, 8.61524, 10.44205, 8.21508, 7.2329, 9.165, 0.68039, 0.35224, 1.27744,
        1.1966, 0.57539, 1.91238,
    ),
    (
        4.50019, 3.66619, 5.34649, 10.1546, 7.87895, 12.2569, 8.85776, 7.97685, 9.72666, 0.97296, 0.55589, 1.56874,
        1.61108, 0.98779, 2.2894,
    ),
    (
        5.83041, 4.86403, 6.66199, 8.9235, 7.36316, 10.36827, 10.20222, 9.25534, 11.01805, 0.64414, 0.27531, 1.14402,
        1.15188, 0.57472, 1.70777,
    ),
    (
        5.87666, 4.53666, 7.25592, 10.77197, 9.16544, 12.52139, 9.99154, 8.65093, 11.33137, 1.84917, 0.92666, 3.14304,
        2.74133, 1.6814, 3.99812,
    ),
)  # fmt: skip
RECORDED_EXPERTS = (
    6.77087, 6.39099, 6.07354, 5.5641, 6.18973, 7.40001, 6.68755, 6.35241, 6.51534, 6.94317, 6.12586, 7.23109, 7.2151,
    6.71067, 6.70534, 6.31903, 6.40709, 6.28839, 5.74129, 5.52289, 6.30733, 5.72716, 5.88562, 5.95875, 5.73557,
    6.27363, 5.73851, 7.09991, 6.95986, 6.56702, 6.69846, 6.48044, 5.89831, 5.55784, 6.64786, 6.19772, 5.87704,
    6.31899, 5.61263,
)  # fmt: skip
RECORDED_WEIGHTS = (
    0.00581, 0.00345, 0.00139, 0.0006, 0.00046, 0.00038, 0.00208, 0.02806, 0.01307, 0.00729, 0.00059, 0.02433,
    0.02933, 0.01649, 0.01107, 0.00531, 0.07169, 0.06021, 0.00799, 0.01538, 0.20048, 0.04224, 0.07106, 0.1493,
    0.04685, 0.05007, 0.00132, 0.00757, 0.00874, 0.0036, 0.01092, 0.01101, 0.00314, 0.00082, 0.02651, 0.04821,
    0.00937, 0.0032, 0.0006,
)  # fmt: skip


def test_forecasts_bands_experts_and_weights_are_as_they_were():
    """Recorded from this code. Whoever changes them measures how good it is again: `python -m bench.forecast`."""
    alike = Alike(8)
    for number in range(20):
        alike.learn(number, 100.0, 100.0 + 9 * (number % 8))
    forecaster = Combined(W, CombinedParams(season_s=8 * W), alike=alike)
    for (since, until), recorded in zip(pairwise((0, 3, 10, 30, 51, 68)), RECORDED_LOGS, strict=True):
        a_week_and_more(forecaster, 3, range(since, until))
        assert logs(forecaster) == pytest.approx(recorded, abs=5e-5), until
    by_kind = [forecaster.experts(kind) for kind in WindowDemand._fields]
    said = np.array([[of[name] for name in NAMES] for of in by_kind])  # kind, expert, horizon, load and weight
    assert np.log1p(said[..., 0]).mean(axis=(0, 2)).tolist() == pytest.approx(RECORDED_EXPERTS, abs=5e-5)
    assert said[..., 1].mean(axis=(0, 2)).tolist() == pytest.approx(RECORDED_WEIGHTS, abs=5e-5)
