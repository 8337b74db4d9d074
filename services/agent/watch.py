"""Knowing at once that a process has ended, whether or not it is a child of ours."""

import asyncio
import os
from collections.abc import Callable

from glowplug.engines.port import EngineHandle


async def until_exit(handle: EngineHandle, is_alive: Callable[[EngineHandle], bool], poll_s: float) -> None:
    """Return when that process is gone. By pidfd where the kernel has it, else by asking every `poll_s`."""
    try:
        fd = os.pidfd_open(handle.pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        while is_alive(handle):
            await asyncio.sleep(poll_s)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        if is_alive(handle):  # asked after the pidfd is open: the pid cannot have gone to another process since
            loop.add_reader(fd, ended.set)
            await ended.wait()
            loop.remove_reader(fd)
            is_alive(handle)  # reaps it when it was our child
    finally:
        loop.remove_reader(fd)
        os.close(fd)
