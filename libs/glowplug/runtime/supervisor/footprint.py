"""What each process of the fleet costs in memory."""

from collections.abc import Iterable, Mapping

import psutil


def memory_bytes(pid: int) -> int:
    """Proportional set size on Linux (shared pages counted once over all who share them), else unique, else resident.

    0 when the process is gone or not ours to read.
    """
    try:
        process = psutil.Process(pid)
        try:
            full = process.memory_full_info()
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
        return int(getattr(full, "pss", 0) or getattr(full, "uss", 0) or full.rss)
    except psutil.Error:
        return 0


def of_processes(pids: Mapping[str, int]) -> dict[str, int]:
    """Bytes by name."""
    return {name: memory_bytes(pid) for name, pid in pids.items() if pid}


def total(pids: Iterable[int]) -> int:
    return sum(memory_bytes(pid) for pid in pids)
