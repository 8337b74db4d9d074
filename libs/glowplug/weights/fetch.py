"""One fetch: a source into a region, in parallel parts, resumed, rate-limited, checked.

Bytes land anywhere; the watermark follows the contiguous prefix; the checksum follows the watermark. A region is
declared complete only after size and checksum hold, so that nothing corrupt is ever served.
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from glowplug.domain.errors import ChecksumMismatch, WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.weights.link import LinkMeter
from glowplug.weights.region import Region, RegionInfo
from glowplug.weights.source import Source, SourceChanged, SourceFile, SourceInterrupted, redacted
from glowplug.weights.writer import Digester, RegionWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Bounds of one fetch. `max_attempts` counts tries in a row that brought nothing."""

    part_bytes: int = 16 << 20
    max_parts: int = 4
    max_attempts: int = 5
    max_mismatches: int = 1  # so often what has another checksum is brought again
    backoff_first_s: float = 0.1
    backoff_cap_s: float = 5.0
    timeout_s: float = 3600.0


class Fetch:
    """Runs once. `on_sized(num_bytes)` is asked for free memory as soon as the size is known (0: unknown) and returns
    the bytes granted or raises NoSpace."""

    def __init__(
        self,
        ref: WeightsRef,
        region: Region,
        source: Source,
        link: LinkMeter,
        on_sized: Callable[[int], Awaitable[int]],
        *,
        options: FetchOptions = FetchOptions(),
        rng: random.Random | None = None,
        priority: int = 0,
        first_byte: int = 0,
        last_byte: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ref, self.region, self._source, self._link = ref, region, source, link
        self._on_sized, self._options, self._clock = on_sized, options, clock
        self._rng = rng or random.Random(region.digest)
        self._first_byte, self._last_byte = first_byte, last_byte
        self.priority = priority  # may be raised while running, when a more urgent start joins
        self.num_bytes = ref.num_bytes  # of the whole weights
        self.num_bytes_fetched = 0  # over the link, this time
        self.num_bytes_resumed = 0  # left by an earlier try
        self.num_retries = 0
        self.seconds = 0.0  # that it took
        self._writer: RegionWriter | None = None

    @property
    def num_bytes_landed(self) -> int:
        return self._writer.landed.total if self._writer else 0

    async def run(self) -> RegionInfo | None:
        """Bring the bytes. None when only a byte range was asked for and the rest is still missing. Raises
        WeightsUnavailable, ChecksumMismatch, NoSpace; cancelling keeps what landed."""
        started = self._clock()
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return await self._until_whole(started)
        except TimeoutError as error:
            raise WeightsUnavailable(f"{redacted(self._ref.uri)}: not whole in {self._options.timeout_s} s") from error
        finally:
            self.seconds = self._clock() - started

    async def _until_whole(self, started: float) -> RegionInfo | None:
        num_mismatches = num_failures = 0
        while True:
            try:
                return await self._attempt(started)
            except ChecksumMismatch as error:
                self.region.clear_bytes()
                num_mismatches += 1
                if num_mismatches > self._options.max_mismatches:
                    raise
                log.warning("fetching once more: %s", error)
            except (SourceInterrupted, SourceChanged) as error:
                if isinstance(error, SourceChanged):
                    self.region.clear_bytes()
                num_failures += 1
                await self._back_off(num_failures, error)

    async def _back_off(self, num_failures: int, error: Exception) -> None:
        """Capped exponential with full jitter. Raises WeightsUnavailable when the tries are used up."""
        if num_failures >= self._options.max_attempts:
            raise WeightsUnavailable(f"{error} (given up after {num_failures} tries)") from error
        ceiling = min(self._options.backoff_cap_s, self._options.backoff_first_s * 2 ** (num_failures - 1))
        log.info("retry %d: %s", num_failures, error)
        self.num_retries += 1
        await asyncio.sleep(self._rng.uniform(0, ceiling))

    async def _attempt(self, started: float) -> RegionInfo | None:
        info = await self._source.probe()
        _check_size(self._ref, info.num_bytes, redacted(self._ref.uri))
        if info.ranges and not info.num_bytes:
            raise WeightsUnavailable(f"{redacted(self._ref.uri)} is empty")
        self.num_bytes = info.num_bytes
        writer = RegionWriter(self.region, self._ref, info, await self._on_sized(info.num_bytes))
        self.num_bytes_resumed = await asyncio.to_thread(writer.open)
        self._writer = writer
        try:
            sha256 = await self._transfer(writer)
        finally:
            try:
                if self.region.directory.is_dir():
                    writer.save()
            except OSError as error:  # full memory: less will be resumed
                log.warning("cannot write down what landed of %s: %s", self.region.digest[:12], error)
            writer.close()
        if sha256 is None:
            return None
        self.num_bytes = writer.num_bytes
        _check_size(self._ref, writer.num_bytes, redacted(self._ref.uri))
        if self._ref.sha256 and sha256 != self._ref.sha256.lower():
            raise ChecksumMismatch(f"{redacted(self._ref.uri)}: sha256 is {sha256}, expected {self._ref.sha256}")
        done = RegionInfo(
            path=str(writer.path().absolute()),
            num_bytes=writer.num_bytes,
            sha256=sha256,
            source=self._source.scheme,
            seconds=self._clock() - started,
        )
        self.region.complete(done)
        return done

    async def _transfer(self, writer: RegionWriter) -> str | None:
        """All parts; then the digest, or None while bytes outside the range asked for are missing."""
        digester = Digester(writer)
        digest = asyncio.create_task(digester.run())
        try:
            if not writer.info.ranges:
                await self._whole(writer)
            else:
                await self._parts(writer)
            if writer.num_bytes and writer.landed.prefix_end < writer.num_bytes:
                return None
            return await digest
        finally:
            digester.stop()
            digest.cancel()
            await asyncio.wait([digest])

    async def _whole(self, writer: RegionWriter) -> None:
        """A server without ranges: one stream from the start; a cut one starts again."""
        file = writer.info.files[0]
        self._link.begin(file.num_bytes)
        try:
            position = await self._stream(writer, file, 0, 0, 0)
        finally:
            self._link.end(file.num_bytes - writer.landed.total)
        if not position:
            raise WeightsUnavailable(f"{redacted(self._ref.uri)} is empty")
        if file.num_bytes and position < file.num_bytes:
            raise SourceInterrupted(f"{redacted(self._ref.uri)} ended after {position} of {file.num_bytes} bytes")
        writer.close_size()

    async def _parts(self, writer: RegionWriter) -> None:
        last = min(self._last_byte or writer.num_bytes, writer.num_bytes)
        parts = deque(split(writer, self._first_byte, last, self._options.part_bytes))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._options.max_parts, len(parts))):
                    group.create_task(self._work(writer, parts))
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _work(self, writer: RegionWriter, parts: deque[tuple[int, int]]) -> None:
        while parts:
            await self._part(writer, *parts.popleft())
            writer.save()

    async def _part(self, writer: RegionWriter, position: int, end: int) -> None:
        file_index = writer.file_at(position)
        file, start = writer.info.files[file_index], writer.file_start(file_index)
        self._link.begin(end - position)
        num_failures = 0
        try:
            while position < end:
                before = position
                failure: Exception = SourceInterrupted(f"{redacted(self._ref.uri)} ended early at byte {position}")
                try:
                    position = await self._stream(writer, file, start, position, end)
                except SourceInterrupted as error:
                    failure = error
                    # Only this part wrote in [before, end), so its first gap is where it stopped.
                    position = next(iter(writer.landed.gaps(before, end)), (end, end))[0]
                if position < end:
                    num_failures = 1 if position > before else num_failures + 1
                    await self._back_off(num_failures, failure)
        finally:
            self._link.end(sum(b - a for a, b in writer.landed.gaps(position, end)))

    async def _stream(self, writer: RegionWriter, file: SourceFile, start: int, position: int, end: int) -> int:
        """One read of [position, end) (end 0: to the end); returns where it stopped."""
        async with aclosing(self._source.read(file, position - start, end - start if end else 0)) as chunks:
            async for chunk in chunks:
                landing = chunk[: end - position] if end else chunk
                if not landing:
                    break  # the source goes on past what was asked for
                writer.write(position, landing)
                position += len(landing)
                self.num_bytes_fetched += len(landing)
                await self._link.take(len(landing), self.priority, self.region.digest)
        return position


def split(writer: RegionWriter, first: int, last: int, part_bytes: int) -> list[tuple[int, int]]:
    """What is missing of [first, last), in order, in parts that cross no file's end."""
    parts = []
    for begin, end in writer.landed.gaps(first, last):
        position = begin
        while position < end:
            stop = min(position + part_bytes, end, writer.file_end(writer.file_at(position)))
            parts.append((position, stop))
            position = stop
    return parts


def _check_size(ref: WeightsRef, num_bytes: int, shown: str) -> None:
    if ref.num_bytes and num_bytes and ref.num_bytes != num_bytes:
        raise ChecksumMismatch(f"{shown}: {num_bytes} bytes, expected {ref.num_bytes}")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first plain error inside a group: the others were cancelled because of it."""
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
