"""Where the lines of the children go: one file per process, and the terminal with a coloured prefix."""

import contextlib
import queue
import sys
import threading
from pathlib import Path
from typing import TextIO

from glowplug.runtime.supervisor.logfile import LogFile

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_QUEUE_LINES = 5000


class Output:
    """Writes never block the fleet: a paused terminal loses lines (they are counted), a full disk loses those that
    were written while it was full."""

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
        """The file that one process writes its lines to."""
        return LogFile(self._dir / f"{name}.log", self._max_bytes)

    def line(self, name: str, line: str) -> None:
        """Show one line that a process has written to its file."""
        if self.show_logs:
            self._to_terminal(f"{self._prefix(name)}{line}")

    def say(self, text: str) -> None:
        """The supervisor's own word to the person."""
        self._to_terminal(text)

    def notice(self, text: str) -> None:
        """Something a person should act on; also kept in supervisor.log."""
        self.write(self._supervisor, text)
        self._to_terminal(f"\x1b[1;31mglowplug: {text}\x1b[0m" if self._colour else f"glowplug: {text}")

    def progress(self, text: str) -> None:
        """A line that replaces the one before on a terminal; elsewhere each is a line of its own."""
        self._to_terminal(f"\r\x1b[K{text}" if self._colour else text, end="" if self._colour else "\n")

    def _prefix(self, name: str) -> str:
        if name not in self._names:
            self._names.append(name)
        text = f"{name:<{self._width}} | "
        if not self._colour:
            return text
        return f"\x1b[{_COLOURS[self._names.index(name) % len(_COLOURS)]}m{text}\x1b[0m"

    def write(self, file: LogFile, line: str) -> None:
        """Add a line of the supervisor's to a file. A disk that takes none is told once, and tried again each time."""
        try:
            file.append(line)
            if file is self._supervisor:
                file.poll()  # nobody follows it; this keeps it small
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
            except (OSError, ValueError):  # the reader has gone; the log files stay
                self.show_logs = False

    def close(self) -> None:
        """Write what is queued (briefly)."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._writer.join(timeout=1)
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
