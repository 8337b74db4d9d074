"""Follow the children's log files, and show them in the terminal with coloured prefixes."""

import contextlib
import os
import queue
import shutil
import sys
import threading
from pathlib import Path
from typing import TextIO

LONGEST_LINE = 65536
_READ_BYTES = 1 << 20  # per poll, so that a file grown while stopped does not hold up the fleet
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_QUEUE_LINES = 5000


class LogFile:
    """Its writer never waits for a reader: a stopped supervisor delays only the terminal. Writers append (O_APPEND), so
    the file may be emptied under them."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Skip an earlier run's contents."""
        self.path, self._max_bytes = path, max_bytes
        self._rest = b""
        self._offset = path.stat().st_size if path.exists() else 0

    def open(self) -> int:
        """Open for a process; the caller closes. /dev/null on a disk error."""
        try:
            return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def append(self, line: str) -> None:
        """Raises OSError."""
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)

    def poll(self) -> list[str]:
        """Return whole lines since the last call. Raises OSError."""
        try:
            if self.path.stat().st_size == self._offset:
                return []
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return []
        try:
            size = os.fstat(fd).st_size
            if size < self._offset:  # emptied by another process
                self._offset = 0
            self._offset = max(self._offset, size - self._max_bytes)  # older lines stay in the file
            chunk = os.pread(fd, _READ_BYTES, self._offset)
            self._offset += len(chunk)
            if self._offset > self._max_bytes and len(chunk) < _READ_BYTES:
                self._rotate(fd)
        finally:
            os.close(fd)
        return self._lines(chunk)

    def rest(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", "replace")] if rest else []

    def _lines(self, chunk: bytes) -> list[str]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", "replace") for line in lines]

    def _rotate(self, fd: int) -> None:
        """Keep the newest bytes as <name>.log.1 and empty the file under its writers. Without space for the copy it is
        left as it is."""
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


class Output:
    """Never blocks the fleet: a paused terminal loses lines (counted), a full disk loses those of its time."""

    def __init__(
        self, log_dir: Path, *, max_bytes: int, stream: TextIO | None = None, show_logs: bool = True, width: int = 12
    ) -> None:
        self._dir, self._max_bytes, self._width = log_dir, max_bytes, width
        self._stream = stream or sys.stdout
        self._colour = self._stream.isatty()
        self.show_logs = show_logs
        self._supervisor = LogFile(log_dir / "supervisor.log", max_bytes)
        self._names: list[str] = []
        self._disk_failed = False
        self.num_dropped = 0
        self._queue: queue.Queue[str | None] = queue.Queue(_QUEUE_LINES)
        self._writer = threading.Thread(target=self._write, name="terminal", daemon=True)
        self._writer.start()
        log_dir.mkdir(parents=True, exist_ok=True)

    def log_file(self, name: str) -> LogFile:
        return LogFile(self._dir / f"{name}.log", self._max_bytes)

    def line(self, name: str, line: str) -> None:
        if self.show_logs:
            self._to_terminal(f"{self._prefix(name)}{line}")

    def say(self, text: str) -> None:
        self._to_terminal(text)

    def notice(self, text: str) -> None:
        """Report something to act on; also in supervisor.log."""
        self.write(self._supervisor, text)
        self._to_terminal(f"\x1b[1;31mglowplug: {text}\x1b[0m" if self._colour else f"glowplug: {text}")

    def progress(self, text: str) -> None:
        """Replace the line before on a terminal; else add one."""
        self._to_terminal(f"\r\x1b[K{text}" if self._colour else text, end="" if self._colour else "\n")

    def _prefix(self, name: str) -> str:
        if name not in self._names:
            self._names.append(name)
        text = f"{name:<{self._width}} | "
        if not self._colour:
            return text
        return f"\x1b[{_COLOURS[self._names.index(name) % len(_COLOURS)]}m{text}\x1b[0m"

    def write(self, file: LogFile, line: str) -> None:
        """Append the supervisor's line. A full disk is reported once and retried."""
        try:
            file.append(line)
            if file is self._supervisor:
                file.poll()  # unfollowed, but kept small
        except OSError as error:
            if not self._disk_failed:
                self._to_terminal(f"glowplug: logs are not written to {self._dir}: {error.strerror}")
            self._disk_failed = True
        else:
            self._disk_failed = False

    def _to_terminal(self, text: str, end: str = "\n") -> None:
        try:
            self._queue.put_nowait(text + end)
        except queue.Full:
            self.num_dropped += 1

    def _write(self) -> None:
        while (text := self._queue.get()) is not None:
            try:
                self._stream.write(text)
                if self._queue.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # the reader left; the log files stay
                self.show_logs = False

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._writer.join(timeout=1)
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
