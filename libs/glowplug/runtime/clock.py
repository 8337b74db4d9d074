"""The clock of a process.

It never steps: it runs with the monotonic clock, and follows the wall clock by at most a tenth of the time that passes.
It stands still while the process does (stopped, or on a suspended machine), so that no wait runs out meanwhile and
no node counts as silent. Times leave the process by the wall clock (`published`), and dates that people set, as the
end of a key, go by it.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final, TypeVar

from glowplug.domain.moment import moved

READ_EVERY_S: Final = 1.0
MAX_GAP_S: Final = 3.0  # of a clock that is kept
SLEW: Final = 0.1
APART_S: Final = 0.2  # clocks that differ by less are alike
T = TypeVar("T")


class SteadyClock:
    """`monotonic` and `wall`: the machine's clocks. `max_gap_s`: a longer time between two readings is a pause of the
    process. As of the last reading: `offset_s`, epoch minus monotonic seconds; `behind_s`, the wall clock minus this
    one, and 0 for less than APART_S."""

    __slots__ = ("_monotonic", "_read_at", "_wall", "behind_s", "max_gap_s", "offset_s")

    def __init__(
        self,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        max_gap_s: float = math.inf,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._read_at, self.max_gap_s = monotonic(), max_gap_s
        self.offset_s, self.behind_s = wall() - self._read_at, 0.0

    def now_s(self) -> float:
        """Read the clock, in epoch seconds."""
        read_at = self._monotonic()
        passed_s, self._read_at = read_at - self._read_at, read_at
        if passed_s > self.max_gap_s:
            self.offset_s -= passed_s
            self.behind_s += passed_s
            return read_at + self.offset_s
        most_s, behind_s = passed_s * SLEW, self._wall() - read_at - self.offset_s
        by_s = most_s if behind_s > most_s else -most_s if behind_s < -most_s else behind_s
        self.offset_s += by_s
        behind_s -= by_s
        self.behind_s = 0.0 if -APART_S < behind_s < APART_S else behind_s
        return read_at + self.offset_s

    async def keep(self) -> None:
        """Read the clock all the time, so that a long gap between two readings is a pause of the process."""
        self.now_s()
        self.max_gap_s = MAX_GAP_S
        try:
            while True:
                await asyncio.sleep(READ_EVERY_S)
                self.now_s()
        finally:
            self.max_gap_s = math.inf


CLOCK: Final = SteadyClock()
now_s: Final = CLOCK.now_s


def published(value: T, behind_s: float | None = None) -> T:
    """Return a dataclass with its times by the wall clock, as others read them. `behind_s`: of the clock, as read once
    for several."""
    by_s = CLOCK.behind_s if behind_s is None else behind_s
    return moved(value, by_s) if by_s else value
