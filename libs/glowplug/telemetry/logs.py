"""Logs: one line per event, JSON or for people, with trace and request ids; never a prompt."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from glowplug.telemetry.tracing import is_sampled


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
