"""What the first process of a container owes the rest: children that lost their parent end as zombies of its own."""

import asyncio
import contextlib
import os

import psutil

INIT_PID = 1
LOOK_S = 2.0


async def reap_strays() -> None:
    """For ever, if this process is the first of its container: else init does it. A zombie is taken at the second
    look, so that whoever started a process and waits for it learns its end first."""
    seen: set[int] = set()
    while os.getpid() == INIT_PID:
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
