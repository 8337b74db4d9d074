"""Weights of the parts of `combined`: exponential weights under several rules, weights of these rules, and how far the
mixture leans towards days like this one.

    L_i       = discounted mean of loss_i and of `prior_windows` x sqrt(h) of prior_i times the least: losses h windows
                ahead overlap, and say the less
    w_i       ~ exp(-eta (L_i / min L - 1)), then a share is given to all alike

A rule that forgets within hours is right after a change; one that remembers days is right where nothing changes. RULES
has both kinds: each makes a forecast, and the forecasts are weighted by the same formula, by their losses (ACROSS).
Herbster and Warmuth 1998, "Tracking the best expert"; weights of several learning rates as in van Erven and Koolen
2016, "MetaGrad".

Twelve windows ahead the losses that weights follow are known twelve windows late, and those of a day overlap so much
that they say little of each other. But the load's distance from the days before is known at each window. So the mixture
leans towards the expert of days alike (`combined_experts.DAYS_ALIKE`) by the current distance (`Changes`):

    d      weighted mean over these days of the recent mean square of z - S_k
    v_h    mean square of z's change within h windows
    g_h    = 1 / (1 + d / (NEAR (v_h - v_1))): a day alike explains what a load changes within h windows beyond its
             change from each to the next; for a load without a shape this is nothing
    likened = mixture + g_h (days alike - mixture)

Shapes: K kinds of load, H windows ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from glowplug.policies.prediction.combined_experts import NAMES, Array

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule of exponential weights. `memory`: of losses, per window. `eta`: how sharply weights fall with the loss,
    over the least one. `prior_windows`: how many windows the prior counts for, one window ahead."""

    memory: float
    eta: float
    prior_windows: float
    share: float = 0.01


RULES: Final = (
    Rule(memory=0.9, eta=12.0, prior_windows=5.0),
    Rule(memory=0.97, eta=16.0, prior_windows=5.0),
    Rule(memory=0.99, eta=25.0, prior_windows=5.0),
)
ACROSS: Final = Rule(memory=0.99, eta=20.0, prior_windows=5.0)
LIKENED: Final = Rule(memory=0.99, eta=40.0, prior_windows=5.0)  # weighs leaning to days alike
PRIOR: Final = {
    "last": (1.00, 1.37),
    "mean 0.5": (1.16, 1.41),
    "mean 0.25": (1.56, 1.48),
    "mean 0.1": (2.45, 1.64),
    "load mean 0.2": (2.01, 1.58),
    "holt 0.8": (1.17, 1.59),
    "holt 0.5": (1.13, 1.42),
    "ridge": (1.01, 1.11),
    "csp": (1.51, 1.24),
    "peers": (1.02, 1.35),
    "day naive": (4.06, 1.57),
    "day 1.0 1.0": (1.17, 1.14),
    "day 0.5 1.0": (1.33, 1.14),
    "day 0.5 0.9": (1.42, 1.41),
    "day 0.2 0.9": (1.86, 1.44),
    "day 0.5 0.7": (1.86, 1.55),
    "profile 0.7 1.0": (1.14, 1.15),
    "profile 0.3 1.0": (1.44, 1.15),
    "profile 0.3 0.9": (1.53, 1.55),
    "profile 0.1 0.95": (2.03, 1.37),
    "analog shape 0.93 1.0": (1.10, 1.01),
    "analog level 0.93 0.9": (1.17, 1.26),
    "analog level 0.97 0.95": (1.28, 1.14),
    "analog level 0.8 0.95": (1.05, 1.08),
    "analog level 0.8 0.9": (1.15, 1.25),
    "week 0.5 1.0": (1.55, 1.51),
    "week 0.3 0.9": (1.97, 1.66),
    "wide day 0.7 1.0": (1.14, 1.13),
    "wide day 0.5 1.0": (1.24, 1.13),
    "wide day 0.3 0.95": (1.46, 1.25),
    "wide profile 0.7 1.0": (1.04, 1.10),
    "wide profile 0.5 1.0": (1.12, 1.10),
    "wide profile 0.3 0.95": (1.33, 1.30),
    "wide profile 0.2 0.9": (1.60, 1.55),
    "wide analog shape 0.93 1.0": (1.00, 1.00),
    "wide analog level 0.8 0.97": (1.01, 1.07),
    "wide analog level 0.97 0.95": (1.23, 1.12),
    "wide week 0.5 1.0": (1.41, 1.46),
    "wide week 0.3 0.9": (1.83, 1.63),
}
"""What is known of each expert before a load is: its mean loss over the best one's, 1 and 12 windows ahead, as measured
on the days and clients that `bench/forecast` calls tuned (`python -m bench.forecast priors`)."""


class Weights:
    """Weights of N forecasts, under each of M rules, by kind and horizon."""

    def __init__(self, rules: Sequence[Rule], num_kinds: int, prior: Array) -> None:
        num_ahead, num = prior.shape
        self._memory, self._eta, windows, self._share = (
            np.array(of, np.float32)[:, None, None, None]
            for of in zip(*((rule.memory, rule.eta, rule.prior_windows, rule.share) for rule in rules), strict=True)
        )
        self._for_prior = windows * np.sqrt(np.arange(1, num_ahead + 1, dtype=np.float32))[:, None]
        self._priors = prior.astype(np.float32) * self._for_prior
        self._losses = np.zeros((len(rules), num_kinds, num_ahead, num), np.float32)  # discounted sums
        self._counts = np.zeros_like(self._losses)

    def learn(self, losses: Array, is_known: Mask) -> None:
        """Learn what each forecast of a window lost (K, up to H, N), NaN where it said nothing; windows of an unknown
        kind do not count."""
        ahead, counted = losses.shape[1], np.isfinite(losses) & is_known[:, None, None]
        sums, counts = self._losses[:, :, :ahead], self._counts[:, :, :ahead]
        keep = np.where(is_known[:, None, None], self._memory, np.float32(1.0))
        sums *= keep
        sums += np.where(counted, losses, 0.0)
        counts *= keep
        counts += counted

    def of(self, there: Mask) -> Array:
        """Weights (M, K, H, N), of sum 1 over N, of the forecasts that say something now (`there`: K, H, N)."""
        silent = np.where(there, np.float32(0.0), np.float32(np.inf))
        means = np.full_like(self._losses, np.inf)
        np.divide(self._losses, self._counts, out=means, where=self._counts > 0)
        means += silent
        best = means.min(axis=3, keepdims=True)
        best = np.where(np.isfinite(best), np.maximum(best, np.float32(1e-4)), np.float32(1.0))
        blended = np.multiply(best, self._priors, out=means)
        blended += self._losses
        blended /= self._counts + self._for_prior
        blended += silent
        over = np.divide(blended, blended.min(axis=3, keepdims=True), out=blended)
        over -= np.float32(1.0)
        over *= -self._eta
        found: Array = np.exp(np.maximum(over, np.float32(-50.0), out=over), out=over)
        found *= there
        found *= (1 - self._share) / found.sum(axis=3, keepdims=True)
        found += self._share * (there / there.sum(axis=2, keepdims=True, dtype=np.float32))
        return found


def prior_of(num_ahead: int) -> Array:
    """Prior losses (H, N), interpolated by the logarithm of the horizon; the 12th counts for all after it."""
    along = np.minimum(np.log(np.arange(1, num_ahead + 1)) / np.log(12.0), 1.0)[:, None]
    near, far = np.array([PRIOR[name] for name in NAMES]).T
    found: Array = (1.0 - along) * near + along * far
    return found


NEAR: Final = 0.4  # d over v_h - v_1 at which mixture and days alike weigh the same
MEMORY: Final = 0.99  # of v_h, per window
LARGEST: Final = 2.0  # bound of a change of z


class Changes:
    """v_h of each kind of load: mean square of z's change within 1..H windows."""

    def __init__(self, num_kinds: int, num_ahead: int) -> None:
        self._past = np.full((num_kinds, num_ahead), np.nan)  # z of the last H windows, newest first
        self._sums = np.zeros((num_kinds, num_ahead))
        self._weights = np.zeros((num_kinds, num_ahead))

    def learn(self, z: Array) -> None:
        """Add z of the next window (K)."""
        changes = np.minimum(np.abs(z[:, None] - self._past), LARGEST)
        known = np.isfinite(changes)
        self._sums = self._sums * MEMORY + np.where(known, changes, 0.0) ** 2
        self._weights = self._weights * MEMORY + known
        self._past[:, 1:] = self._past[:, :-1].copy()
        self._past[:, 0] = z

    def trust(self, distances: Array) -> Array:
        """g_h, (K, H), where the load lay d (K) from the days alike; 0 for the first window ahead."""
        squares = self._sums / np.maximum(self._weights, 1.0)
        explained = np.maximum(squares - squares[:, :1], 0.0)
        found: Array = NEAR * explained / (NEAR * explained + distances[:, None] + 1e-9)
        return found
