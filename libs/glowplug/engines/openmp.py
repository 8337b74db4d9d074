"""Let an OpenMP engine's threads spin at barriers while they have the cores to themselves, and sleep otherwise.

Sleeping costs a fifth of the tokens of one conversation; spinning beside another engine on the same cores brings both
to a standstill (bench/throughput: 1.6 tokens/s in place of 62). libgomp cannot change its wait at run time, but in a
process with more OpenMP threads than cores threads spin for `gomp_throttled_spin_count_var` rounds (0 with
OMP_WAIT_POLICY=PASSIVE), else for GOMP_SPINCOUNT. `Crowd` is an idle second team: while it exists, threads outnumber
cores.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WAIT_POLICY, SPIN_COUNT = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
_SPIN_ROUNDS: Final = "60000"  # a few milliseconds: longer than any wait within a step
_PERIOD_S: Final = 0.1
_IDLE_PERIOD_S: Final = 0.3
_BUSY_SHARE: Final = 0.2  # of one core
_CROWDED: Final = 0.25  # two engines on the same cores wait for 0.45 of the time, one alone for 0.02 to 0.10
_FREE: Final = 0.15
_CALM_PERIODS: Final = 3
_LIBRARY: Final = "libgomp.so.1"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Keep the variables `given` by an operator."""
    said = {name: given[name] for name in (WAIT_POLICY, SPIN_COUNT) if name in given}
    return said or {WAIT_POLICY: "PASSIVE", SPIN_COUNT: _SPIN_ROUNDS}


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Core time of all threads, since each started."""

    ran_ns: int
    waited_ns: int  # runnable, while others had the core

    def __sub__(self, earlier: "CoreTime") -> "CoreTime":
        return CoreTime(self.ran_ns - earlier.ran_ns, self.waited_ns - earlier.waited_ns)

    @property
    def waited_share(self) -> float:
        """Share of runnable time; 0 if never runnable."""
        return self.waited_ns / (self.ran_ns + self.waited_ns) if self.waited_ns > 0 else 0.0


@dataclass(slots=True)
class Crowding:
    """Detects by its threads' waits whether others want the cores. Initially crowded: an engine usually starts
    beside others."""

    is_crowded: bool = True
    _calm_periods: int = 0

    def observe(self, used: CoreTime) -> bool:
        """`used` covers one period of computing."""
        if not self.is_crowded:
            self.is_crowded, self._calm_periods = used.waited_share > _CROWDED, 0
        else:
            self._calm_periods = self._calm_periods + 1 if used.waited_share < _FREE else 0
            self.is_crowded = self._calm_periods < _CALM_PERIODS
        return self.is_crowded


class Crowd:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._parallel = ctypes.CDLL(_LIBRARY).GOMP_parallel
        self._nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        self._leave: threading.Event | None = None

    def set(self, wanted: bool) -> None:
        """A team ends with the thread that made it."""
        if wanted and self._leave is None:
            self._leave = threading.Event()
            threading.Thread(target=self._stand, args=(self._leave,), name="openmp-crowd", daemon=True).start()
        elif not wanted and self._leave is not None:
            self._leave.set()
            self._leave = None

    def _stand(self, leave: threading.Event) -> None:
        self._parallel(self._nothing, None, self._num_threads, 0)
        leave.wait()


def core_time() -> CoreTime:
    """Raises FileNotFoundError where the kernel has no such counters."""
    ran_ns, waited_ns = 0, 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            ran, waited, _ = (task / "schedstat").read_bytes().split()
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
    return CoreTime(ran_ns, waited_ns)


def share_cores(num_threads: int) -> None:
    """Make this process's `num_threads` future OpenMP threads sleep at barriers, and spin while the cores are free.
    No effect on one thread, on more than there are cores, or without GNU's library or the kernel's counters."""
    if not Path("/proc/self/schedstat").exists():
        return
    num_cores = len(os.sched_getaffinity(0))
    if not 1 < num_threads <= num_cores:
        return
    try:
        crowd = Crowd(num_cores - num_threads + 2)
    except OSError:
        return
    crowd.set(True)
    threading.Thread(target=_follow, args=(crowd,), name="openmp-wait", daemon=True).start()


def _follow(crowd: Crowd) -> None:
    crowding, before, period_s = Crowding(), core_time(), _IDLE_PERIOD_S
    while True:
        time.sleep(period_s)
        now = core_time()
        used, before = now - before, now
        if used.ran_ns < _BUSY_SHARE * period_s * 1e9:
            period_s = _IDLE_PERIOD_S
            continue
        period_s = _PERIOD_S
        crowd.set(crowding.observe(used))
