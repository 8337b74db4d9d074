"""Wait for a condition, with a bound that only a fault exceeds, however busy the machine is."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil

WAIT_S = 90.0


async def until(
    look: Callable[[], Any], what: str = "the condition", within_s: float = WAIT_S, every_s: float = 0.01
) -> Any:
    """`look` may be a coroutine function. AssertionError names `what`."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = look()
        if found := await found if inspect.isawaitable(found) else found:
            return found
        await asyncio.sleep(every_s)
    raise AssertionError(f"not within {within_s:g} s: {what}")


def wait_until(what: str, look: Callable[[], Any], within_s: float = WAIT_S, every_s: float = 0.1) -> Any:
    """Wait without an event loop. Connection errors count as false; AssertionError has the last answer."""
    deadline = time.monotonic() + within_s
    last: Any = None
    while time.monotonic() < deadline:
        try:
            last = look()
        except (httpx.HTTPError, OSError, ValueError) as error:
            last = error
        else:
            if last:
                return last
        time.sleep(every_s)
    raise AssertionError(f"{what}: not within {within_s:g} s; last saw {last!r}")


def lives(process: psutil.Process | int) -> bool:
    """Return False for a zombie."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
