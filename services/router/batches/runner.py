"""The runner of the fleet's batches, in the router that holds the lease; another takes over from a dead one.

Rows are fenced, and part names contain the holder's epoch: a paused holder cannot write rows, and parts that no row
counts are not results.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from glowplug.domain.batch import Batch, BatchStatus, LineError, OpenBatch, Purpose, StoredFile
from glowplug.services.router.batches import lines, progress
from glowplug.services.router.batches.lines import BatchLine, Checker, LineAnswer, LineSplitter, TooLongLine
from glowplug.services.router.batches.metrics import BatchMetrics
from glowplug.services.router.batches.objects import NoObject, Objects, ObjectsUnavailable
from glowplug.services.router.batches.progress import Pace
from glowplug.services.router.batches.records import Records
from glowplug.services.router.batches.sender import LineSender
from glowplug.state.port import Fenced, StoreUnavailable

# A result counts once its batch's row counts its part; the next run sends the other lines again.

PART_LINES: Final = 200
PART_BYTES: Final = 4 << 20
PART_S: Final = 5.0
MOST_LOST: Final = 2  # retries of a line after its engine failed
STORE_RETRY_S: Final = 0.5
LAST_STORE_S: Final = 1.5
SLICE_BYTES: Final = 64 * 1024  # of an input, checked without a pause
IDLE_RATIO: Final = 1.0  # pause after a slice, over its duration: requests go first
CANCELLED = LineAnswer(0, code="batch_cancelled", message="The batch was cancelled before this request was executed.")
EXPIRED = LineAnswer(0, code="batch_expired", message="The completion window ended before this request was executed.")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Means:
    records: Records
    objects: Objects
    sender: LineSender
    metrics: BatchMetrics
    clock: Callable[[], float]
    max_lines: int
    max_line_bytes: int


@dataclass(slots=True)
class _Pending:
    rows: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    num_completed: int = 0
    num_failed: int = 0
    since: float = 0.0  # monotonic

    def add(self, row: bytes, *, is_completed: bool) -> None:
        if not self.rows:
            self.since = time.monotonic()
        self.rows.append(row)
        self.num_bytes += len(row)
        self.num_completed += is_completed
        self.num_failed += not is_completed

    @property
    def is_due(self) -> bool:
        due = len(self.rows) >= PART_LINES or self.num_bytes >= PART_BYTES
        return due or (bool(self.rows) and time.monotonic() - self.since >= PART_S)


class BatchRun:
    """A run of an open batch, under the lease of `epoch`."""

    def __init__(self, means: Means, opened: OpenBatch, epoch: int) -> None:
        self._means, self._opened, self._epoch = means, opened, epoch
        self.pace = Pace(1)
        self.status = BatchStatus.VALIDATING
        self._batch: Batch | None = None
        self._cancelled_at = opened.cancelled_at
        self._stopped = asyncio.Event()
        if opened.cancelled_at:
            self._stopped.set()
        self._done: set[int] = set()
        self._pending = _Pending()
        self._failure: BaseException | None = None  # in sending a line
        self._storing = asyncio.Lock()

    @property
    def batch(self) -> Batch:
        assert self._batch is not None
        return self._batch

    def cancel(self, at: float) -> None:
        """Send no more lines, and keep the results."""
        self._cancelled_at = at
        self._stopped.set()

    async def run(self) -> None:
        """Run the batch to its end. Raises StoreUnavailable and ObjectsUnavailable; another run resumes it then."""
        found = await self._means.records.batch(self._opened.batch_id)
        if found is None:
            await self._means.records.delete_open(self._opened.batch_id)
            return
        self._take(found)
        if found.status is BatchStatus.VALIDATING and not self._cancelled_at:
            await self._validate()
        if not self.batch.status.is_over and not self.batch.finalizing_at:
            await self._read_parts()
            await self._answer_lines()
            batch = progress.cancelling(self.batch, self._cancelled_at) if self._cancelled_at else self.batch
            ids = f"file-{secrets.token_hex(12)}", f"file-{secrets.token_hex(12)}"
            await self._put(progress.finalizing(batch, self._means.clock(), *ids))
        if not self.batch.status.is_over:
            await self._finalize()
        for name in progress.part_names(self.batch):
            await self._means.objects.delete(name)
        await self._means.records.delete_open(self.batch.batch_id)
        self._means.metrics.ended(self.batch.status)
        log.info("batch %s is %s: %d of %d lines succeeded", *self._figures())

    def _figures(self) -> tuple[str, str, int, int]:
        batch = self.batch
        return batch.batch_id, batch.status.value, batch.num_completed, batch.num_lines

    def _take(self, batch: Batch) -> None:
        self._batch, self.status = batch, batch.status

    async def _put(self, batch: Batch) -> None:
        await self._means.records.put_batch(batch)
        self._take(batch)

    # -- the input -----------------------------------------------------------------------------------------------

    async def _input(self) -> AsyncIterator[tuple[int, bytes]]:
        splitter = LineSplitter(self._means.max_line_bytes)
        async for chunk in self._means.objects.read(f"files/{self.batch.input_file_id}", SLICE_BYTES):
            began = time.monotonic()
            for numbered in splitter.feed(chunk):
                yield numbered
            await asyncio.sleep((time.monotonic() - began) * IDLE_RATIO)
        for numbered in splitter.end():
            yield numbered

    async def _validate(self) -> None:
        checker = Checker(self.batch.endpoint, self._means.max_lines)
        try:
            async for number, raw in self._input():
                checker.take(number, raw)
                if checker.is_full or checker.num_lines > self._means.max_lines or self._stopped.is_set():
                    break
        except TooLongLine as error:
            checker.too_long(error.number, self._means.max_line_bytes)
        except NoObject:
            checker.errors.append(LineError(code="input_not_found", message="The input file no longer exists."))
        if not self._stopped.is_set():
            await self._put(progress.validated(self.batch, checker.end(), checker.num_lines, self._means.clock()))

    async def _read_parts(self) -> None:
        done = {number: is_output async for number, is_output, _ in self._results()}
        self._done = set(done)
        num_completed = sum(done.values())
        batch = replace(self.batch, num_completed=num_completed, num_failed=len(done) - num_completed)
        self._take(batch)

    async def _results(self) -> AsyncIterator[tuple[int, bool, bytes]]:
        for name in progress.part_names(self.batch):
            part = b"".join([chunk async for chunk in self._means.objects.read(name)])
            for result in lines.read_part(part):
                yield result
            await asyncio.sleep(0)

    # -- the lines -----------------------------------------------------------------------------------------------

    async def _answer_lines(self) -> None:
        batch = self.batch
        left_s = batch.expires_at - self._means.clock()
        tasks: set[asyncio.Task[None]] = set()
        if batch.status is BatchStatus.IN_PROGRESS and not self._stopped.is_set() and left_s > 0:
            storing = asyncio.create_task(self._store_parts(), name="parts of a batch")
            sending = asyncio.create_task(self._send_all(tasks), name="lines of a batch")
            stopped = asyncio.create_task(self._stopped.wait())
            try:
                await asyncio.wait((storing, sending, stopped), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (stopped, sending, *tasks):
                    task.cancel()
                await asyncio.gather(stopped, *tasks, return_exceptions=True)
                (failed,) = await asyncio.gather(sending, return_exceptions=True)
                storing.cancel()
                (store_failed,) = await asyncio.gather(storing, return_exceptions=True)
                with contextlib.suppress(TimeoutError, StoreUnavailable, ObjectsUnavailable):
                    async with asyncio.timeout(LAST_STORE_S):
                        await self._store_part()
            for error in (failed, store_failed):
                if isinstance(error, Exception) and not isinstance(error, TooLongLine | NoObject):
                    raise error
        await self._store_part()

    async def _send_all(self, tasks: set[asyncio.Task[None]]) -> None:
        async for number, raw in self._input():
            if number in self._done:
                continue
            while len(tasks) >= self.pace.size or len(self._pending.rows) >= 2 * PART_LINES:
                self._check()
                if tasks:
                    await asyncio.wait(tasks, timeout=STORE_RETRY_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(STORE_RETRY_S)
            task = asyncio.create_task(self._answer(lines.read_line(number, raw)), name="a line of a batch")
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            task.add_done_callback(self._note_failure)
        while tasks:
            await asyncio.wait(set(tasks), return_when=asyncio.FIRST_COMPLETED)
            self._check()

    def _note_failure(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _answer(self, line: BatchLine) -> None:
        batch, num_lost, num_refused = self.batch, 0, 0
        while True:
            answer = await self._means.sender.send(batch.tenant, batch.key_id, batch.endpoint, line.body)
            if not lines.is_retried(answer, num_lost, MOST_LOST):
                break
            num_lost += lines.is_lost(answer)
            self._means.metrics.line("retried")
            self.pace.refused(time.monotonic())
            await asyncio.sleep(progress.wait_s(answer.retry_after_s, num_refused))
            num_refused += 1
        self.pace.answered(answer.held_s, time.monotonic())
        self._keep(line.number, line.custom_id, answer)

    def _keep(self, number: int, custom_id: str, answer: LineAnswer) -> None:
        line_id = f"batch_req_{secrets.token_hex(12)}"
        row = lines.part_line(number, answer.is_whole, lines.output_line(line_id, custom_id, answer))
        self._pending.add(row, is_completed=answer.is_whole)
        self._done.add(number)
        self._means.metrics.line("completed" if answer.is_whole else "failed")

    # -- the results ---------------------------------------------------------------------------------------------

    async def _store_parts(self) -> None:
        """A silent store is asked again; a fence ends the run."""
        while True:
            await asyncio.sleep(STORE_RETRY_S / 2)
            if self._pending.is_due:
                try:
                    await self._store_part()
                except Fenced:
                    raise
                except (StoreUnavailable, ObjectsUnavailable) as error:
                    log.warning("results of batch %s wait for a store: %s", self.batch.batch_id, type(error).__name__)

    async def _store_part(self) -> None:
        async with self._storing:
            pending = self._pending
            if not pending.rows:
                return
            num_rows, num_bytes = len(pending.rows), pending.num_bytes
            num_completed, num_failed = pending.num_completed, pending.num_failed
            batch = progress.with_part(self.batch, self._epoch, num_completed, num_failed)
            name = progress.part_name(batch.batch_id, self._epoch, progress.next_part(self.batch, self._epoch))
            await self._means.objects.put(name, b"".join(pending.rows))
            await self._put(batch)
            rest = _Pending(pending.rows[num_rows:], pending.num_bytes - num_bytes, since=time.monotonic())
            rest.num_completed = pending.num_completed - num_completed
            rest.num_failed = pending.num_failed - num_failed
            self._pending = rest

    # -- the end -------------------------------------------------------------------------------------------------

    async def _finalize(self) -> None:
        batch = self.batch
        sizes = {}
        for file_id, is_output in ((batch.output_file_id, True), (batch.error_file_id, False)):
            sizes[file_id] = await self._write_file(file_id, is_output=is_output)
        now_s = self._means.clock()
        for file_id, kind in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
            if sizes[file_id]:
                file = StoredFile(
                    file_id=file_id,
                    tenant=batch.tenant,
                    name=f"{batch.batch_id}_{kind}.jsonl",
                    purpose=Purpose.BATCH_OUTPUT,
                    num_bytes=sizes[file_id],
                    created_at=now_s,
                    expires_at=now_s + batch.output_expires_s if batch.output_expires_s else 0.0,
                )
                await self._means.records.put_file(file)
        output, errors = bool(sizes[batch.output_file_id]), bool(sizes[batch.error_file_id])
        await self._put(progress.ended(batch, now_s, has_output=output, has_errors=errors))

    async def _write_file(self, file_id: str, *, is_output: bool) -> int:
        num_bytes = 0
        chunks = self._chunks(is_output=is_output)
        first = await anext(chunks, b"")
        if not first:
            return 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal num_bytes
            num_bytes += len(first)
            yield first
            async for chunk in chunks:
                num_bytes += len(chunk)
                yield chunk

        await self._means.objects.put(f"files/{file_id}", counted())
        return num_bytes

    async def _chunks(self, *, is_output: bool) -> AsyncIterator[bytes]:
        seen: set[int] = set()
        kept, num_bytes = list[bytes](), 0
        async for line in self._lines_of(seen, is_output=is_output):
            kept.append(line)
            num_bytes += len(line) + 1
            if num_bytes >= SLICE_BYTES:
                yield b"\n".join([*kept, b""])
                kept, num_bytes = [], 0
        if kept:
            yield b"\n".join([*kept, b""])

    async def _lines_of(self, seen: set[int], *, is_output: bool) -> AsyncIterator[bytes]:
        """Each result comes once; among the errors also each line without a result."""
        async for number, kind, line in self._results():
            if number not in seen:
                seen.add(number)
                if kind == is_output:
                    yield line
        why = {BatchStatus.CANCELLED: CANCELLED, BatchStatus.EXPIRED: EXPIRED}.get(self.batch.ends_as)
        if is_output or why is None or not self.batch.num_lines:
            return
        with contextlib.suppress(NoObject, TooLongLine):
            async for number, raw in self._input():
                if number not in seen:
                    custom_id = lines.read_line(number, raw).custom_id
                    yield lines.output_line(f"batch_req_{secrets.token_hex(12)}", custom_id, why)


ROUND_S: Final = 0.5  # between looks at the open batches
CLEAN_EVERY_S: Final = 60.0  # between looks for expired files
RETRY_S: Final = 2.0  # pause after a store's silence
MOST_RUNNING: Final = 16


class Runner:
    """One router's runner, idle until `term` runs. `is_ready`: keys and models are known, so that no line is refused
    for a missing row."""

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
        self._not_before: dict[str, float] = {}  # next try of a batch after a failure
        self._clean_at = 0.0

    async def term(self, epoch: int) -> None:
        """Run batches until cancelled; then store the answers, and leave the rest to the next holder."""
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
        """Reopen batches whose router died in creating them, or whose open row the store has lost."""
        before = self._clock() - CLEAN_EVERY_S
        for batch in batches:
            if not batch.status.is_over and batch.batch_id not in opened and batch.created_at < before:
                row = OpenBatch(batch_id=batch.batch_id, tenant=batch.tenant, created_at=batch.created_at)
                await self._records.put_open(row)


def _is_old(batch: Batch, before: float) -> bool:
    return batch.status.is_over and batch.ended_at < before


async def _uncancelled(task: "asyncio.Task[None]") -> None:
    """Await a task through cancellations of this one."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
