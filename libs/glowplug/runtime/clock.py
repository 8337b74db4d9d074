"""The clock of a process.

It never steps: it runs with the monotonic clock, and follows the wall clock by at most a tenth of the time that passes.
It stands still while the process does (stopped, or on a suspended machine), so that no wait runs out meanwhile and
nobody counts as silent. Dates that people set (the end of a key or batch) go by the wall clock.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

READ_EVERY_S: Final = 1.0
MAX_GAP_S: Final = 3.0  # of a clock that is kept
SLEW: Final = 0.1


class SteadyClock:
    """`monotonic` and `wall`: the machine's clocks. `max_gap_s`: a longer time between two readings is a pause of the
    process. As of the last reading: `offset_s`, epoch minus monotonic seconds; `behind_s`, the wall clock minus this
    one, for times that people read."""

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
        self.behind_s = behind_s - by_s
        return read_at + self.offset_s

    async def keep(self) -> None:
        """Read the clock all the time, so that a long gap between two readings is a pause of the process."""
        self.now_s()
        self.max_gap_s = MAX_GAP_S
        while True:
            await asyncio.sleep(READ_EVERY_S)
            self.now_s()


CLOCK: Final = SteadyClock()
now_s: Final = CLOCK.now_s
