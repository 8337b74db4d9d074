"""Whether this day runs as one before it did, and how much `combined` trusts that day then.

Twelve windows ahead the losses that weights follow are known twelve windows late, and those of a day overlap so much
that they say little of each other. How far the load lies from the days before is known at each window. So the mixture
leans towards the expert of days alike (`combined_experts.DAYS_ALIKE`) by what is seen now:

    d      weighted mean over these days of the mean square of z - S_k of late
    v_h    mean square of what z changed within h windows
    g_h    = 1 / (1 + d / (NEAR (v_h - v_1))): what a load changes within h windows beyond what it does from each
             to the next is what a day alike explains; of a load without a shape this is nothing
    likened = mixture + g_h (days alike - mixture)

Shapes: K kinds of load, H windows ahead.
"""

from typing import Final

import numpy as np

from glowplug.policies.prediction.combined_experts import Array

NEAR: Final = 0.4  # d over v_h - v_1 at which mixture and days alike count the same
MEMORY: Final = 0.99  # of v_h, per window
LARGEST: Final = 2.0  # change of z that counts at most


class Changes:
    """v_h of each kind of load: what z changes within 1..H windows."""

    def __init__(self, num_kinds: int, num_ahead: int) -> None:
        self._past = np.full((num_kinds, num_ahead), np.nan)  # z of the last H windows, newest first
        self._sums = np.zeros((num_kinds, num_ahead))
        self._weights = np.zeros((num_kinds, num_ahead))

    def learn(self, z: Array) -> None:
        """The next window (K)."""
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
