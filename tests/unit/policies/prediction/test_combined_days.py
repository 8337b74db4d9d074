"""How far `combined` leans to similar days."""

import numpy as np
import pytest

from glowplug.policies.prediction.combined import DAYS_ALIKE, NAMES, NEAR, Changes, Mixture
from glowplug.policies.prediction.learned import CombinedParams

PER_DAY = 24


def after(*values: float, num_ahead: int = 4) -> Changes:
    changes = Changes(1, num_ahead)
    for value in values:
        changes.learn(np.array([value]))
    return changes


def test_a_load_that_moves_is_trusted_to_run_like_a_day_that_is_near():
    near, far = (after(*np.arange(40) * 0.1).trust(np.array([d]))[0] for d in (0.0001, 10.0))
    assert near[0] == far[0] == 0.0, "of the next window losses are known soon enough"
    assert near[1:].min() > 0.95 and far.max() < 0.05
    assert list(near) == sorted(near)


def test_at_the_distance_named_both_count_the_same():
    changes = after(*np.arange(200) * 0.1)
    explained = 0.2**2 - 0.1**2
    assert changes.trust(np.array([NEAR * explained]))[0, 1] == pytest.approx(0.5)


def test_noise_is_no_shape_and_an_empty_past_says_nothing():
    noise = after(*np.random.default_rng(1).normal(0.0, 1.0, 400))
    assert noise.trust(np.array([0.5])).max() < 0.1
    assert after(1.0).trust(np.array([0.0])).tolist() == [[0.0] * 4]


def test_one_jump_counts_at_most_as_much_as_any():
    wild, large = (after(*[0.0] * 20, jump, *[0.0] * 3).trust(np.array([0.1])) for jump in (50.0, 2.0))
    assert wild.tolist() == large.tolist()


def mixture_after(days: list[float]) -> Mixture:
    """Sine-shaped days of these heights, with 3 % noise."""
    mixture, chance = Mixture(PER_DAY, CombinedParams(), np.ones(1)), np.random.default_rng(2)
    shape = 1.0 - 0.8 * np.cos(2 * np.pi * np.arange(PER_DAY) / PER_DAY)
    for number, high in enumerate(days):
        last = PER_DAY if number + 1 < len(days) else PER_DAY // 2
        for value in 1000.0 * high * shape[:last] * chance.normal(1.0, 0.03, last):
            mixture.close(np.array([value]), None)
    return mixture


def test_it_leans_to_a_day_before_where_one_is_alike_and_else_less():
    alike, unlike = (mixture_after([1.0, 0.3, 0.3, now]) for now in (1.0, 3.0))
    assert alike._leans[0, 11] > 0.4 > unlike._leans[0, 11]
    loads, weights = alike.said(0)
    assert weights.sum(axis=1) == pytest.approx(1.0)
    assert weights[11, DAYS_ALIKE] > alike._leans[0, 11] - 1e-6 and NAMES[DAYS_ALIKE].startswith("wide analog level")
    assert np.isfinite(loads).any()
