"""Copies of weights on a node's disk, behind its host memory.

    <disk_dir>/<node_id>/<digest>/        laid out as a region in host memory (region.py), whole
    <disk_dir>/<node_id>/<digest>.part/   one being written: never read, and removed by the next process

A copy is written under the other name, flushed with every file and directory, and renamed: a copy under its own name is
whole, however the machine stopped. Its content is checked again, byte by byte, when read.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.domain.hardware import CachedWeights
from glowplug.domain.model import WeightsRef
from glowplug.weights.inventory import is_whole, read_inventory
from glowplug.weights.pieces import read_layout, read_piece_digests
from glowplug.weights.region import Region, RegionInfo, RegionState
from glowplug.weights.source import SourceFile, SourceInfo, SourceInterrupted, SourceOptions, checked_relative, file_uri
from glowplug.weights.sources.file import FileSource

DISK = "disk"
STEP_BYTES = 8 << 20  # a copy can stop between two steps
FLUSH_BYTES = 64 << 20  # bytes between flushes: no copy stops during a longer one
_OURS = re.compile(r"[0-9a-f]{64}(\.part)?")


class CopyStopped(Exception):
    """The copy is no longer wanted."""


class CopyUnusable(Exception):
    """There is no readable copy."""


class DiskCopies:
    """All methods block."""

    def __init__(self, disk_dir: Path, node_id: str) -> None:
        self._disk_dir, self._node_id = disk_dir, node_id
        self.root = disk_dir / node_id

    def region(self, digest: str) -> Region:
        return Region.at(self._disk_dir, self._node_id, digest)

    def found(self) -> tuple[CachedWeights, ...]:
        """Return the whole copies, and remove the remains of others. Raises OSError for an unusable directory."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        whole = read_inventory(self._disk_dir, self._node_id).complete
        names = {copy.digest for copy in whole}
        for path in self.root.iterdir():
            if _OURS.fullmatch(path.name) and path.is_dir() and path.name not in names:
                shutil.rmtree(path)
        return whole

    def write(self, memory: Region, stop: threading.Event) -> int:
        """Copy a region; return its bytes. Raises CopyStopped, or OSError (the disk is full, or fails), and removes
        the partial copy."""
        info, meta = _whole(memory)
        scratch, target = self.root / f"{memory.digest}.part", self.root / memory.digest
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            copy = Region(scratch)
            scratch.mkdir(parents=True)
            for path, num_bytes, _ in meta["files"]:
                _copy_file(_file(memory, path), _file(copy, path), num_bytes, stop)
            copy.write_meta(meta)
            if (layout := read_layout(memory.directory)) and (digests := read_piece_digests(memory.directory, layout)):
                copy.write_layout(layout)
                copy.write_piece_digests(layout, digests)
            for model_key in memory.model_keys():
                copy.add_model_key(model_key)
            copy.complete(replace(info, path=str(_root(self.region(memory.digest), meta).absolute())))
            _flush(scratch)
            shutil.rmtree(target, ignore_errors=True)
            scratch.rename(target)
            _flush_directory(self.root)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return info.num_bytes

    def remove(self, digest: str) -> None:
        """Raises OSError."""
        region = self.region(digest)
        (region.directory / "complete.json").unlink(missing_ok=True)  # first: a half-removed copy is not whole
        if region.directory.exists():
            shutil.rmtree(region.directory)

    def is_beside(self, path: Path) -> bool:
        """Whether `path` is on the same file system: a copy would be no nearer."""
        try:
            return path.stat().st_dev == self.root.stat().st_dev
        except OSError:
            return False

    def open(self, digest: str, options: SourceOptions) -> "DiskSource":
        """Raises CopyUnusable."""
        region = self.region(digest)
        if not is_whole(region):
            raise CopyUnusable("it is incomplete")
        try:
            return DiskSource(region, options)
        except OSError as error:
            raise CopyUnusable(str(error)) from error


class DiskSource(FileSource):
    scheme = DISK

    def __init__(self, region: Region, options: SourceOptions) -> None:
        """Raises OSError where the region is not whole."""
        info, self.meta = _whole(region)
        super().__init__(file_uri(_root(region, self.meta)), options)
        self._region, self._info = region, info
        layout = read_layout(region.directory)
        self.piece_digests = read_piece_digests(region.directory, layout) if layout else ()

    def reference(self, wanted: WeightsRef) -> WeightsRef:
        """Return `wanted` with the copy's recorded size, and its checksum where none is given."""
        return replace(wanted, sha256=wanted.sha256 or self._info.sha256, num_bytes=self._info.num_bytes)

    def _probe(self) -> SourceInfo:
        try:
            files = tuple(self._entry(str(path)) for path, _, _ in self.meta["files"])
        except OSError as error:
            raise SourceInterrupted(f"the copy on disk: {error}") from error
        return SourceInfo(files=files, ranges=True)

    def _entry(self, path: str) -> SourceFile:
        stat = _file(self._region, path).stat()
        return SourceFile(path=path, num_bytes=stat.st_size, validator=f"{stat.st_mtime_ns}-{stat.st_ino}")

    def restore(self, memory: Region) -> None:
        """Record the weights' first source, for later comparisons."""
        memory.write_meta(self.meta)

    def keep(self, memory: Region, landed: Sequence[tuple[int, int]]) -> None:
        """Mark damaged pieces as missing, so that a fetch from the first source continues."""
        memory.write_meta({**self.meta, "num_bytes": self._info.num_bytes, "landed": [list(one) for one in landed]})

    def forget_pages(self) -> None:
        """Free the page cache, so that host memory holds the weights once, in the region."""
        for path, _, _ in self.meta["files"]:
            with _opened(_file(self._region, str(path)), os.O_RDONLY) as fd:
                _forget_pages(fd)


def _whole(region: Region) -> tuple[RegionInfo, dict[str, Any]]:
    """Raises OSError for a region that is not whole."""
    status, meta = region.read_state(), region.read_meta()
    if status.state is not RegionState.COMPLETE or status.info is None or not _has_files(meta):
        raise OSError(0, f"{region.digest[:12]} is incomplete")
    return status.info, meta


def _has_files(meta: dict[str, Any]) -> bool:
    files = meta.get("files")
    return isinstance(files, list) and bool(files) and all(isinstance(f, list) and len(f) == 3 for f in files)


def _file(region: Region, path: str) -> Path:
    return region.files / checked_relative(path) if path else region.blob


def _root(region: Region, meta: dict[str, Any]) -> Path:
    return region.files if any(path for path, _, _ in meta["files"]) else region.blob


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)


def _copy_file(source: Path, target: Path, num_bytes: int, stop: threading.Event) -> None:
    """`num_bytes` 0: the whole file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _opened(source, os.O_RDONLY) as reading, _opened(target, os.O_RDWR | os.O_CREAT | os.O_EXCL) as writing:
        size = os.fstat(reading).st_size
        if num_bytes and size != num_bytes:
            raise OSError(0, f"{size} bytes of {source.name}, expected {num_bytes}")
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(writing, 0, size)  # a full disk fails at once
        position = flushed = 0
        while position < size:
            if stop.is_set():
                raise CopyStopped
            chunk = os.pread(reading, min(STEP_BYTES, size - position), position)
            if not chunk:
                raise OSError(0, f"byte {position} of {source.name} has vanished")
            position += os.pwrite(writing, chunk, position)
            if position - flushed >= FLUSH_BYTES:
                _flush_content(writing)
                _forget_pages(writing)
                flushed = position
        os.fsync(writing)
        _forget_pages(writing)


def _forget_pages(fd: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _flush_content(fd: int) -> None:
    """Flush without timestamps where the system can."""
    getattr(os, "fdatasync", os.fsync)(fd)


def _flush(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        if path.is_dir():
            _flush_directory(path)
        else:
            with _opened(path, os.O_RDONLY) as fd:
                os.fsync(fd)
    _flush_directory(directory)


def _flush_directory(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as fd:
        os.fsync(fd)
