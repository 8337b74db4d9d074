"""Keep the last log lines in memory, bounded, for readers with a cursor.

A cursor, "<run>:<number of the last line read>", yields each later line once, in order; dropped ones are counted. One
of another run (before a restart) reads from the first line kept.
"""

import asyncio
import contextlib
import threading
import uuid
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

MAX_LINES: Final = 2000
MAX_BYTES: Final = 1 << 20
MAX_LINE_CHARS: Final = 8192  # per text and field
LINE_BYTES: Final = 200  # overhead per line, about
LEVELS: Final[Mapping[str, int]] = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


@dataclass(frozen=True, slots=True)
class RingLine:
    """`at`: epoch seconds; `fields`: ids and other extras."""

    number: int
    at: float
    level: str
    text: str
    fields: Mapping[str, str]

    @property
    def num_bytes(self) -> int:
        """Approximate size, one byte per character."""
        return LINE_BYTES + len(self.text) + sum(len(name) + len(value) for name, value in self.fields.items())


@dataclass(frozen=True, slots=True)
class LogFilter:
    """A filter: least level, all words (any case), and one of the ids in a field or the text. Empty: all."""

    level: str = ""
    words: Collection[str] = ()
    ids: Collection[str] = ()

    def fits(self, line: RingLine) -> bool:
        if LEVELS.get(line.level, 0) < LEVELS.get(self.level, 0):
            return False
        if self.ids and not any(one in line.fields.values() or one in line.text for one in self.ids):
            return False
        if not self.words:
            return True
        whole = "\n".join((line.text, *line.fields.values())).lower()
        return all(word.lower() in whole for word in self.words)


@dataclass(frozen=True, slots=True)
class Page:
    """Lines, oldest first; the next cursor; lines dropped unread since the last."""

    lines: tuple[RingLine, ...]
    cursor: str
    num_lost: int = 0


@dataclass(slots=True)
class LogRing:
    """About `max_bytes` in `max_lines`. Any thread may put; readers live in event loops."""

    max_lines: int = MAX_LINES
    max_bytes: int = MAX_BYTES
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    num_bytes: int = 0
    _last: int = 0
    _lines: deque[RingLine] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = field(default_factory=dict)

    def put(self, at: float, level: str, text: str, fields: Mapping[str, Any]) -> None:
        """Keep a line, dropping the oldest ones and empty fields."""
        kept = {name: str(value)[:MAX_LINE_CHARS] for name, value in fields.items() if value not in (None, "")}
        with self._lock:
            self._last += 1
            line = RingLine(self._last, at, level, text[:MAX_LINE_CHARS], kept)
            self._lines.append(line)
            self.num_bytes += line.num_bytes
            while len(self._lines) > self.max_lines or (self.num_bytes > self.max_bytes and len(self._lines) > 1):
                self.num_bytes -= self._lines.popleft().num_bytes
            waiting = list(self._waiting.items())
        for event, loop in waiting:
            with contextlib.suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(event.set)

    def read(self, after: str = "", wanted: LogFilter = LogFilter(), limit: int = MAX_LINES) -> Page:
        """Return at most `limit` lines: the newest without a cursor, else the oldest after it."""
        with self._lock:
            lines, last = list(self._lines), self._last
        first = lines[0].number if lines else last + 1
        if not after:
            newest = list(islice((line for line in reversed(lines) if wanted.fits(line)), limit))
            return Page(tuple(reversed(newest)), self._cursor(last))
        since = self._number(after, last)
        found: list[RingLine] = []
        for line in islice(lines, max(0, since + 1 - first), None):
            if wanted.fits(line):
                found.append(line)
                if len(found) == limit:
                    last = line.number
                    break
        return Page(tuple(found), self._cursor(last), max(0, first - since - 1))

    async def wait(self, after: str, timeout_s: float) -> None:
        """Wait for a line after the cursor, or the timeout."""
        with self._watching() as came:
            if self._number(after, self._last) < self._last:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(came.wait(), timeout_s)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[asyncio.Event]:
        came = asyncio.Event()
        with self._lock:
            self._waiting[came] = asyncio.get_running_loop()
        try:
            yield came
        finally:
            with self._lock:
                del self._waiting[came]

    def _cursor(self, number: int) -> str:
        return f"{self.run}:{number}"

    def _number(self, cursor: str, last: int) -> int:
        run, _, number = cursor.partition(":")
        known = run == self.run and number.isascii() and number.isdecimal() and len(number) < 19
        return min(int(number), last) if known else 0
