"""The host memory that a node's sleeping engines may take, where no setting says it."""

import contextlib
from pathlib import Path
from typing import Final

import psutil

from glowplug.engines.freezer import own_cgroup

SHARE: Final = 4  # a quarter: weights, engines awake and the rest of the machine have the others


def sleepers_bytes(of_bytes: int) -> int:
    return of_bytes // SHARE


def memory_bytes() -> int:
    """Return the machine's memory, or the least limit of this process's cgroup and those above it."""
    try:
        cgroup = own_cgroup(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError:
        cgroup = None
    return least_limit(cgroup, int(psutil.virtual_memory().total))


def least_limit(cgroup: Path | None, most: int) -> int:
    for folder in (cgroup, *cgroup.parents) if cgroup is not None else ():
        with contextlib.suppress(OSError):
            said = (folder / "memory.max").read_text().strip()
            most = min(most, int(said)) if said.isdecimal() else most
    return most
