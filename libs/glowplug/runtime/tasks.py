"""Run background tasks that surely end and log their failures."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)
ROUNDS, ROUND_S = 20, 0.1


async def end(tasks: Iterable["asyncio.Task[Any] | None"]) -> None:
    """Cancel tasks until they end. A library may swallow one cancellation (`asyncio.wait_for` of Python 3.11, at its
    timeout), so they are cancelled again, for 2 s."""
    pending: set[asyncio.Task[Any]] = {task for task in tasks if task is not None and not task.done()}
    for _ in range(ROUNDS):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=ROUND_S)
    if pending:
        log.warning("%d tasks did not end", len(pending))


class StopSignal(asyncio.Event):
    """Set to stop a process; `failure`: error of an essential part."""

    def __init__(self) -> None:
        super().__init__()
        self.failure: BaseException | None = None


def essential(task: "asyncio.Task[Any]", stopping: asyncio.Event) -> "asyncio.Task[Any]":
    """Run a part whose error stops the service, to be restarted whole."""

    def ended(done: "asyncio.Task[Any]") -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.critical("%s ended; the service stops", done.get_name(), exc_info=error)
            if isinstance(stopping, StopSignal):
                stopping.failure = error
            stopping.set()

    task.add_done_callback(ended)
    return task
