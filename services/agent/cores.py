"""The load of a node's cores, which its beat tells: starts take longer where other threads run."""

import asyncio
import math
import os
from collections import deque
from pathlib import Path
from typing import Final

SAMPLE_S: Final = 0.2
NUM_SAMPLES: Final = 100  # twenty seconds
_LOAD: Final = Path("/proc/loadavg")  # its fourth field: threads that run or wait for a core, of all
_QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def num_cores(quota: Path = _QUOTA) -> float:
    """Return the cores that this process may use: those of its affinity, or less by its cgroup's quota."""
    allowed = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        most, period = quota.read_text().split()
        return min(allowed, int(most) / int(period))
    except (OSError, ValueError):  # no cgroup, or "max"
        return allowed


class CoresWatch:
    """`num_runnable`: the mean of the last seconds, to a quarter, without the thread that counts; 0: unknown."""

    def __init__(self, load: Path = _LOAD) -> None:
        self._load = load
        self._seen: deque[int] = deque(maxlen=NUM_SAMPLES)

    @property
    def num_runnable(self) -> float:
        return math.floor(4 * sum(self._seen) / len(self._seen)) / 4 if self._seen else 0.0

    def sample(self) -> None:
        try:
            self._seen.append(max(0, int(self._load.read_text().split()[3].partition("/")[0]) - 1))
        except (OSError, ValueError, IndexError):
            self._seen.clear()

    async def watch(self) -> None:
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)
