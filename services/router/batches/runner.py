"""Runs the batches of the fleet, in the router that holds the lease.

Another router takes over when this one dies. What is stored under a name of this holder's epoch, and every row, is
written under a fence: a holder that was paused cannot write rows any more, and parts that no row counts are no results.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Container, Iterable
from typing import Final

from glowplug.domain.batch import Batch, OpenBatch
from glowplug.services.router.batches import progress
from glowplug.services.router.batches.metrics import BatchMetrics
from glowplug.services.router.batches.objects import Objects, ObjectsUnavailable
from glowplug.services.router.batches.records import Records
from glowplug.services.router.batches.run import BatchRun, Means
from glowplug.services.router.batches.sender import LineSender
from glowplug.state.port import StoreUnavailable

ROUND_S: Final = 0.5  # between two looks for batches that begin or are to stop
CLEAN_EVERY_S: Final = 60.0  # between two looks for files that have expired
RETRY_S: Final = 2.0  # before a batch goes on whose stores did not answer
MOST_RUNNING: Final = 16  # batches at once
log = logging.getLogger(__name__)


class Runner:
    """One router's runner, idle until `term` runs. `is_ready`: the keys and models are known, so that no line is
    refused for the lack of a row."""

    def __init__(
        self,
        records: Records,
        objects: Objects,
        sender: LineSender,
        metrics: BatchMetrics,
        *,
        lines_at_once: int,
        max_lines: int,
        max_line_bytes: int,
        kept_s: float,
        is_ready: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._records, self._objects, self._metrics = records, objects, metrics
        self._means = Means(records, objects, sender, metrics, clock, max_lines, max_line_bytes)
        self._lines_at_once, self._kept_s, self._is_ready, self._clock = lines_at_once, kept_s, is_ready, clock
        self._running: dict[str, tuple[OpenBatch, BatchRun, asyncio.Task[None]]] = {}
        self._not_before: dict[str, float] = {}  # when a batch goes on that failed for the moment
        self._clean_at = 0.0

    async def term(self, epoch: int) -> None:
        """Run batches until cancelled; then what is answered is stored, and the rest is left to the next holder."""
        try:
            while True:
                try:
                    if self._is_ready():
                        await self._round(epoch)
                        await self._clean()
                except (StoreUnavailable, ObjectsUnavailable) as error:
                    log.warning("the batches wait until their stores answer: %s", type(error).__name__)
                await asyncio.sleep(ROUND_S)
        finally:
            await _uncancelled(asyncio.create_task(self._leave(), name="leaving batches"))

    async def _leave(self) -> None:
        tasks = [task for _, _, task in self._running.values()]
        self._running.clear()
        self._metrics.forget_states()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self, epoch: int) -> None:
        """Begin, stop and put away batches, as their rows say."""
        opened = await self._records.open_batches()
        for batch_id, (_, _, task) in list(self._running.items()):
            if task.done():
                del self._running[batch_id]
                if not task.cancelled() and (error := task.exception()) is not None:
                    self._not_before[batch_id] = self._clock() + RETRY_S
                    self._explain(batch_id, error)
        for batch_id, row in opened.items():
            if row.cancelled_at and batch_id in self._running:
                self._running[batch_id][1].cancel(row.cancelled_at)
        now_s = self._clock()
        waiting = [
            row
            for batch_id, row in opened.items()
            if batch_id not in self._running and self._not_before.get(batch_id, 0.0) <= now_s
        ]
        running = [row for row, _, _ in self._running.values()]
        for row in progress.next_batches(waiting, running, MOST_RUNNING):
            self._not_before.pop(row.batch_id, None)
            run = BatchRun(self._means, row, epoch)
            self._running[row.batch_id] = row, run, asyncio.create_task(run.run(), name=f"batch {row.batch_id}")
        most = max(self._lines_at_once // max(len(self._running), 1), 1)
        for _, run, _ in self._running.values():
            run.pace.most = most
        self._metrics.states([run.status for _, run, _ in self._running.values()], len(opened) - len(self._running))

    def _explain(self, batch_id: str, error: BaseException) -> None:
        if isinstance(error, StoreUnavailable | ObjectsUnavailable):
            log.warning("batch %s stopped for the moment, since a store did not answer: %s", batch_id, error)
        else:
            log.error("batch %s stopped and is tried again in %g s", batch_id, RETRY_S, exc_info=error)

    async def _clean(self) -> None:
        """Remove files that have expired and rows of batches that ended long ago."""
        now_s = self._clock()
        if now_s < self._clean_at:
            return
        self._clean_at = now_s + CLEAN_EVERY_S
        for file in (await self._records.files()).values():
            if file.expires_at and file.expires_at <= now_s:
                await self._objects.delete(f"files/{file.file_id}")
                await self._records.delete_file(file.file_id)
        opened = await self._records.open_batches()
        batches = (await self._records.batches()).values()
        await self._reopen(batches, opened)
        for batch in batches:
            if self._kept_s and _is_old(batch, now_s - self._kept_s):
                await self._records.delete_batch(batch.batch_id)

    async def _reopen(self, batches: Iterable[Batch], opened: Container[str]) -> None:
        """Open batches again whose router died as it created them, or whose open row the store has lost."""
        before = self._clock() - CLEAN_EVERY_S
        for batch in batches:
            if not batch.status.is_over and batch.batch_id not in opened and batch.created_at < before:
                row = OpenBatch(batch_id=batch.batch_id, tenant=batch.tenant, created_at=batch.created_at)
                await self._records.put_open(row)


def _is_old(batch: Batch, before: float) -> bool:
    return batch.status.is_over and batch.ended_at < before


async def _uncancelled(task: "asyncio.Task[None]") -> None:
    """Await a task although this one is cancelled, more than once too."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
