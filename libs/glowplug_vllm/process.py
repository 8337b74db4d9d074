"""Undo in a forked server's process what an exec would have: inherited sockets, thread settings and signal handlers.
Linux; standard library only."""

import contextlib
import ctypes
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(within_s: float = 10.0) -> None:
    """Request SIGTERM at the parent's end, and SIGKILL `within_s` later: an engine core outlives a killed API server
    otherwise. vLLM's handler of SIGTERM puts into a queue; where the main thread is just taking that queue's lock, the
    handler waits for its own thread for ever."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        watched = -1
    if os.getppid() != parent:  # it ended before the request was in force
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=_end, args=(watched, within_s), daemon=True).start()


def _end(watched: int, within_s: float) -> None:
    if watched >= 0:
        select.select([watched], [], [])
    time.sleep(within_s)
    os.kill(os.getpid(), signal.SIGKILL)


def cpus_of(env: Mapping[str, str]) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", env.get("GOMP_CPU_AFFINITY") or env.get("OMP_PLACES") or "")}


def apply_openmp_settings() -> None:
    """Apply OMP_NUM_THREADS and the CPU mask: libgomp read them when the zygote loaded it."""
    import torch

    if cpus := cpus_of(os.environ):
        os.sched_setaffinity(0, cpus)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield own bound, unconnected TCP sockets, each with a temporary duplicate."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 (the names are numbers, not paths)
        try:
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM and _is_bound(copy):
                yield int(name), copy


def drop_server_sockets() -> None:
    """Point inherited TCP descriptors at /dev/null, so that the port dies with its owner."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in [number for number, _ in tcp_sockets()]:
        os.dup2(null, number)
    os.close(null)


def bound_port() -> int:
    """Return the port bound but not listened on; 0 for none."""
    for _, sock in tcp_sockets():
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return int(sock.getsockname()[1])
    return 0


def redirect_output(log: Path) -> None:
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for output in (1, 2):
        os.dup2(number, output)
    os.close(number)


def reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_bound(sock: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        sock.getpeername()
        return False
    return bool(sock.getsockname()[1])
