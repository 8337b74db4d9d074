"""Forecasts of a model: which are the latest, and what is to come until a start serves."""

import math

import pytest

from glowplug.domain.snapshot import Forecast
from glowplug.events.facts import ForecastMade
from glowplug.fleet.forecasts import Ahead, Forecasts


def window(starts_at: float, value: float = 1.0, made_at: float = 0.0) -> Forecast:
    return Forecast(
        made_at=made_at, window_s=10.0, starts_at=starts_at, concurrency_mean=value, concurrency_peak=2 * value,
        num_requests=3 * value,
    )  # fmt: skip


THREE = tuple(window(100.0 + 10 * n, (1.0, 5.0, 3.0)[n]) for n in range(3))
FIRST, SECOND, LAST = THREE


@pytest.mark.parametrize(
    ("at_s", "open_ones", "nearest"),
    [
        (99.0, (), FIRST),
        (100.0, THREE, FIRST),
        (109.0, THREE, FIRST),
        (110.0, THREE[1:], SECOND),
        (129.0, THREE[2:], LAST),
        (130.0, (), LAST),
        (140.0, (), LAST),
        (141.0, (), None),
    ],
)
def test_the_window_of_a_time_counts_and_the_last_one_for_one_window_more(
    at_s: float, open_ones: tuple[Forecast, ...], nearest: Forecast | None
) -> None:
    ahead = Ahead(THREE)
    assert (ahead.windows_from(at_s), ahead.nearest(at_s)) == (open_ones, nearest)


def test_windows_without_a_beginning_are_always_near_and_none_is_none() -> None:
    undated = window(0.0)
    assert Ahead((undated,)).nearest(1e6) is undated
    assert Ahead().nearest(0.0) is None and not Ahead() and Ahead((undated,))


@pytest.mark.parametrize(
    ("horizon_s", "mean", "peak", "requests"), [(0.0, 1, 2, 3), (8.0, 1, 2, 3), (8.5, 5, 10, 15), (30.0, 5, 10, 15)]
)
def test_until_a_start_serves_the_highest_load_counts(horizon_s: float, mean: int, peak: int, requests: int) -> None:
    found = Ahead(THREE, horizon_s).until_a_start_serves(FIRST, 102.0)
    assert (found.concurrency_mean, found.concurrency_peak, found.num_requests) == (mean, peak, requests)
    assert found.starts_at == 100.0


def test_windows_before_this_one_do_not_count() -> None:
    assert Ahead(THREE, 30.0).until_a_start_serves(LAST, 122.0) is LAST


def test_what_is_expected_changes_where_a_window_begins_comes_into_sight_or_ends() -> None:
    times = [0.0]
    for _ in range(8):
        times.append(Ahead(THREE, 4.0).changes_at(times[-1]))
    assert times[1:] == [96.0, 100.0, 106.0, 110.0, 116.0, 120.0, 130.0, math.inf]
    assert Ahead().changes_at(0.0) == math.inf


def test_forecasts_are_over_with_the_end_of_the_last_window() -> None:
    assert [Ahead(THREE).is_over(at_s) for at_s in (129.0, 130.0)] == [False, True]
    assert Ahead((FIRST,)).is_over(110.0) and not Ahead().is_over(1e9)


@pytest.mark.parametrize(
    ("known_at", "made_at", "is_taken"),
    [(50.0, 49.0, False), (50.0, 50.0, True), (50.0, 51.0, True), (60.0, 49.0, False), (60.5, 49.0, True)],
)
def test_the_newer_forecasts_stay_unless_they_are_from_the_future(
    known_at: float, made_at: float, is_taken: bool
) -> None:
    known, fact = Ahead((window(100.0, 1.0, known_at),)), (window(100.0, 2.0, made_at),)
    found = known.after(ForecastMade(model_key="m", forecasts=fact, horizon_s=7.0), 60.0)
    assert found == (Ahead(fact, 7.0) if is_taken else known)
    assert known.after(ForecastMade(model_key="m", forecasts=()), 60.0) is known


def test_forecasts_of_all_models_are_kept_until_they_are_over() -> None:
    kept = Forecasts()
    assert not kept
    kept.take(ForecastMade(model_key="none", forecasts=()), 0.0)
    assert not kept
    for key, windows in (("a", THREE), ("b", THREE[:1])):
        kept.take(ForecastMade(model_key=key, forecasts=windows, horizon_s=9.0), 0.0)
    found = kept.of("a", 102.0)
    assert found is not None and found.concurrency_mean == 5.0 and kept.of("c", 102.0) is None
    assert kept.expected(120.0) == {"a": LAST, "b": FIRST}
    assert kept.expected(121.0) == {"a": LAST} and kept.of("b", 100.0) is None and kept
