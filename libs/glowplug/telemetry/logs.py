"""Logs: one line per event, JSON or for people, with trace and request ids; never a prompt."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from glowplug.telemetry.tracing import is_sampled

REPEAT_S: Final = 10.0  # seconds in which a warning is logged once
MAX_REPEATS: Final = 256  # different warnings that are remembered


class Repeats(logging.Filter):
    """Lets a warning pass once in REPEAT_S seconds, and then says how often it came: a server that is gone for a minute
    would else fill the log of every service with the same line. Lines about different requests or events differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}  # line -> when it last passed, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or not isinstance(record.msg, str):
            return True
        text, now = record.getMessage(), self._clock()
        bound = tuple(sorted((key, str(value)) for key, value in structlog.contextvars.get_contextvars().items()))
        line = (record.name, record.levelno, text, bound)
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


@contextmanager
def labelled(traceparent: str, **ids: str) -> Iterator[None]:
    """Lines logged inside, and in tasks begun there, carry these ids (of an event, or of a call on an admin port) and
    the trace."""
    trace = {"trace_id": traceparent[3:35]} if is_sampled(traceparent) else {}
    with structlog.contextvars.bound_contextvars(**ids, **trace):
        yield


def configure(service_id: str, *, level: str = "INFO", json: bool = False) -> None:
    """Send structlog and the standard library to stderr in one shape."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    last: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if json
        else [
            structlog.dev.ConsoleRenderer(
                colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    handler.addFilter(Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("httpx", "httpcore", "uvicorn.access", "uvicorn.error", "nats.aio.client", "opentelemetry"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service_id)
