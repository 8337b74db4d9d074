"""Worth: probabilities against random streams, and published scores as cases."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.snapshot import Forecast, Quantile
from glowplug.policies.worth import NEVER_S, Asking, InMemory, asked, away_s, first, idle_worth, level

rates, shapes, spans = st.floats(0, 10), st.floats(0.01, 100) | st.just(math.inf), st.floats(0.001, 1e4)
idles = st.floats(0, 1e6) | st.just(NEVER_S)


def a_forecast(mean=0.0, low=None, high=None, kind="num_requests", **fields):
    band = () if low is None else (Quantile(0.1, **{kind: low}), Quantile(0.9, **{kind: high}))
    values = {"concurrency_mean": 0.0, "concurrency_peak": 0.0, kind: mean} | fields
    return Forecast(made_at=0.0, window_s=300.0, quantiles=band, **values)


@given(rate=rates, shape=shapes, idle_s=idles, within_s=spans)
def test_it_is_a_probability_that_grows_with_rate_and_time_and_falls_with_idleness(rate, shape, idle_s, within_s):
    one = asked(Asking(rate, shape, idle_s), within_s)
    assert 0 <= asked(Asking(rate, shape, idle_s), within_s, times=2) <= one <= 1
    assert asked(Asking(rate, shape, idle_s), 2 * within_s) >= one - 1e-12
    assert asked(Asking(2 * rate, shape, idle_s), within_s) >= one - 1e-12
    assert asked(Asking(rate, shape, 2 * idle_s), within_s) <= one + 1e-12


STREAMS = (Asking(0.02), Asking(0.02, 0.5), Asking(0.0, math.inf, 90.0), Asking(0.01, 2.0, 30.0))


@pytest.mark.parametrize("asking", STREAMS)
def test_it_is_what_counted_streams_show(asking):
    """A Gamma-Poisson stream for the rate, beside one whose rate is Gamma(1, idle)."""
    random, within_s, runs = Random(1), 60.0, 20_000
    at_least = [0, 0]
    for _ in range(runs):
        rate = asking.per_s
        if rate and not math.isinf(asking.shape):
            rate = random.gammavariate(asking.shape, asking.per_s / asking.shape)
        lately = 0.0 if math.isinf(asking.idle_s) else random.gammavariate(1, 1 / asking.idle_s)
        num, at = 0, 0.0
        while (total := rate + lately) > 0 and num < 2 and (at := at + random.expovariate(total)) <= within_s:
            num += 1
        for times in (1, 2):
            at_least[times - 1] += num >= times
    for times in (1, 2):
        assert asked(asking, within_s, times) == pytest.approx(at_least[times - 1] / runs, abs=0.012)


def test_mcaches_utility_is_the_case_of_rare_requests():
    """Eq. 1: penalty over size, times the rate."""
    known = [(0.001, 8.0, 3e9), (0.0002, 30.0, 24e9), (0.004, 1.0, 12e9), (0.0005, 12.0, 12e9)]
    ours = [InMemory(name="", asked=asked(Asking(rate), 10.0), climb_s=s, num_bytes=n).worth for rate, s, n in known]
    theirs = [rate * seconds / num_bytes for rate, seconds, num_bytes in known]
    assert [ours.index(w) for w in sorted(ours)] == [theirs.index(u) for u in sorted(theirs)]
    assert ours == pytest.approx([10.0 * utility for utility in theirs], rel=0.02)


def test_lru_is_the_case_without_a_forecast():
    worth = [asked(Asking(idle_s=idle_s), 60.0) for idle_s in (1.0, 10.0, 100.0, 1000.0)]
    assert worth == sorted(worth, reverse=True)
    assert worth[2] == pytest.approx(60 / 160)
    assert asked(Asking(), 60.0) == 0.0, "nobody ever asked, and nothing is forecast"


def test_warmserves_ranks_are_probabilities_that_the_load_reaches_them():
    """Eq. 7."""
    forecast = a_forecast(20.0, 14.0, 26.0, "concurrency_peak", num_requests=200.0)
    worth = [asked(level(forecast, rank, 8), 300.0) for rank in range(5)]
    assert worth == sorted(worth, reverse=True) and worth[0] > 0.99
    spread = 12 / 2.563
    assert worth[2] == pytest.approx(0.5 * math.erfc((16.5 - 20) / (spread * math.sqrt(2))), rel=1e-6)
    assert worth[4] < 0.01


def test_where_tokens_fill_an_instance_before_slots_do_they_say_when_the_next_is_needed():
    busy = a_forecast(3000.0, 2400.0, 3600.0, "prompt_tokens", prompt_per_s=1000 / 300, concurrency_peak=9.0)
    needed = [asked(level(busy, number, 256), 300.0) for number in range(6)]
    assert needed[1:] == sorted(needed[1:], reverse=True)
    assert needed[2] > 0.98 and needed[3] == pytest.approx(0.5) and needed[4] < 0.02


def test_the_band_of_a_forecast_says_how_sure_its_rate_is():
    sure, unsure = a_forecast(10.0, 6.0, 14.0), a_forecast(10.0, 0.0, 40.0)
    assert first(sure).shape > first(unsure).shape and first(sure).per_s == first(unsure).per_s == 10 / 300
    assert asked(first(sure), 60.0) > asked(first(unsure), 60.0), "the same mean, in fewer and larger bursts"
    assert first(a_forecast(0.0, 0.0, 0.0)).per_s == 0.0
    assert first(None, 5.0) == Asking(idle_s=5.0) == level(None, 1, 8, 5.0)
    bandless = a_forecast(9.0, kind="concurrency_peak", error_ratio=0.5)
    assert level(bandless, 1, 8).per_s > level(bandless, 2, 8).per_s > 0, "by the recent error"
    assert level(a_forecast(9.0, 3.0, 15.0), 0, 8) == first(a_forecast(9.0, 3.0, 15.0))


def test_who_is_wanted_out_by_nobody_stays_until_its_rent_is_what_it_saves():
    """Rent or buy: without a forecast a model asked for t ago stays until c / (t + c) falls to the price."""
    kept = [t for t in range(0, 2000, 10) if idle_worth(Asking(idle_s=t), 2.0) >= 0.01]
    assert kept[-1] == pytest.approx(2.0 * (1 / 0.01 - 1), abs=10)
    assert idle_worth(Asking(0.001), 2.0) == pytest.approx(0.001 * 2.0, rel=0.01), "each second, rate x seconds"


def test_what_is_away_is_away_for_as_long_as_another_stays():
    assert away_s(2.0, 60.0) == 62.0 and away_s(-1.0, 60.0) == 60.0
    waiting = InMemory(name="i", asked=4.0, climb_s=2.0, num_bytes=0)
    assert (waiting.saves_s, waiting.worth) == (8.0, 8.0), "nothing divides by zero"
