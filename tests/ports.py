"""Ports for servers that tests start: reserved across processes until released or this process ends.

A port that was merely found free can be taken before its server binds it. These are below the kernel's ephemeral range
and above those that `glowplug up --port-base 0` tries; a lock on a file reserves each. A restarted server thus finds
its port free.
"""

import fcntl
import os
import socket
import tempfile
from pathlib import Path

FIRST, LAST = 32000, 32767  # supervisor/probe.py ends at 32000; Linux gives away 32768 and above
_FOLDER = Path(tempfile.gettempdir()) / f"glowplug-test-ports-{os.getuid()}"
_locks: dict[int, int] = {}  # port -> locked file, open until this process ends


class NoFreePorts(RuntimeError):
    """Every port of the range is in use or reserved by a running test."""


def free_port(host: str = "127.0.0.1") -> int:
    return free_ports(1, host)


def free_ports(size: int, host: str = "127.0.0.1") -> int:
    """Reserve consecutive ports; returns the first. Raises NoFreePorts."""
    _FOLDER.mkdir(mode=0o700, exist_ok=True)
    start = FIRST + os.getpid() * 7 % (LAST - FIRST - size)
    for base in (*range(start, LAST - size), *range(FIRST, start)):
        wanted = range(base, base + size)
        if not any(port in _locks for port in wanted) and _reserve(wanted, host):
            return base
    raise NoFreePorts(f"no {size} free ports in a row between {FIRST} and {LAST}")


def give_back(port: int) -> None:
    """Call it after the server has ended; no effect if the port is not reserved."""
    file = _locks.pop(port, None)
    if file is not None:
        os.close(file)


def _reserve(wanted: range, host: str) -> bool:
    taken: dict[int, int] = {}
    for port in wanted:
        file = os.open(_FOLDER / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        taken[port] = file
        if not _locked(file) or not _is_free(port, host):
            for each in taken.values():
                os.close(each)
            return False
    _locks.update(taken)
    return True


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(port: int, host: str) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True
