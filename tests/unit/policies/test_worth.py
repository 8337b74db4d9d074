"""Worth: probabilities against random streams, and published scores as cases."""

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.snapshot import ClassLoad, Forecast, ModelLoad, Quantile
from glowplug.policies.worth import (
    NEVER_S,
    Asking,
    InMemory,
    asked,
    away_s,
    batch_factor,
    expected_factor,
    first,
    idle_worth,
    level,
    num_weighted,
    running_factor,
)

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


def test_who_asks_never_or_at_once_and_how_many_there_are_at_least():
    """By hand: none comes with P0 = e^-1 of the rate and 1/2 of the other, one with e^-1 and 1/2."""
    both, p0 = Asking(0.1, math.inf, 10.0), math.exp(-1)
    assert asked(both, 10.0) == pytest.approx(1 - p0 / 2)
    assert asked(both, 10.0, times=2) == pytest.approx(1 - p0 / 2 - p0 / 2 - p0 / 4)
    gamma = Asking(0.1, 2.0, 10.0)  # (1 + 1/2)^-2, and once 4/9 / 1.5
    assert asked(gamma, 10.0) == pytest.approx(1 - 4 / 18)
    assert asked(gamma, 10.0, times=2) == pytest.approx(1 - 4 / 18 - 4 / 27 - 1 / 9)
    assert asked(Asking(0.1, idle_s=0.0), 0.0) == asked(Asking(0.1), -1.0) == asked(Asking(-1.0), 10.0) == 0.0
    assert asked(Asking(0.1), 1.0) == pytest.approx(1 - math.exp(-0.1))
    assert asked(Asking(-0.1, idle_s=9.0), -1.0) == 0.0, "nothing comes in the past"
    assert asked(Asking(idle_s=-5.0), 10.0) == 1.0


def test_a_forecasts_spread_beyond_poissons_own_is_the_shape_of_its_rate():
    """Of mean 10 and a standard deviation of 8: k = 100 / (64 - 10)."""
    wide = a_forecast(10.0, 0.0, 8 * 2.563)
    assert first(wide, 7.0) == Asking(10 / 300, pytest.approx(100 / 54), 7.0)
    assert first(a_forecast(16.0, 0.0, 4 * 2.563)).shape == math.inf, "no wider than chance alone"
    assert first(a_forecast(0.25, 0.0, 2.563)).shape == pytest.approx(0.0625 / 0.75)
    alike = Quantile(0.5, num_requests=2.0), Quantile(0.5, num_requests=20.0)
    assert first(replace(wide, quantiles=alike)).shape == math.inf, "no band at all"
    assert first(a_forecast(-3.0, 0.0, 9.0)) == Asking(0.0)
    assert first(a_forecast(4.0, concurrency_peak=9.0)).per_s == 9 / 300, "as many as there are at once come at least"
    for error_ratio, sigma in ((0.1, 0.25), (0.5, 0.5)):
        assert first(a_forecast(100.0, error_ratio=error_ratio)).shape == pytest.approx(
            1e4 / ((100 * sigma) ** 2 - 100)
        )
    inner = Quantile(0.3, num_requests=2.0), Quantile(0.7, num_requests=2.0 + 4 * 2.563)
    half = replace(wide, quantiles=inner)
    assert first(half).shape == pytest.approx(100 / (64 - 10)), "a band half as wide in shares is of twice the spread"


@pytest.mark.parametrize("window_s", [0.0, -1.0])
def test_a_forecast_of_no_time_says_nothing(window_s):
    none = replace(a_forecast(9.0, concurrency_peak=9.0), window_s=window_s)
    assert first(none, 5.0) == level(none, 2, 1, 5.0) == Asking(idle_s=5.0)
    short = replace(none, window_s=0.5)
    assert first(short).per_s == 18.0 and level(short, 1, 1).per_s > 0


def test_the_level_of_need_is_what_the_likeliest_of_slots_and_tokens_says():
    def needed(**fields):
        return 1 - math.exp(-level(a_forecast(**fields), 2, 4, 5.0).per_s * 300)

    sure = {"low": 1.0, "high": 1.0}  # no spread
    assert needed(mean=9.0, kind="concurrency_peak", **sure) == pytest.approx(1.0)
    assert needed(mean=8.5, kind="concurrency_peak", **sure) == 0.0, "two instances of four slots hold eight"
    per_s = {"prompt_tokens": "prompt_per_s", "response_tokens": "response_per_s"}
    for kind, rate in per_s.items():
        assert needed(mean=601.0, kind=kind, **{rate: 1.0}, **sure) == pytest.approx(1.0)
        assert needed(mean=600.0, kind=kind, **{rate: 1.0}, **sure) == 0.0
        assert needed(mean=601.0, kind=kind, **sure) == 0.0, "an unknown rate serves any number"
        assert needed(mean=660.0, kind=kind, **{rate: 1.0}, low=600.0, high=600.0 + 60 * 2.563) == pytest.approx(
            0.5 * math.erfc(-1 / math.sqrt(2))
        )
    assert level(a_forecast(-4.0, 0.0, 2.563, "concurrency_peak"), 1, 0).per_s == pytest.approx(
        -math.log(1 - 0.5 * math.erfc(0.5 / math.sqrt(2))) / 300
    )
    assert level(a_forecast(9.0, kind="concurrency_peak"), 1, 4, 5.0).idle_s == 5.0


def a_load(**by_class):
    """Three of any class wait, and three run; `by_class`: waiting, running and seconds alone."""
    classes = {
        name: ClassLoad(num_waiting=waits, in_flight_by_instance={"i": runs} if runs else {}, alone_s=alone_s)
        for name, (waits, runs, alone_s) in by_class.items()
    }
    return ModelLoad(num_waiting=3, num_in_flight=3, by_class=classes)


@pytest.mark.parametrize(
    ("load", "waiting", "running", "expected"),
    [
        (a_load(), 3.0, 1.0, 1.0),
        (a_load(interactive=(2, 1, 0.0)), 1 + 2 * 4, 4.0, 1.0),
        (a_load(interactive=(0, 0, 99.0)), 3.0, 1.0, 1.0),
        (a_load(batch=(2, 2, 59.9)), 1 + 2 * 0.25, 1.0, 1.0),
        (a_load(batch=(3, 3, 60.0)), 3 * 0.25, 0.25, 0.25),
        (a_load(interactive=(1, 1, 0.0), batch=(2, 2, 60.0)), 4 + 2 * 0.25, 4.0, 0.25),
    ],
)
def test_requests_weigh_by_their_class(load, waiting, running, expected):
    assert (num_weighted(3, load), running_factor(load), expected_factor(load)) == (waiting, running, expected)


@pytest.mark.parametrize(
    ("waited_s", "max_wait_s", "factor"),
    [(0.0, 900.0, 0.25), (-9.0, 900.0, 0.25), (150.0, 900.0, 0.625), (300.0, 900.0, 1.0), (900.0, 900.0, 1.0),
     (5.0, 20.0, 0.625), (10.0, 20.0, 1.0), (0.25, 1.0, 0.625), (0.0, 0.0, 1.0), (0.0, -1.0, 1.0)],
)  # fmt: skip
def test_waiting_batch_becomes_a_standard_request_within_five_minutes_or_half_of_its_wait(waited_s, max_wait_s, factor):
    assert batch_factor(waited_s, max_wait_s) == pytest.approx(factor)
