"""Weights of the experts in `combined`."""

import numpy as np
import pytest

from glowplug.policies.prediction.combined import ACROSS, NAMES, PRIOR, RULES, WeightRule, Weights, prior_of

KNOWN = np.array([True])


def weights(*rules: WeightRule, num: int = 2, num_ahead: int = 1) -> Weights:
    return Weights(rules, 1, np.ones((num_ahead, num)))


def lost(of: Weights, *losses: float, times: int = 1, known=KNOWN) -> Weights:
    for _ in range(times):
        of.learn(np.array(losses)[None, None, :], known)
    return of


RULE = WeightRule(memory=0.9, eta=12.0, prior_windows=10.0)


def test_weights_sum_up_and_who_lost_less_counts_more():
    first, second = lost(weights(RULE), 0.1, 0.2, times=20).of(np.ones((1, 1, 2), bool))[0, 0, 0]
    assert first + second == pytest.approx(1.0) and first > 0.9
    assert second >= RULE.share / 2 * 0.99


def test_the_prior_decides_before_anything_was_lost():
    of = Weights((RULE,), 1, np.array([[1.0, 1.2]]))
    first, second = of.of(np.ones((1, 1, 2), bool))[0, 0, 0]
    assert first / second > 5


def test_who_says_nothing_has_no_weight_and_learns_nothing():
    of = lost(weights(RULE, num=3), 0.1, np.nan, 0.1, times=5)
    sleeps = np.array([[[True, False, True]]])
    assert of.of(sleeps)[0, 0, 0].tolist() == pytest.approx([0.5, 0.0, 0.5])
    awake = of.of(np.ones((1, 1, 3), bool))[0, 0, 0]
    assert awake[1] == pytest.approx(1 / 3, abs=0.05), "as good as the best until it is seen to be worse"


def test_a_window_that_is_not_known_counts_for_nothing():
    of, there = lost(weights(RULE), 0.1, 0.2, times=5), np.ones((1, 1, 2), bool)
    before = of.of(there)
    lost(of, 3.0, 0.0, times=5, known=np.array([False]))
    assert of.of(there).tolist() == before.tolist()


def test_a_rule_that_forgets_soon_follows_a_change_before_one_that_remembers():
    soon, late = (
        WeightRule(memory=0.8, eta=12.0, prior_windows=1.0),
        WeightRule(memory=0.99, eta=12.0, prior_windows=1.0),
    )
    of = lost(lost(weights(soon, late), 0.1, 0.2, times=100), 0.2, 0.1, times=10)
    by_rule = of.of(np.ones((1, 1, 2), bool))[:, 0, 0]
    assert by_rule[0, 1] > 0.9 > 0.1 > by_rule[1, 1]


def test_every_expert_has_a_prior_and_horizons_in_between_lie_between():
    assert set(PRIOR) == set(NAMES) and min(min(pair) for pair in PRIOR.values()) == 1.0
    near, middle, far = prior_of(12)[[0, 5, 11]]
    assert np.all(np.minimum(near, far) <= middle + 1e-9) and np.all(middle <= np.maximum(near, far) + 1e-9)
    assert len({rule.memory for rule in RULES}) > 1 and 0 < ACROSS.memory < 1
