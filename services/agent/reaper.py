"""Ended processes nobody waited for: children that lost their parent, where the agent is process 1, and engines whose
first thread ended before their last one, so that the driver that stopped them saw them gone and could not wait."""

import asyncio
import contextlib
import os

import psutil

LOOK_S = 2.0


async def reap_strays() -> None:
    """For ever. A zombie is taken at the second look, so that whoever started a process and waits for it learns its end
    first."""
    seen: set[int] = set()
    while True:
        await asyncio.sleep(LOOK_S)
        zombies = zombie_children()
        for pid in zombies & seen:
            _reap(pid)
        seen = zombies


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # whoever waits for it has been quicker
        os.waitpid(pid, os.WNOHANG)


def zombie_children() -> set[int]:
    """Ended children of this process that nobody has waited for."""
    found = set()
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE:
                    found.add(child.pid)
    return found
