"""How the threads of an engine that computes with OpenMP wait for one another: spinning while they have the cores to
themselves, asleep as soon as others want a core.

A layer of a small model ends some ten barriers, each tens of microseconds after the one before. A thread that sleeps at
them costs a fifth of the tokens of one conversation; threads that spin beside another engine on the same cores bring
both to a standstill (bench/throughput: 1.6 tokens/s in place of 62). libgomp has no call that changes how its threads
wait. It has a rule, though: where a process has more OpenMP threads than cores, they spin for
`gomp_throttled_spin_count_var` rounds, which OMP_WAIT_POLICY=PASSIVE makes 0, and else for GOMP_SPINCOUNT. `Crowd` is a
second team of threads that do nothing: while it exists, the process has more threads than cores.
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
_SPIN_ROUNDS: Final = "60000"  # a few milliseconds: longer than any wait inside a step
_PERIOD_S: Final = 0.1
_IDLE_PERIOD_S: Final = 0.3
_BUSY_SHARE: Final = 0.2  # of one core
_CROWDED: Final = 0.25  # two engines on the same cores each wait for 0.45 of the time, one alone for 0.02 to 0.10
_FREE: Final = 0.15
_CALM_PERIODS: Final = 3
_LIBRARY: Final = "libgomp.so.1"


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What an engine's process starts with. What an operator has `given` of the two variables stays as it is."""
    said = {name: given[name] for name in (WAIT_POLICY, SPIN_COUNT) if name in given}
    return said or {WAIT_POLICY: "PASSIVE", SPIN_COUNT: _SPIN_ROUNDS}


@dataclass(frozen=True, slots=True)
class CoreTime:
    """What all threads of a process have had of cores, in nanoseconds, since each started."""

    ran_ns: int
    waited_ns: int  # ready to run, while others had the core

    def __sub__(self, earlier: "CoreTime") -> "CoreTime":
        return CoreTime(self.ran_ns - earlier.ran_ns, self.waited_ns - earlier.waited_ns)

    @property
    def waited_share(self) -> float:
        """Of the time in which its threads could have run; 0 when none could."""
        return self.waited_ns / (self.ran_ns + self.waited_ns) if self.waited_ns > 0 else 0.0


@dataclass(slots=True)
class Crowding:
    """Whether others want the cores of this process, from what its threads waited for them. It counts as crowded until
    it is known to be free: an engine that starts does so beside others as a rule."""

    is_crowded: bool = True
    _calm_periods: int = 0

    def observe(self, used: CoreTime) -> bool:
        """`used` is of one period in which the process computed. It is crowded at once, free after a few periods."""
        if not self.is_crowded:
            self.is_crowded, self._calm_periods = used.waited_share > _CROWDED, 0
        else:
            self._calm_periods = self._calm_periods + 1 if used.waited_share < _FREE else 0
            self.is_crowded = self._calm_periods < _CALM_PERIODS
        return self.is_crowded


class Crowd:
    """A team of idle OpenMP threads. Raises OSError where the engine's library is not GNU's."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._parallel = ctypes.CDLL(_LIBRARY).GOMP_parallel
        self._nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL)
        self._leave: threading.Event | None = None

    def set(self, wanted: bool) -> None:
        """Have the team or have none. A team ends with the thread that has made it."""
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
    """Of this process. Raises FileNotFoundError where the kernel does not tell."""
    ran_ns, waited_ns = 0, 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            ran, waited, _ = (task / "schedstat").read_bytes().split()
            ran_ns, waited_ns = ran_ns + int(ran), waited_ns + int(waited)
    return CoreTime(ran_ns, waited_ns)


def share_cores(num_threads: int) -> None:
    """Have the `num_threads` OpenMP threads that this process will start sleep as they wait, and follow in a thread
    when they may spin. One has nothing to wait for, and more than there are cores never spin; without GNU's library or
    a kernel that tells, they go on as the environment says."""
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
