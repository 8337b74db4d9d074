"""Processes of engines that no record tells of: an agent died between starting one and writing it down."""

import contextlib
import logging
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

from glowplug.engines.process import kill_group, started_at

log = logging.getLogger(__name__)


def kill_orphans(run_root: Path, known_pids: Collection[int]) -> list[int]:
    """SIGKILL every process group that works under `run_root` and has no known leader. Returns the leaders' pids."""
    known = set(known_pids)
    leaders = {leader for leader in _leaders(run_root) if leader not in known}
    for leader in sorted(leaders):
        log.warning("an engine nobody knows works under %s: pid %s is killed", run_root, leader)
        kill_group(leader, started_at(leader) or 0.0)
    return sorted(leaders)


def _leaders(run_root: Path) -> Iterator[int]:
    """Group leaders of our own user's processes whose directory or arguments lie under `run_root`."""
    root = f"{run_root}{os.sep}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.uids().real != os.getuid() or process.pid == os.getpid():
                continue
            places = [f"{process.cwd()}{os.sep}", *process.cmdline()]
            if any(place.startswith(root) for place in places):
                yield os.getpgid(process.pid)
