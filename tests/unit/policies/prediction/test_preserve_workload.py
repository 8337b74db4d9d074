"""PreServe's workload predictor."""

import builtins
import math
import sys
from random import Random
from statistics import fmean

import numpy as np
import pytest

from glowplug.domain.errors import BadRequest
from glowplug.policies.prediction.port import WindowTotals, make_with
from glowplug.policies.registry import choose
from glowplug_lab.policies.preserve_mlstm import Trainer, draw_weights, gradients, predict
from glowplug_lab.policies.preserve_workload import PreserveWorkload, SeriesParams, TokenSeries, WorkloadParams
from glowplug_lab.policies.warmserve_csp import WarmserveCsp

PER_DAY = 48
DAY_S = PER_DAY * 600.0
FAST = WorkloadParams(season_s=DAY_S, epochs_per_window=60, series=SeriesParams(num_epochs=60))


def load(at: int, chance: Random, noise: float = 0.03) -> float:
    """Days of 48 windows: noon is three times the night."""
    return (2.0 - math.cos(2 * math.pi * at / PER_DAY)) * 10_000 * math.exp(chance.gauss(0, noise))


def window(at: int, prompt: float, response: float = 0.0) -> WindowTotals:
    return WindowTotals(
        started_at=at * 600.0,
        window_s=600.0,
        num_requests=prompt / 100,
        prompt_tokens=prompt,
        response_tokens=response or prompt / 5,
        concurrency_mean=3.0,
        concurrency_peak=5.0,
    )


def fed(num_windows: int, params: WorkloadParams = FAST, seed: int = 1) -> PreserveWorkload:
    forecaster, chance = PreserveWorkload(600.0, params), Random(seed)
    for at in range(num_windows):
        forecaster.closed(window(at, load(at, chance)))
    return forecaster


def test_gradients_are_those_of_the_loss():
    """Against finite differences, for every weight."""
    chance = np.random.default_rng(3)
    weights = draw_weights(2, 4, seed=1)
    weights["yw"] = chance.normal(size=4)
    inputs, answers = chance.normal(size=(5, 6, 2)), chance.normal(size=5)
    _, grads = gradients(weights, inputs, answers)
    for name, value in weights.items():
        for at in np.ndindex(value.shape):
            kept, small = value[at], 1e-6
            value[at] = kept + small
            above = gradients(weights, inputs, answers)[0]
            value[at] = kept - small
            below = gradients(weights, inputs, answers)[0]
            value[at] = kept
            assert grads[name][at] == pytest.approx((above - below) / (2 * small), abs=1e-6), (name, at)


def test_the_transition_is_multiplicative():
    """With the hidden state silenced (W_mh = 0) only the cell carries the past."""
    weights = draw_weights(1, 3, seed=1)
    weights["yw"] = np.ones(3)
    weights["mh"] = np.zeros((3, 3))
    other = {**weights, "mx": weights["mx"] * 7}
    inputs = np.random.default_rng(1).normal(size=(4, 5, 1))
    assert np.allclose(predict(weights, inputs), predict(other, inputs))
    weights["mh"] = np.eye(3)
    assert not np.allclose(predict(weights, inputs), predict({**weights, "mx": weights["mx"] * 7}, inputs))


def test_training_learns_what_only_the_past_tells():
    chance = np.random.default_rng(5)
    inputs = chance.normal(size=(200, 6, 1))
    answers = np.tanh(inputs[:, 1, 0])
    trainer = Trainer(draw_weights(1, 8, seed=1), learning_rate=0.02)
    first = trainer.step(inputs, answers)
    for _ in range(250):
        last = trainer.step(inputs, answers)
    assert last < 0.4 * first


def learned_series(noise: float = 0.03, seed: int = 1) -> tuple[TokenSeries, list[float]]:
    chance = Random(seed)
    values = [load(at, chance, noise) for at in range(4 * PER_DAY)]
    series = TokenSeries(PER_DAY, SeriesParams())
    for value in values[: 3 * PER_DAY]:
        series.add(value)
    assert series.begin_training() and series.is_training
    assert series.ahead(2) == [], "nothing is said before it has been learned"
    while not series.train(20):
        pass
    return series, values


def test_two_steps_ahead_beat_the_last_window():
    """Section 4.1, Algorithm 2."""
    series, values = learned_series()
    errors: dict[str, list[float]] = {"one": [], "two": [], "last": [], "last of two": []}
    for at in range(3 * PER_DAY, 4 * PER_DAY - 1):
        one, two = series.ahead(2)
        errors["one"].append(abs(one / values[at] - 1))
        errors["two"].append(abs(two / values[at + 1] - 1))
        errors["last"].append(abs(values[at - 1] / values[at] - 1))
        errors["last of two"].append(abs(values[at - 1] / values[at + 1] - 1))
        series.add(values[at])
    mean = {name: fmean(found) for name, found in errors.items()}
    assert mean["one"] < 0.85 * mean["last"]
    assert mean["two"] < 0.7 * mean["last of two"]


def test_the_scale_is_that_of_the_training_days():
    """Erratum E30."""
    series, values = learned_series()
    assert series.learned is not None
    scale, before = series.learned[0], series.ahead(1)
    assert scale.back(float(scale.to(np.array([max(values[: 3 * PER_DAY])]))[0])) == pytest.approx(
        max(values[: 3 * PER_DAY])
    )
    series.add(1e9)
    assert series.learned[0] is scale
    series.values.pop()
    assert series.ahead(1) == before
    assert 0 <= series.ahead(1)[0] <= 10 * max(values)


def test_an_even_or_short_series_is_not_learned():
    series = TokenSeries(PER_DAY, SeriesParams())
    for _ in range(2 * PER_DAY):
        series.add(5.0)
    assert not series.begin_training()
    short = TokenSeries(PER_DAY, SeriesParams())
    short.add(1.0)
    assert not short.begin_training() and short.ahead(1) == []


def test_a_series_forgets_what_it_will_not_train_on():
    series = TokenSeries(PER_DAY, SeriesParams(max_days=2))
    for _ in range(PER_DAY):
        series.add(0.0)
    assert not series.values, "a model that was never asked for costs nothing"
    for at in range(10 * PER_DAY):
        series.add(float(at))
    assert len(series.values) == 3 * PER_DAY + 12 and series.values[-1] == 10 * PER_DAY - 1


def test_cold_until_there_are_days_then_learned_and_retrained_daily():
    """Section 4.1."""
    forecaster, csp = PreserveWorkload(600.0, FAST), WarmserveCsp(600.0, season_s=DAY_S)
    assert forecaster.forecast(0.0, 2) == ()
    chance = Random(1)
    weights = []
    for at in range(4 * PER_DAY):
        one = window(at, load(at, chance))
        forecaster.closed(one)
        csp.closed(one)
        told, cold = forecaster.forecast(600.0 * (at + 1), 2), csp.forecast(600.0 * (at + 1), 2)
        assert [f.starts_at for f in told] == [(at + 1) * 600.0, (at + 2) * 600.0]
        assert all(f.source == "preserve_workload" for f in told)
        assert [f.concurrency_mean for f in told] == [f.concurrency_mean for f in cold]
        is_cold = at + 1 < 2 * PER_DAY - 3  # it learns in one window, and begins so early that two are left
        assert ([f.prompt_tokens for f in told] == [f.prompt_tokens for f in cold]) is is_cold
        weights.append(forecaster.prompts.learned)
    assert len({id(w) for w in weights if w is not None}) == 3, "learned after the 2nd, 3rd and 4th day"


def test_training_is_spread_over_windows_and_the_old_weights_serve_meanwhile():
    params = WorkloadParams(season_s=DAY_S, epochs_per_window=10, series=SeriesParams(num_epochs=40))
    for num_windows, is_training, is_learned in (
        (2 * PER_DAY - 6, True, False),
        (2 * PER_DAY - 2, False, True),
        (3 * PER_DAY - 5, True, True),
    ):
        prompts = fed(num_windows, params).prompts
        assert (prompts.is_training, prompts.learned is not None) == (is_training, is_learned)


def test_a_model_that_sleeps_most_of_the_day_is_not_learned():
    forecaster = PreserveWorkload(600.0, FAST)
    for at in range(3 * PER_DAY):
        forecaster.closed(window(at, 1000.0 if at % PER_DAY < 5 else 0.0))
    assert forecaster.prompts.learned is None and forecaster.forecast(0.0)[0].prompt_tokens >= 0


def test_the_same_windows_give_the_same_forecasts():
    one, other = (fed(2 * PER_DAY + 3, seed=4).forecast(0.0, 3) for _ in range(2))
    assert one == other


def test_combined_is_refused_by_name_without_numpy(monkeypatch):
    make = choose("prediction", "combined")
    real = builtins.__import__

    def none(name, *args, **kwargs):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name="numpy")
        return real(name, *args, **kwargs)

    for name in [n for n in sys.modules if n.startswith("glowplug.policies.prediction.combined")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", none)
    with pytest.raises(BadRequest, match=r"needs numpy, .*predictor") as caught:
        make(600.0)
    assert caught.value.param == "policy_prediction"


def test_by_name():
    make = choose("prediction", "preserve_workload")
    assert make.WINDOW_S == 600.0 and isinstance(make(300.0), PreserveWorkload)


def test_a_squeezed_trace_has_shorter_days():
    """Section 5.1 squeezes two days into two hours."""
    make = choose("prediction", "preserve_workload")
    assert make_with(make, 25.0, 3600.0).prompts.per_day == 144
    assert make_with(make, 600.0).prompts.per_day == 144
    assert make_with(choose("prediction", "warmserve_csp"), 25.0, 3600.0).season_s == 3600.0
    assert make_with(choose("prediction", "last_window"), 25.0, 3600.0).window_s == 25.0
