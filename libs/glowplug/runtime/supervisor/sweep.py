"""Find leftovers of a killed run: each process of a fleet, engines too, has its state directory in MARK."""

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

MARK = "_GLOWPLUG_FLEET"  # not GLOWPLUG_*, which engines do not inherit


def processes_of(state_dir: Path, spare: frozenset[int] = frozenset()) -> list[psutil.Process]:
    """Living processes of this user and of `state_dir`'s fleet, without us and `spare`."""
    mine = os.getuid()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.pid in spare or process.uids().real != mine:
                continue
            if process.environ().get(MARK) == str(state_dir) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def sweep(state_dir: Path, grace_s: float = 3.0, spare: frozenset[int] = frozenset()) -> int:
    """SIGTERM, then SIGKILL; returns their number. Call only with the directory's lock."""
    left = processes_of(state_dir, spare)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(left, timeout=grace_s)
    # Engines have own sessions and may start helpers while ending: look again.
    deadline = time.monotonic() + grace_s
    while (alive := processes_of(state_dir, spare)) and time.monotonic() < deadline:
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=0.5)
    return len(left)


def memory_bytes(pid: int) -> int:
    """Proportional set size on Linux (shared pages split among users), else unique, else resident. 0 if gone or
    unreadable."""
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
    return {name: memory_bytes(pid) for name, pid in pids.items() if pid}


def engines_of(state_dir: Path, known: set[int]) -> dict[int, int]:
    """Bytes by pid of the fleet's processes except `known`: engines and their children."""
    return {p.pid: memory_bytes(p.pid) for p in processes_of(state_dir, frozenset(known))}
