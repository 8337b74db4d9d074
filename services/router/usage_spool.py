"""The spool: usage records on disk, from the end of their request until the bus has stored them.

Each record is a JSON line in a memory-mapped segment, whose blocks are reserved at its beginning: a kill loses none, a
power failure perhaps the last seconds', since nothing is synced. A segment is sealed, sent, and removed once stored. A
living process's is locked and ends in zeros, an ended one's is adopted.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgspec

from glowplug.domain.usage import UsageRecord

log = logging.getLogger(__name__)
SUFFIX = ".jsonl"
SEGMENT_BYTES = 1 << 20
# A UsageRecord without default values, made in a tenth of a frozen dataclass's time.
Line: Any = msgspec.defstruct(
    "Line",
    [
        (field.name, field.type) if field.default is MISSING else (field.name, field.type, field.default)
        for field in fields(UsageRecord)
    ],
    kw_only=True,
    omit_defaults=True,
)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Line).decode


class Spool:
    """The segments of one router. At `max_bytes` in all, or on a full disk, records are lost: `on_loss` gets their
    number, and the log says so once per outage. 0 keeps none."""

    def __init__(self, folder: Path, max_bytes: int, on_loss: Callable[[int], None] = lambda _: None) -> None:
        self.folder, self._max_bytes, self._on_loss = folder, max_bytes, on_loss
        self._fd, self._path, self._size = -1, Path(), 0  # the open segment
        self._memory: mmap.mmap | None = None
        self._room = 0
        self._sealed: dict[Path, int] = {}  # bytes, the oldest first
        self._sealed_bytes = 0
        self.problem = ""  # why records are lost now
        self.adopt()

    @property
    def num_bytes(self) -> int:
        return self._sealed_bytes + self._size

    def append(self, record: Any) -> None:
        """Keep one Line. A fault of the disk raises nothing."""
        line = _encode(record) + b"\n"
        at = self._size
        end = at + len(line)
        if end > self._room:
            if self._sealed_bytes + end > self._max_bytes:
                self._lose(f"the spool holds {self.num_bytes} bytes, the most it may")
                return
            try:
                self._begin(len(line))
            except OSError as error:
                self._lose(str(error))
                return
            at, end = 0, len(line)
        memory = self._memory
        assert memory is not None
        memory[at:end] = line
        self._size = end
        if self.problem:
            self.problem = ""
            log.warning("the router keeps usage records in %s again", self.folder)

    def seal(self) -> list[Path]:
        """End the open segment. Returns all that can be sent, the oldest first."""
        if self._memory is not None:
            self._memory.close()
            os.truncate(self._fd, self._size)
            os.close(self._fd)
            self._sealed[self._path] = self._size
            self._sealed_bytes += self._size
            self._memory, self._fd, self._size, self._room = None, -1, 0, 0
        return list(self._sealed)

    def remove(self, segment: Path) -> None:
        self._sealed_bytes -= self._sealed.pop(segment)
        segment.unlink(missing_ok=True)

    def adopt(self) -> None:
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            if path not in self._sealed and path != self._path and not _is_written(path):
                size = len(path.read_bytes().rstrip(b"\0"))
                os.truncate(path, size)
                self._sealed[path] = size
                self._sealed_bytes += size

    def adopt_all(self, folder: Path) -> None:
        """Take over an ended router's segments. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another router was sooner
                path.rename(self.folder / path.name)
        self.adopt()

    def close(self) -> None:
        self.seal()

    def _begin(self, least: int) -> None:
        """Open a segment with room for `least` bytes, and for more within `max_bytes`. Raises OSError."""
        self.seal()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{time.time_ns():020d}-{secrets.token_hex(4)}{SUFFIX}"
        room = max(min(SEGMENT_BYTES, self._max_bytes - self._sealed_bytes), least)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, room)
            self._memory = mmap.mmap(fd, room)
        except OSError:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        self._fd, self._path, self._room = fd, path, room

    def _lose(self, reason: str) -> None:
        self._on_loss(1)
        if self._max_bytes and not self.problem:
            log.error("the router cannot keep usage records in %s and loses them: %s", self.folder, reason)
        self.problem = reason


def read(segment: Path, offset: int, num_records: int) -> tuple[list[Any], int, int]:
    """Return (at most `num_records` Lines from `offset` on, the next offset, bad lines). The offset stays at the end.
    Raises OSError."""
    records: list[Any] = []
    num_bad = 0
    with segment.open("rb") as file:
        file.seek(offset)
        while len(records) < num_records and (line := file.readline()):
            try:
                records.append(_decode(line))
            except msgspec.MsgspecError:
                num_bad += 1
        return records, file.tell(), num_bad


def _is_written(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


def is_locked(fd: int) -> bool:
    """Lock an open file. Returns whether another process has it locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
