"""Carries out what the controller asks of the node's disk: it writes copies, in the background, and removes them."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glowplug.controllers.prefetcher import messages as msg
from glowplug.domain.errors import NoSpace
from glowplug.events.envelope import Event
from glowplug.runtime.shell import Executor
from glowplug.services.prefetcher.metrics import PrefetcherMetrics
from glowplug.weights.disk import CopyStopped, DiskCopies
from glowplug.weights.files import NoAnswer, PatientReader
from glowplug.weights.inventory import is_whole
from glowplug.weights.region import Region
from glowplug.weights.source import local_path
from glowplug.weights.writer import FULL

log = logging.getLogger(__name__)

DISK_FAILED = "disk_failed"
WAIT_S = 10.0  # for the disk, with everything else: the service goes on without it


@dataclass
class _Writing:
    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None


class Copier:
    """Writes and removes copies. Outcomes come back to the controller through `put`. Without a disk tier (`copies`
    None) the controller asks for none."""

    def __init__(
        self,
        copies: DiskCopies | None,
        region: Callable[[str], Region],
        put: Callable[[Any], Awaitable[None]],
        metrics: PrefetcherMetrics,
        wait_s: float = WAIT_S,
    ) -> None:
        self._copies, self._region, self._put, self._metrics = copies, region, put, metrics
        self._wait_s, self._reader = wait_s, PatientReader(wait_s)
        self._writing: dict[str, _Writing] = {}

    def executors(self) -> dict[type[Any], Executor]:
        return {msg.WriteCopy: self._write, msg.StopCopy: self._stop, msg.DropCopy: self._drop}

    async def _write(self, effect: msg.WriteCopy, _: Event | None) -> None:
        writing = self._writing[effect.digest] = _Writing()
        writing.task = asyncio.create_task(self._run(effect.digest, writing), name=f"copy-{effect.digest[:12]}")

    async def _run(self, digest: str, writing: _Writing) -> None:
        try:
            end = await self._ended(digest, writing.stop)
        except Exception as error:
            log.exception("the copy of %s to disk failed", digest[:12])
            end = msg.CopyEnded(digest=digest, code=DISK_FAILED, message=f"{type(error).__name__}: {error}")
        if self._writing.get(digest) is writing:
            del self._writing[digest]
        if end.code and not end.is_needless and end.code != msg.CANCELLED:
            self._metrics.disk_failures(end.code).inc()
            log.warning("the prefetcher has written no copy of %s to disk: %s", digest[:12], end.message)
        elif not end.code:
            self._metrics.disk_written_bytes.inc(end.num_bytes)
            log.info(
                "the prefetcher has copied %s to disk: %d bytes in %.2f s", digest[:12], end.num_bytes, end.seconds
            )
        await self._put(end)

    async def _ended(self, digest: str, stop: threading.Event) -> msg.CopyEnded:
        assert self._copies is not None
        memory = self._region(digest)
        source = local_path(str(memory.read_meta().get("source", "x:")))
        if source is not None and await self._is_beside(source):
            why = f"{source} lies on the same file system"
            return msg.CopyEnded(digest=digest, code=DISK_FAILED, message=why, is_needless=True)
        began = time.monotonic()
        writing = asyncio.create_task(asyncio.to_thread(self._copies.write, memory, stop))
        try:
            num_bytes = await asyncio.shield(writing)
        except asyncio.CancelledError:  # the process ends: not while a thread still writes
            stop.set()
            await asyncio.wait([writing])
            raise
        except CopyStopped:
            return msg.CopyEnded(digest=digest, code=msg.CANCELLED, message="stopped")
        except OSError as error:
            if not is_whole(memory):
                return msg.CopyEnded(digest=digest, code=msg.CANCELLED, message="the weights have left host memory")
            what = "is full" if error.errno in FULL else "fails"
            code = NoSpace.code if error.errno in FULL else DISK_FAILED
            message = f"the disk at {self._copies.root} {what}: {error.strerror or error}"
            return msg.CopyEnded(digest=digest, code=code, message=message)
        return msg.CopyEnded(digest=digest, num_bytes=num_bytes, seconds=time.monotonic() - began)

    async def _is_beside(self, source: Path) -> bool:
        assert self._copies is not None
        copies = self._copies
        try:
            return await self._reader.run(f"beside {source}", lambda: copies.is_beside(source))
        except NoAnswer:
            return False  # it does not answer now: a copy of it is the more useful

    async def _stop(self, effect: msg.StopCopy, _: Event | None) -> None:
        """Returns when nothing reads the region any more, so that its bytes are free once it is removed; after a while
        in any case."""
        writing = self._writing.get(effect.digest)
        if writing is not None and writing.task is not None:
            writing.stop.set()
            late = (await asyncio.wait([writing.task], timeout=self._wait_s))[1]
            if late:
                assert self._copies is not None
                message = f"the disk at {self._copies.root} has not ended a write within {self._wait_s:g} s"
                await self._failed(msg.DiskFailed(message))

    async def _drop(self, effect: msg.DropCopy, _: Event | None) -> None:
        assert self._copies is not None
        copies = self._copies
        if effect.evicted:
            self._metrics.disk_evictions.inc()
        try:
            await self._reader.run(f"remove {effect.digest}", lambda: copies.remove(effect.digest))
        except OSError as error:
            message = f"cannot remove the copy of {effect.digest[:12]} in {copies.root}: {error.strerror or error}"
            await self._failed(msg.DiskFailed(message, effect.digest, effect.num_bytes))

    async def _failed(self, failed: msg.DiskFailed) -> None:
        self._metrics.disk_failures(DISK_FAILED).inc()
        log.error(failed.message)
        await self._put(failed)

    async def close(self) -> None:
        """Give up what is being written."""
        tasks = [writing.task for writing in self._writing.values() if writing.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
