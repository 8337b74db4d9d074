"""A GGUF in several parts, from any source, as one file (weights/split_gguf.py)."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from glowplug.domain.errors import WeightsUnavailable
from glowplug.domain.gguf import MAX_HEADER_BYTES, NeedMore
from glowplug.weights.source import Chunk, Source, SourceChanged, SourceFile, SourceInfo, SourceInterrupted, redacted
from glowplug.weights.split_gguf import GgufPart, JoinedGguf, NotJoinable, join, read_part

_FIRST_BYTES = 1 << 16  # of a part's head; the first one's takes some megabytes, with the vocabulary
_AT_ONCE = 8


class SplitSource:
    """One file from the `sources` of its parts, in the order of their numbers."""

    def __init__(self, uris: Sequence[str], sources: Sequence[Source]) -> None:
        self._shown, self._sources = redacted(uris[0]), tuple(sources)
        self._joined: tuple[JoinedGguf, tuple[SourceFile, ...], SourceFile] | None = None

    @property
    def scheme(self) -> str:
        return self._sources[0].scheme

    async def measure(self) -> SourceInfo:
        return await self.probe()

    async def probe(self) -> SourceInfo:
        """Find a missing or foreign part here."""
        turns = asyncio.Semaphore(_AT_ONCE)

        async def of_part(number: int) -> tuple[SourceFile, GgufPart]:
            async with turns:
                return await self._part(number)

        asked = [asyncio.create_task(of_part(number)) for number in range(len(self._sources))]
        try:
            found = await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
        files = tuple(file for file, _ in found)
        try:
            joined = join([part for _, part in found], [file.num_bytes for file in files])
        except NotJoinable as error:
            raise self._refused(str(error)) from error
        named = "\n".join(f"{file.num_bytes} {file.validator}" for file in files)
        validator = hashlib.sha256(named.encode()).hexdigest() if all(file.validator for file in files) else ""
        whole = SourceFile(path="", num_bytes=joined.num_bytes, validator=validator)
        self._joined = joined, files, whole
        return SourceInfo(files=(whole,), ranges=True)

    async def _part(self, number: int) -> tuple[SourceFile, GgufPart]:
        where = f"part {number + 1} of {len(self._sources)}"
        try:
            info = await self._sources[number].probe()
        except WeightsUnavailable as error:
            raise self._refused(f"{where}: {error.message}") from error
        if info.is_directory or not info.ranges:
            raise self._refused(f"{where}: {'it is a directory' if info.is_directory else 'its server has no ranges'}")
        (file,) = info.files
        wanted = _FIRST_BYTES
        while True:
            content = await self._head(number, file, min(wanted, file.num_bytes))
            try:
                return file, read_part(content)
            except NeedMore as error:
                if wanted >= min(file.num_bytes, MAX_HEADER_BYTES):
                    raise self._refused(f"{where} is cut short") from error
                wanted = max(error.num_bytes, 4 * wanted)
            except NotJoinable as error:
                raise self._refused(f"{where}: {error}") from error

    async def _head(self, number: int, file: SourceFile, num_bytes: int) -> bytes:
        content = bytearray()
        async with aclosing(self._sources[number].read(file, 0, num_bytes)) as chunks:
            async for chunk in chunks:
                content += chunk
        if len(content) < num_bytes:
            raise SourceInterrupted(f"{self._shown}: part {number + 1} ended early")
        return bytes(content)

    async def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[Chunk, None]:
        if self._joined is None:
            await self.probe()
        assert self._joined is not None
        joined, files, whole = self._joined
        if (file.num_bytes, file.validator) != (whole.num_bytes, whole.validator):
            raise SourceChanged(f"{self._shown} changed while it was being read")
        for stretch in joined.stretches(first_byte, last_byte or joined.num_bytes):
            if isinstance(stretch, bytes):
                yield stretch
                continue
            first, last = stretch.part_byte, stretch.part_byte + stretch.last - stretch.first
            num_bytes = 0
            async with aclosing(self._sources[stretch.part].read(files[stretch.part], first, last)) as chunks:
                async for chunk in chunks:
                    num_bytes += len(chunk)
                    yield chunk
            if num_bytes < last - first:
                return  # the caller counts; later bytes would be misplaced

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in self._sources))

    def _refused(self, why: str) -> WeightsUnavailable:
        return WeightsUnavailable(f"{self._shown}: {why}", param="weights")
