"""Logs: one line per event, JSON or for people, with trace and request ids; never a prompt."""

import json as jsonlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final

from glowplug.telemetry.log_ring import LogRing
from glowplug.telemetry.tracing import is_sampled

REPEAT_S: Final = 10.0  # seconds in which a warning is logged once
MAX_REPEATS: Final = 256  # different warnings remembered
_NEEDS_QUOTES: Final = frozenset(" \t=\r\n\"'")  # a text with one of these is written as Python writes it
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}  # what every record has
RING: Final = LogRing()  # the last lines of this process
_labels: ContextVar[Mapping[str, str]] = ContextVar("_labels", default=MappingProxyType({}))


class Repeats(logging.Filter):
    """Pass each warning once in REPEAT_S seconds, and then with the number of its repetitions: while a server is gone,
    the same line would otherwise fill the log of every service. Lines about different requests or events differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}  # line -> when it last passed, repetitions since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or not isinstance(record.msg, str):
            return True
        text, now = record.getMessage(), self._clock()
        line = (record.name, record.levelno, text, tuple(sorted(_labels.get().items())))
        passed_at, num_since = self._seen.pop(line, (float("-inf"), 0))
        if now - passed_at < REPEAT_S:
            self._seen[line] = (passed_at, num_since + 1)
            return False
        if num_since:
            record.msg, record.args = f"{text} ({num_since} more since the last such line)", ()
        self._seen[line] = (now, 0)
        if len(self._seen) > MAX_REPEATS:
            del self._seen[next(iter(self._seen))]
        return True


class Lines(logging.Formatter):
    """One record as text for people, or as one JSON object: time, level, message, then its labels and extras."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        level, text, more = record.levelname.lower(), record.getMessage(), more_of(record)
        failure = self.failure(record)
        if self._as_json:
            last = {"exception": failure} if failure else {}
            return jsonlib.dumps({"event": text, **more, "level": level, "timestamp": at, **last}, default=repr)
        line = " ".join((f"{at} [{level:<9}] {text}", *(f"{name}={_shown(value)}" for name, value in more.items())))
        return f"{line}\n{failure}" if failure else line

    def failure(self, record: logging.LogRecord) -> str:
        """The exception of a record with its stack; "" where there is none."""
        return self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


class KeptStream(logging.StreamHandler[Any]):
    """Writes lines to a stream and keeps the last ones in `ring`."""

    def __init__(self, stream: Any, lines: Lines, ring: LogRing) -> None:
        super().__init__(stream)
        self.setFormatter(lines)
        self._lines, self._ring = lines, ring

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        with suppress(TypeError, ValueError, KeyError):  # a text and arguments that do not fit, as the stream has said
            more = {name: value for name, value in more_of(record).items() if name != "service"}
            fields = {**more, "exception": self._lines.failure(record)}
            self._ring.put(record.created, record.levelname.lower(), record.getMessage(), fields)


def more_of(record: logging.LogRecord) -> dict[str, Any]:
    """The labels in force and what was said beside the text of a record, which goes before them: None takes a label
    away."""
    more = {**_labels.get(), **{name: value for name, value in vars(record).items() if name not in _OWN}}
    return {name: value for name, value in more.items() if value is not None}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and not _NEEDS_QUOTES.intersection(value) else repr(value)


@contextmanager
def labelled(traceparent: str, **ids: str) -> Iterator[None]:
    """Add these ids (of an event, or of a call on an admin port) and the trace to lines logged inside, also by tasks
    begun there."""
    trace = {"trace_id": traceparent[3:35]} if is_sampled(traceparent) else {}
    before = _labels.set({**_labels.get(), **ids, **trace})
    try:
        yield
    finally:
        _labels.reset(before)


def configure(service_id: str, *, level: str = "INFO", json: bool = False) -> None:
    """Send the log of this process to stderr, each line with `service_id`, and keep its last lines in RING."""
    handler = KeptStream(sys.stderr, Lines(as_json=json), RING)
    handler.addFilter(Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "nats.aio.client", "opentelemetry"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    _labels.set({**_labels.get(), "service": service_id})
