"""How much each expert of `combined` counts: exponential weights under several rules, and weights of these rules.

    L_i       = discounted mean of loss_i and of `prior_windows` x sqrt(h) of prior_i times the least: losses h windows
                ahead overlap, and say the less
    w_i       ~ exp(-eta (L_i / min L - 1)), then a share is dealt to all alike

What forgets within hours is right after a change, what remembers days is right where nothing changes: RULES are both,
each says what it expects, and they are weighed by the same formula, by what they lost (ACROSS). Herbster and Warmuth
1998, "Tracking the best expert"; weights of several rates of learning as in van Erven and Koolen 2016, "MetaGrad".
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
    """`memory`: of losses, per window. `eta`: how sharply weights fall with the loss, over the least one.
    `prior_windows`: for how many windows the prior stands, one window ahead."""

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
LIKENED: Final = Rule(memory=0.99, eta=40.0, prior_windows=5.0)  # of the mixture, and of it leaning to days alike
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
    """Of N forecasts, under each of M rules, by kind and horizon."""

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
        """What each forecast of a window lost (K, up to H, N), NaN where it said nothing; windows of a kind that are
        not known count for nothing."""
        ahead, counted = losses.shape[1], np.isfinite(losses) & is_known[:, None, None]
        sums, counts = self._losses[:, :, :ahead], self._counts[:, :, :ahead]
        keep = np.where(is_known[:, None, None], self._memory, np.float32(1.0))
        sums *= keep
        sums += np.where(counted, losses, 0.0)
        counts *= keep
        counts += counted

    def of(self, there: Mask) -> Array:
        """(M, K, H, N), of sum 1 over N; of those that say something now (K, H, N)."""
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
    """(H, N), in between by the logarithm of the horizon; the 12th stands for those after it."""
    along = np.minimum(np.log(np.arange(1, num_ahead + 1)) / np.log(12.0), 1.0)[:, None]
    near, far = np.array([PRIOR[name] for name in NAMES]).T
    found: Array = (1.0 - along) * near + along * far
    return found
