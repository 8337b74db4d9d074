"""Weights on a local disk or share: one file, or a directory of files (HF layout)."""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.files import NoAnswer, PatientReader
from glowplug.weights.source import (
    Chunk,
    SourceFile,
    SourceInfo,
    SourceInterrupted,
    SourceOptions,
    check_reference,
    checked_relative,
    local_path,
)

_READER = PatientReader(SourceOptions().stall_timeout_s)  # shared: a dead mount holds one thread per path


class FileSource:
    """`file:///abs/path`, `file:rel/path` or a bare path. Skips hidden files."""

    scheme = "file"

    def __init__(self, uri: str, options: SourceOptions = SourceOptions()) -> None:
        check_reference(uri)
        path = local_path(uri)
        assert path is not None, f"{uri} is read by another source"
        self._path = path
        self._chunk_bytes, self._stall_s = options.chunk_bytes, options.stall_timeout_s

    async def probe(self) -> SourceInfo:
        try:
            return await _READER.run(f"{self._path}", self._probe, self._stall_s)
        except NoAnswer as error:
            raise SourceInterrupted(f"{self._path}: {error.strerror}") from error

    async def measure(self) -> SourceInfo:
        return await self.probe()

    def _probe(self) -> SourceInfo:
        try:
            if self._path.is_dir():
                found = sorted(_visible(self._path))
                _check_links(found, self._path)
                files = tuple(_entry(path, self._path) for path in found)
                if not files:
                    raise WeightsUnavailable(f"{self._path}: the directory holds no file")
                return SourceInfo(files=files, ranges=True)
            if not self._path.is_file():
                raise WeightsUnavailable(f"{self._path}: no such file")
            return SourceInfo(files=(_entry(self._path, None),), ranges=True)
        except OSError as error:
            raise _readable(self._path, error) from error

    async def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[Chunk, None]:
        path = self._path / file.path if file.path else self._path
        try:
            handle = await _READER.run(f"open {path}", lambda: path.open("rb", buffering=0), self._stall_s)
        except NoAnswer as error:
            raise SourceInterrupted(f"{path}: {error.strerror}") from error
        except OSError as error:
            raise _readable(path, error) from error
        with handle:
            position, end = first_byte, last_byte or file.num_bytes
            while position < end:
                num_bytes = min(self._chunk_bytes, end - position)
                try:
                    async with asyncio.timeout(self._stall_s):
                        chunk = await asyncio.to_thread(os.pread, handle.fileno(), num_bytes, position)
                except TimeoutError as error:
                    raise SourceInterrupted(f"{path}: no byte within {self._stall_s:g} s") from error
                except OSError as error:
                    raise SourceInterrupted(f"{path}: {error.strerror}") from error
                if not chunk:
                    return
                yield chunk
                position += len(chunk)

    async def close(self) -> None:
        """Nothing is held open between calls."""


def _visible(root: Path) -> list[Path]:
    return [p for p in root.rglob("*") if p.is_file() and not any(x.startswith(".") for x in p.relative_to(root).parts)]


def _check_links(paths: list[Path], root: Path) -> None:
    """Raises WeightsUnavailable for a link out of the directory: its bytes would be copied and offered to other nodes.
    A snapshot of the hub's cache links to the blobs beside it."""
    within = root.resolve()
    blobs = (within.parent.parent / "blobs").resolve()
    for path in paths:
        target = path.resolve()
        if not (target.is_relative_to(within) or (within.parent.name == "snapshots" and target.parent == blobs)):
            raise WeightsUnavailable(f"{path}: a link out of its directory")


def _entry(path: Path, root: Path | None) -> SourceFile:
    stat = path.stat()
    relative = checked_relative(path.relative_to(root).as_posix()) if root else ""
    return SourceFile(path=relative, num_bytes=stat.st_size, validator=f"{stat.st_mtime_ns}-{stat.st_ino}")


def _readable(path: Path, error: OSError) -> WeightsUnavailable:
    return WeightsUnavailable(f"{path}: {error.strerror or error}")
