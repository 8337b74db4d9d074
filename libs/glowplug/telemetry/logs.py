"""Log one line per event, JSON or text, with trace and request ids; never a prompt."""

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

REPEAT_S: Final = 10.0  # a warning appears once in them
MAX_REPEATS: Final = 256  # different warnings
_NEEDS_QUOTES: Final = frozenset(" \t=\r\n\"'")  # written as a Python literal
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}  # of every record
RING: Final = LogRing()
_labels: ContextVar[Mapping[str, str]] = ContextVar("_labels", default=MappingProxyType({}))


class Repeats(logging.Filter):
    """Pass a warning once per REPEAT_S, then with its count: a lost server would fill every service's log. Lines of
    different requests or events differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}  # line -> last passed, repetitions

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
    """A record as text or a JSON object: time, level, message, labels and extras."""

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
        return self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""


class KeptStream(logging.StreamHandler[Any]):
    """Writes lines to a stream and to `ring`."""

    def __init__(self, stream: Any, lines: Lines, ring: LogRing) -> None:
        super().__init__(stream)
        self.setFormatter(lines)
        self._lines, self._ring = lines, ring

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        with suppress(TypeError, ValueError, KeyError):  # unfit arguments, reported by the stream
            more = {name: value for name, value in more_of(record).items() if name != "service"}
            fields = {**more, "exception": self._lines.failure(record)}
            self._ring.put(record.created, record.levelname.lower(), record.getMessage(), fields)


def more_of(record: logging.LogRecord) -> dict[str, Any]:
    """Merge the labels in force with a record's extras, which win; None removes a label."""
    more = {**_labels.get(), **{name: value for name, value in vars(record).items() if name not in _OWN}}
    return {name: value for name, value in more.items() if value is not None}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and not _NEEDS_QUOTES.intersection(value) else repr(value)


@contextmanager
def labelled(traceparent: str, **ids: str) -> Iterator[None]:
    """Label log lines inside, also of tasks begun there, with ids (of an event or admin call) and the trace."""
    trace = {"trace_id": traceparent[3:35]} if is_sampled(traceparent) else {}
    before = _labels.set({**_labels.get(), **ids, **trace})
    try:
        yield
    finally:
        _labels.reset(before)


def configure(service_id: str, *, level: str = "INFO", json: bool = False) -> None:
    """Log to stderr with `service_id`, and into RING."""
    handler = KeptStream(sys.stderr, Lines(as_json=json), RING)
    handler.addFilter(Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "nats.aio.client", "opentelemetry"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    _labels.set({**_labels.get(), "service": service_id})
