"""Write one region: files of full size, parts in any order, then pieces and the watermark."""

import asyncio
import errno
import hashlib
import os
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.domain.errors import NoSpace
from glowplug.domain.model import WeightsRef
from glowplug.weights.pieces import LandingMap, Layout, is_current, piece_digest, read_landed, read_layout
from glowplug.weights.region import Region
from glowplug.weights.source import UNKNOWN_BYTES, Chunk, SourceFile, SourceInfo, checked_relative, redacted

SAVE_EVERY_BYTES = 8 << 20  # a killed fetch's largest loss
STEP_BYTES = 1 << 20  # hashed at a time: fits into a core's cache
BATCH_BYTES = 4 << 20
MAX_HASHED = 4
BLOCK_BYTES = 512  # of `st_blocks`
FULL = frozenset({errno.ENOSPC, errno.EFBIG, errno.EDQUOT})


class Intervals:
    """Adding is O(number of ranges), which parts keep small."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: list[tuple[int, int]] = []
        for first, last in ranges:
            self.add(first, last)

    def add(self, first: int, last: int) -> None:
        """Touching and overlapping ranges merge."""
        if first >= last:
            return
        low = bisect_left(self._ranges, first, key=lambda r: r[1])
        high = bisect_right(self._ranges, last, key=lambda r: r[0])
        if low < high:
            first, last = min(first, self._ranges[low][0]), max(last, self._ranges[high - 1][1])
        self._ranges[low:high] = [(first, last)]

    @property
    def prefix_end(self) -> int:
        """The watermark."""
        return self._ranges[0][1] if self._ranges and self._ranges[0][0] == 0 else 0

    @property
    def total(self) -> int:
        return sum(last - first for first, last in self._ranges)

    def gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """Missing parts of [first, last), in order."""
        missing, position = [], first
        for start, end in self._ranges:
            if end <= position:
                continue
            if start >= last:
                break
            if start > position:
                missing.append((position, start))
            position = end
        if position < last:
            missing.append((position, last))
        return missing

    def around(self, position: int) -> tuple[int, int]:
        """Return an empty range where none holds `position`."""
        at = bisect_right(self._ranges, position, key=lambda r: r[0]) - 1
        if at >= 0 and position < self._ranges[at][1]:
            return self._ranges[at]
        return position, position

    def as_list(self) -> list[tuple[int, int]]:
        return list(self._ranges)


class RegionWriter:
    """All files of a source end to end in one space of offsets.

    NoSpace is raised for a source that grows past the granted `max_bytes`, a full file system and a file size limit.
    """

    def __init__(self, region: Region, ref: WeightsRef, info: SourceInfo, max_bytes: int) -> None:
        self.region, self.info = region, info
        self.num_bytes = info.num_bytes  # UNKNOWN_BYTES until `close_size`
        self.landed = Intervals()
        self.layout = Layout.of([(f.path, f.num_bytes) for f in info.files]) if info.num_bytes else None
        self._landing = LandingMap(region.directory, self.layout) if self.layout else None
        self.checked_pieces: dict[int, str] = {}
        self.grown = [asyncio.Event() for _ in info.files]  # set when more of the file may have landed
        self._identity = _identity(ref, info)
        self._max_bytes = max_bytes
        self._num_bytes_unsaved = 0
        self._starts: list[int] = []
        self._fds: list[int] = []
        position = 0
        for file in info.files:
            self._starts.append(position)
            position += file.num_bytes

    def open(self) -> int:
        """Resume an earlier try of the same source; return its landed bytes.

        Blocking. Raises NoSpace where less than the rest is free, and WeightsUnavailable for a file name that leaves
        the region.
        """
        if self.num_bytes > self._max_bytes:
            raise NoSpace(f"{self.num_bytes} bytes of weights, room for {self._max_bytes}")
        self.landed = landed = self._resumed()
        if not landed.total:
            self.region.clear_bytes()
        try:
            self.region.begin()
            for file in self.info.files:
                self._fds.append(self._open_file(file))
            self._check_room()
            for fd, file in zip(self._fds, self.info.files, strict=True):
                if sys.platform == "linux" and _is_mapped_whole(file) and file.num_bytes:
                    os.posix_fallocate(fd, 0, file.num_bytes)
            self.save()
            self.region.set_watermark(landed.prefix_end)
            self._publish()
        except OSError as error:
            self.close()
            raise self._translated(error) from error
        except BaseException:
            self.close()
            raise
        return landed.total

    def _resumed(self) -> Intervals:
        """Keep the earlier generation: waiting readers have read the same bytes."""
        meta = self.region.read_meta()
        if not may_resume(meta, self._identity, self.info) or not all(
            _has_size(self._path(f), f.num_bytes) for f in self.info.files
        ):
            return Intervals()
        landed = Intervals((int(first), int(last)) for first, last in meta.get("landed", ()))
        before = read_layout(self.region.directory)
        if self.layout and before and replace(before, generation=self.layout.generation) == self.layout:
            self.layout = before
            marks = read_landed(self.region.directory, before)
            for index in (index for index, mark in enumerate(marks) if mark):
                landed.add(*before.piece(index))
        return landed

    def _publish(self) -> None:
        """Publish landed pieces first, then the layout."""
        if self.layout is None or self._landing is None:
            return
        whole = [index for index in range(self.layout.num_pieces) if self._is_whole(index)]
        self._landing.open(whole)
        self.region.write_layout(self.layout)

    def _is_whole(self, index: int) -> bool:
        assert self.layout is not None
        first, last = self.layout.piece(index)
        start, end = self.landed.around(first)
        return start <= first and last <= end

    def _open_file(self, file: SourceFile) -> int:
        path = self._path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(fd, file.num_bytes)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _check_room(self) -> None:
        """Raises OSError. Another fetch may take the room later."""
        there = os.statvfs(self.region.directory)
        held = sum(os.fstat(fd).st_blocks * BLOCK_BYTES for fd in self._fds)
        if there.f_blocks and there.f_bavail * there.f_frsize < self.num_bytes - held:  # no blocks: no limit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, offset: int, chunk: Chunk | bytearray) -> None:
        """Raises NoSpace."""
        end = offset + len(chunk)
        if end > self._max_bytes:
            raise NoSpace(f"the source continues past the {self._max_bytes} bytes of room")
        before, position, view = self.landed.prefix_end, offset, memoryview(chunk)
        try:
            while position < end:
                index = self.file_at(position)
                stop = min(end, self.file_end(index)) if self.num_bytes else end
                content = view[position - offset : stop - offset]
                position += os.pwrite(self._fds[index], content, position - self._starts[index])
                self.grown[index].set()
            self.landed.add(offset, end)
            if self.layout is not None and self._landing is not None:
                for piece in self.layout.touched(offset, end):
                    if self._is_whole(piece):
                        self._landing.mark(piece)
            if self.landed.prefix_end > before:
                self.region.set_watermark(self.landed.prefix_end)
            self._num_bytes_unsaved += len(chunk)
            if self._num_bytes_unsaved >= SAVE_EVERY_BYTES:
                self.save()
        except OSError as error:
            raise self._translated(error) from error

    def retract(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Mark wrong bytes as missing, in another generation of the region."""
        if self.layout is None or self._landing is None:
            return
        self.region.forget_stages()
        self.layout = replace(self.layout, generation=Layout.of([]).generation)
        self.region.write_layout(self.layout)  # before any mark goes, so that readers notice
        lost = Intervals(self.layout.rounded(*one) for one in ranges)
        self.landed = Intervals(gap for one in self.landed.as_list() for gap in lost.gaps(*one))
        for first, last in lost.as_list():
            for piece in self.layout.touched(first, last):
                self._landing.mark(piece, landed=False)
                self.checked_pieces.pop(piece, None)
        self.region.set_watermark(self.landed.prefix_end)
        self.save()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Read within one file. Blocking."""
        index = self.file_at(offset)
        return os.pread(self._fds[index], min(num_bytes, self.file_end(index) - offset), offset - self._starts[index])

    def read_into(self, view: memoryview, offset: int) -> int:
        """Return the number of bytes."""
        index = self.file_at(offset)
        num_bytes = min(len(view), self.file_end(index) - offset)
        return os.preadv(self._fds[index], [view[:num_bytes]], offset - self._starts[index])

    def read_all(self, offset: int, num_bytes: int) -> bytes:
        """Bytes within one file; empty if some have not landed."""
        if self.landed.gaps(offset, offset + num_bytes):
            return b""
        return self.read(offset, num_bytes) if num_bytes else b""

    def file_at(self, offset: int) -> int:
        """Index of the file that holds `offset`; empty files hold nothing."""
        return bisect_right(self._starts, offset) - 1

    def file_start(self, index: int) -> int:
        return self._starts[index]

    def file_end(self, index: int) -> int:
        if index + 1 < len(self._starts):
            return self._starts[index + 1]
        return self.num_bytes or self.landed.prefix_end

    def close_size(self) -> None:
        self.num_bytes = self.landed.prefix_end
        self.grown[0].set()

    def save(self) -> None:
        """Record landed bytes, so that a killed fetch resumes."""
        self._num_bytes_unsaved = 0
        self.region.write_meta({**self._identity, "num_bytes": self.num_bytes, "landed": self.landed.as_list()})

    def _path(self, file: SourceFile) -> Path:
        return self.region.files / checked_relative(file.path) if file.path else self.region.blob

    def path(self) -> Path:
        return self.region.files if self.info.is_directory else self.region.blob

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        if self._landing is not None:
            self._landing.close()

    def _translated(self, error: OSError) -> Exception:
        if error.errno in FULL:
            return NoSpace(f"host memory is full: {error.strerror} ({self.num_bytes or 'unknown'} bytes wanted)")
        return error


class Digester:
    """SHA-256 of the region's content and, with `with_pieces`, each piece's checksum in the same pass. Files are
    hashed in parallel threads, each from its beginning.

    A directory's digest is that of `sha256sum`'s listing: `<hex>  <path>` lines, in path order.
    """

    def __init__(self, writer: RegionWriter, step_bytes: int = STEP_BYTES, *, with_pieces: bool = True) -> None:
        self._writer, self._step_bytes = writer, step_bytes
        self._layout = writer.layout if with_pieces else None
        self._stopped = False
        self._hashes = [hashlib.sha256() for _ in writer.info.files]
        self._pieces = [""] * (self._layout.num_pieces if self._layout else 0)
        self._threads = asyncio.Semaphore(MAX_HASHED)
        self._buffers: list[memoryview] = []

    @property
    def piece_digests(self) -> tuple[str, ...]:
        """One per piece, after `run`; () without them, and for weights of unknown size."""
        return tuple(self._pieces)

    def stop(self) -> None:
        self._stopped = True

    async def run(self) -> str:
        """Return the digest once every byte has landed."""
        try:
            async with asyncio.TaskGroup() as group:
                for index, file in enumerate(self._writer.info.files):
                    if file.num_bytes or self._writer.num_bytes == UNKNOWN_BYTES:
                        group.create_task(self._follow(index))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        if self._layout is not None:
            await asyncio.to_thread(self._take_pieces_of_several_files, self._layout)
        return self._finish()

    async def _follow(self, index: int) -> None:
        writer = self._writer
        position, crc = writer.file_start(index), 0
        while writer.num_bytes == UNKNOWN_BYTES or position < writer.file_end(index):
            writer.grown[index].clear()
            landed, is_sized = writer.landed.around(position)[1], writer.num_bytes != UNKNOWN_BYTES
            available = min(landed, writer.file_end(index)) if is_sized else landed
            if available - position < BATCH_BYTES and not (is_sized and available == writer.file_end(index)):
                await writer.grown[index].wait()
                continue
            async with self._threads:
                crc = await asyncio.to_thread(self._take, index, position, available, crc)
            position = available

    def _take(self, index: int, position: int, available: int, crc: int) -> int:
        """`crc` covers the piece up to `position`; returns the one up to `available`."""
        buffer = self._buffers.pop() if self._buffers else memoryview(bytearray(self._step_bytes))
        while position < available and not self._stopped:
            num_bytes = self._writer.read_into(buffer[: available - position], position)
            if not num_bytes:
                raise OSError(errno.EIO, f"byte {position} of the region has vanished")
            self._hashes[index].update(buffer[:num_bytes])
            if self._layout is not None:
                crc = self._take_pieces(self._layout, index, position, buffer[:num_bytes], crc)
            position += num_bytes
        self._buffers.append(buffer)
        return crc

    def _take_pieces(self, layout: Layout, index: int, position: int, view: memoryview, crc: int) -> int:
        """Skip pieces that span files."""
        while view:
            piece = position // layout.piece_bytes
            first, last = layout.piece(piece)
            taken, view = view[: last - position], view[last - position :]
            position += len(taken)
            known = self._writer.checked_pieces.get(piece, "")
            if is_current(known):
                self._pieces[piece] = known
            elif self._writer.file_start(index) <= first and last <= self._writer.file_end(index):
                crc = zlib.crc32(taken, crc)
                if position == last:
                    self._pieces[piece] = piece_digest(b"", crc)
            if position == last:
                crc = 0
        return crc

    def _take_pieces_of_several_files(self, layout: Layout) -> None:
        buffer = memoryview(bytearray(layout.piece_bytes))
        for piece in [piece for piece, digest in enumerate(self._pieces) if not digest]:
            (position, last), crc = layout.piece(piece), 0
            while position < last and not self._stopped:
                num_bytes = self._writer.read_into(buffer[: last - position], position)
                if not num_bytes:
                    raise OSError(errno.EIO, f"byte {position} of the region has vanished")
                crc = zlib.crc32(buffer[:num_bytes], crc)
                position += num_bytes
            self._pieces[piece] = piece_digest(b"", crc)

    def _finish(self) -> str:
        files = self._writer.info.files
        if not self._writer.info.is_directory:
            return self._hashes[0].hexdigest()
        lines = sorted((f.path, h.hexdigest()) for f, h in zip(files, self._hashes, strict=True))
        return hashlib.sha256("".join(f"{digest}  {path}\n" for path, digest in lines).encode()).hexdigest()


def _is_mapped_whole(file: SourceFile) -> bool:
    """Whether engines may map all of it before it lands, as llama.cpp does with a GGUF: the map would allocate on
    the engine's account. Other files are not preallocated: that delays the first byte by a quarter of a second
    per gigabyte. A single file has no name here."""
    return not file.path or file.path.endswith(".gguf")


def _has_size(path: Path, num_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == num_bytes


def may_resume(meta: Mapping[str, Any], identity: Mapping[str, Any], info: SourceInfo) -> bool:
    """Compare source and validators. Without validators only a checksum over every byte makes a resume safe."""
    same = bool(meta) and all(meta.get(key) == value for key, value in identity.items())
    safe = identity["checked"] or all(f.validator for f in info.files)
    return bool(info.ranges and same and safe)


def is_unchanged(meta: Mapping[str, Any], info: SourceInfo) -> bool:
    """Compare as far as sizes and validators show."""
    return bool(meta.get("files") == _files(info))


def _files(info: SourceInfo) -> list[list[str | int]]:
    return [[f.path, f.num_bytes, f.validator] for f in info.files]


def _identity(ref: WeightsRef, info: SourceInfo) -> dict[str, Any]:
    return {
        "uri_sha256": hashlib.sha256(ref.uri.encode()).hexdigest(),
        "source": redacted(ref.uri),
        "checked": bool(ref.sha256),
        "files": _files(info),
    }
