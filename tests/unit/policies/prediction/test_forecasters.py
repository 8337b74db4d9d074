"""Forecasters: WarmServe section 5.1 (Eq. 2-4) window by window, and its baselines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.prediction.baselines import Nothing
from glowplug.policies.prediction.port import WindowTotals
from glowplug_lab.policies.warmserve_csp import CspParams, WarmserveCsp, forecast
from glowplug_lab.policies.windows import LastWindow, MovingAverage, SeasonalNaive

W = 60.0


def feed(forecaster, loads, window_s=W):
    for number, load in enumerate(loads):
        forecaster.closed(
            WindowTotals(
                started_at=number * window_s,
                window_s=window_s,
                num_requests=load,
                prompt_tokens=100 * load,
                response_tokens=10 * load,
                concurrency_mean=load,
                concurrency_peak=2 * load,
            )
        )
    return forecaster


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: LastWindow(W), [6.0, 6.0]),
        (lambda: MovingAverage(W, num_windows=2), [5.0, 5.0]),
        (lambda: SeasonalNaive(W, season_s=4 * W), [6.0, 2.0]),
        (lambda: SeasonalNaive(W, season_s=3 * W), [2.0, 4.0]),
        (lambda: SeasonalNaive(W, season_s=2 * W), [4.0, 6.0]),
    ],
)
def test_baselines_say_what_they_are_named_for(make, expected):
    found = feed(make(), [2, 4, 6]).forecast(200.0, 2)
    assert [f.concurrency_mean for f in found] == expected
    assert [f.starts_at for f in found] == [180.0, 240.0]
    assert [f.prompt_tokens for f in found] == [100 * e for e in expected]
    assert [f.concurrency_peak for f in found] == [2 * e for e in expected]
    assert all(f.made_at == 200.0 and f.window_s == W for f in found)


def test_none_forecasts_nothing_and_nobody_forecasts_from_nothing():
    assert feed(Nothing(), [1, 2]).forecast(1.0, 3) == ()
    assert [f.forecast(0.0) for f in (LastWindow(), MovingAverage(), SeasonalNaive(), WarmserveCsp())] == [()] * 4


loads = st.lists(st.integers(0, 50), min_size=1, max_size=40)
params = st.builds(CspParams, num_errors=st.integers(1, 10), literal_weights=st.booleans())


@given(loads=loads, per_day=st.integers(1, 9), params=params)
def test_csp_of_windows_is_csp_of_the_series(loads, per_day, params):
    """Section 5.1: Eq. 2-4."""
    csp = feed(WarmserveCsp(W, params, season_s=per_day * W), loads)
    (found,) = csp.forecast(1.0)
    assert found.concurrency_mean == pytest.approx(forecast(loads, per_day, params), abs=1e-9)
    assert found.num_requests == pytest.approx(found.concurrency_mean)
    peaks = forecast([2 * load for load in loads], per_day, params)
    assert found.concurrency_peak == pytest.approx(max(peaks, found.concurrency_mean), abs=1e-9)


def test_csp_follows_the_season_and_corrects_by_the_newest_error():
    """Erratum E1: the newest error weighs most; literally it does not."""
    days = [1, 5, 1, 5] * 3 + [2, 10]
    csp = feed(WarmserveCsp(W, CspParams(num_errors=2), season_s=4 * W), days)
    first, second = csp.forecast(1.0, 2)
    assert first.concurrency_mean == pytest.approx(1 + (2 * 5 + 1) / 3)
    assert second.concurrency_mean == pytest.approx(5 + (2 * 5 + 1) / 3), "further ahead the season changes alone"
    literal = feed(WarmserveCsp(W, CspParams(num_errors=2, literal_weights=True), season_s=4 * W), days)
    assert literal.forecast(1.0)[0].concurrency_mean == pytest.approx(1 + (5 + 2 * 1) / 3)


def test_an_idle_model_costs_no_season():
    csp = feed(WarmserveCsp(W, season_s=1000 * W), [0] * 900)
    assert csp._seasons == {} and csp.forecast(1.0)[0].concurrency_mean == 0.0
