"""What is expected of a model without a past: that it changes as other models did at that time of the day."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MOST: Final = 50  # changes of one window of the day that its mean is about: older ones fade
LEAST: Final = 5.0  # requests, in both windows, for a change to say anything
LARGEST: Final = 1.0  # change of the logarithm that counts at most


class Alike:
    """Mean change of log requests from each window of the day to the next, over all models that share this object."""

    def __init__(self, per_day: int) -> None:
        self._means = np.zeros(per_day)
        self._nums = np.zeros(per_day)

    def learn(self, number: int, before: float, after: float) -> None:
        """Requests of window `number`, counted from any midnight, and of the one before it."""
        if min(before, after) < LEAST:
            return
        slot = number % len(self._means)
        change = min(max(float(np.log(after / before)), -LARGEST), LARGEST)
        self._nums[slot] = min(self._nums[slot] + 1, MOST)
        self._means[slot] += (change - self._means[slot]) / self._nums[slot]

    def ahead(self, number: int, num_ahead: int) -> Array | None:
        """Changes from window `number` to each of those after it; None where no model has shown the whole way."""
        slots = (number + np.arange(1, num_ahead + 1)) % len(self._means)
        if not self._nums[slots].all():
            return None
        found: Array = np.cumsum(self._means[slots])
        return found
