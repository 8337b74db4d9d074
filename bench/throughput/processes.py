"""The cost of processes: CPU seconds, and how often they give up a core and wake again, as the kernel counts both."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """The counts of one process, all of its threads, since it started."""

    cpu_s: float
    wakeups: int  # voluntary context switches: it waited for something, and was woken

    def __sub__(self, earlier: "Usage") -> "Usage":
        return Usage(self.cpu_s - earlier.cpu_s, self.wakeups - earlier.wakeups)


def usage(pid: int) -> Usage | None:
    """The counts of a process; None if it is gone."""
    cpu_ns, wakeups = 0, 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                cpu_ns += int((task / "schedstat").read_text().split()[0])
                status = (task / "status").read_text()
                wakeups += int(status.partition("\nvoluntary_ctxt_switches:")[2].split(maxsplit=1)[0])
    except FileNotFoundError:
        return None
    return Usage(cpu_ns / 1e9, wakeups)


def usages(pids: Iterable[int]) -> dict[int, Usage]:
    """The counts by pid, of those that live."""
    return {pid: used for pid in pids if (used := usage(pid)) is not None}


def family(pid: int) -> list[int]:
    """The pids of a process and its descendants."""
    leader = psutil.Process(pid)
    return [process.pid for process in (leader, *leader.children(recursive=True))]
