"""Ending background tasks for sure."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)
ROUNDS, ROUND_S = 20, 0.1


async def end(tasks: Iterable["asyncio.Task[Any] | None"]) -> None:
    """Cancel tasks until they are over. A library may swallow one cancellation (`asyncio.wait_for` of Python 3.11
    does when its time is up at that moment), so those that go on are cancelled again; after 2 s they are left."""
    pending: set[asyncio.Task[Any]] = {task for task in tasks if task is not None and not task.done()}
    for _ in range(ROUNDS):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=ROUND_S)
    log.warning("%d tasks did not end", len(pending))
