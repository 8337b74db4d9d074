"""The log file of one process: the process appends to it by itself, we read what comes and keep the file small."""

import os
import shutil
from pathlib import Path

LONGEST_LINE = 65536
_READ_BYTES = 1 << 20  # of one poll, so that a file which grew while we were stopped does not hold up the fleet


class LogFile:
    """Nobody has to read this file for its writer to go on: a supervisor that is stopped delays nothing but the
    terminal. Every writer appends (O_APPEND), so that the file may be emptied under it."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """What the file holds already is of an earlier run and not read again."""
        self.path, self._max_bytes = path, max_bytes
        self._rest = b""
        self._offset = path.stat().st_size if path.exists() else 0

    def open(self) -> int:
        """A descriptor for a process to write to; the caller closes it. /dev/null when the disk takes no file."""
        try:
            return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def append(self, line: str) -> None:
        """A line of our own. Raises OSError."""
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)

    def poll(self) -> list[str]:
        """The whole lines since the last call. Raises OSError when the file cannot be read or emptied."""
        try:
            if self.path.stat().st_size == self._offset:
                return []
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        try:
            size = os.fstat(fd).st_size
            if size < self._offset:  # somebody else emptied it
                self._offset = 0
            self._offset = max(self._offset, size - self._max_bytes)  # what is older stays in the file
            chunk = os.pread(fd, _READ_BYTES, self._offset)
            self._offset += len(chunk)
            if self._offset > self._max_bytes and len(chunk) < _READ_BYTES:
                self._rotate(fd)
        finally:
            os.close(fd)
        return self._lines(chunk)

    def rest(self) -> list[str]:
        """What a writer that has ended left without the end of its line."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", "replace")] if rest else []

    def _lines(self, chunk: bytes) -> list[str]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]

    def _rotate(self, fd: int) -> None:
        """Keep the newest bytes as <name>.log.1 and empty the file, whose writers go on at its beginning. A disk
        without space for the copy leaves the file as it is until there is some."""
        older, part = self.path.with_suffix(".log.1"), self.path.with_suffix(".log.part")
        try:
            with self.path.open("rb") as source, part.open("wb") as copy:
                source.seek(max(0, os.fstat(fd).st_size - self._max_bytes))
                shutil.copyfileobj(source, copy, _READ_BYTES)
            part.replace(older)
        except OSError:
            part.unlink(missing_ok=True)
            return
        os.ftruncate(fd, 0)
        self._offset = 0
