"""What each process of the fleet costs in memory."""

from collections.abc import Mapping
from pathlib import Path

import psutil

from glowplug.runtime.supervisor.sweep import processes_of


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


def engines_of(state_dir: Path, known: set[int]) -> dict[int, int]:
    """Bytes by pid of every process of this fleet that is not one of `known`: its engines and what they started."""
    return {p.pid: memory_bytes(p.pid) for p in processes_of(state_dir, frozenset(known))}
