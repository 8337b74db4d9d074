"""Trace: W3C traceparent in and out, spans with explicit times, OTLP/HTTP export."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from glowplug import __version__

EXPORT_DELAY_MS = 500
EXPORT_TIMEOUT_S = 3
QUEUE_SPANS = 2048  # OTEL_BSP_MAX_QUEUE_SIZE overrides
NANO = 1_000_000_000
_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
Attributes = Mapping[str, str | float | int | bool]


def parse_traceparent(text: str) -> SpanContext | None:
    """Parse a W3C traceparent header; None if malformed or all zero. Version 00 has four lower-case fields, later ones
    may have more."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    context = SpanContext(int(match["trace"], 16), int(match["span"], 16), True, TraceFlags(int(match["flags"], 16)))
    return context if context.is_valid else None


def format_traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def is_sampled(traceparent: str) -> bool:
    context = parse_traceparent(traceparent)
    return bool(context and context.trace_flags.sampled)


def trace_id_of(traceparent: str) -> str:
    """ "" unless sampled."""
    context = parse_traceparent(traceparent)
    return f"{context.trace_id:032x}" if context and context.trace_flags.sampled else ""


@dataclass
class SpanHandle:
    """An open span. Pass on `traceparent`; attributes may be added until its end."""

    traceparent: str
    attributes: dict[str, str | float | int | bool] = field(default_factory=dict)
    error: str = ""


@dataclass(slots=True)
class SpanCounts:
    """Spans taken by the receiver, and lost: refused, unreachable, or pushed out of a full queue."""

    num_exported: int = 0
    num_dropped: int = 0


class _CountingExporter(SpanExporter):
    """Count taken and lost spans. The exporter is made with the first spans: its libraries cost 0.2 s of a core, which
    idle nodes never need."""

    def __init__(self, make: Callable[[], SpanExporter], counts: SpanCounts) -> None:
        self._make, self._counts = make, counts
        self._inner: SpanExporter | None = None
        self.num_taken = 0

    def inner(self) -> SpanExporter:
        if self._inner is None:
            self._inner = self._make()
        return self._inner

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        try:
            result = self.inner().export(spans)
        except BaseException:
            self._counts.num_dropped += len(spans)
            raise
        if result is SpanExportResult.SUCCESS:
            self._counts.num_exported += len(spans)
        else:
            self._counts.num_dropped += len(spans)
        return result

    def shutdown(self) -> None:
        if self._inner is not None:
            self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner is None or self._inner.force_flush(timeout_millis)


class _CountingProcessor(BatchSpanProcessor):
    """Count spans pushed out of a full queue, which drops the oldest."""

    def __init__(self, exporter: _CountingExporter, counts: SpanCounts) -> None:
        self._limit = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or QUEUE_SPANS)
        self._counts, self._counting = counts, exporter
        self._num_put = 0
        super().__init__(exporter, max_queue_size=self._limit, schedule_delay_millis=EXPORT_DELAY_MS)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            if self._num_put - self._counting.num_taken >= self._limit:
                self._counts.num_dropped += 1
            else:
                self._num_put += 1
        super().on_end(span)


class Tracing:
    """One service's tracer. Without an endpoint it only passes on contexts. Tracers may share `counts`."""

    def __init__(
        self,
        service: str,
        service_id: str,
        endpoint: str = "",
        exporter: SpanExporter | None = None,
        counts: SpanCounts | None = None,
    ) -> None:
        self.counts = counts or SpanCounts()
        resource = Resource.create(
            {
                "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"glowplug-{service}",
                "service.instance.id": service_id,
                "service.version": __version__,
            }
        )
        self._provider = TracerProvider(resource=resource)  # sampler: OTEL_TRACES_SAMPLER[_ARG], parentbased by default
        self._exporter: _CountingExporter | None = None
        if exporter is not None or endpoint:
            make = (lambda: exporter) if exporter is not None else (lambda: _to_endpoint(endpoint))
            self._exporter = _CountingExporter(make, self.counts)
            self._provider.add_span_processor(_CountingProcessor(self._exporter, self.counts))
        self._tracer = self._provider.get_tracer("glowplug", __version__)

    def load(self) -> None:
        """Load the exporter now, for a process that must not pause at its first span."""
        if self._exporter is not None:
            self._exporter.inner()

    def record(
        self,
        name: str,
        traceparent: str,
        started_at: float,
        ended_at: float,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
    ) -> str:
        """Record a finished span (epoch seconds) under `traceparent`; return its own traceparent."""
        span = self.begin(name, traceparent, started_at, attributes, kind=kind)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(int(ended_at * NANO))
        return format_traceparent(span.get_span_context())

    def begin(
        self,
        name: str,
        traceparent: str,
        started_at: float | None = None,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> trace.Span:
        """`started_at`: epoch seconds, default now. The caller ends the span."""
        parent = parse_traceparent(traceparent) if traceparent else None
        context = trace.set_span_in_context(trace.NonRecordingSpan(parent)) if parent else None
        start = int(started_at * NANO) if started_at is not None else None
        return self._tracer.start_span(
            name, context=context, kind=kind, attributes=dict(attributes or {}), links=[], start_time=start
        )

    @contextmanager
    def span(
        self, name: str, traceparent: str, attributes: Attributes | None = None, *, kind: SpanKind = SpanKind.INTERNAL
    ) -> Iterator[SpanHandle]:
        """An exception marks the span as failed and propagates."""
        span = self.begin(name, traceparent, None, attributes, kind=kind)
        handle = SpanHandle(format_traceparent(span.get_span_context()))
        try:
            yield handle
        except BaseException as error:
            handle.error = repr(error)
            raise
        finally:
            span.set_attributes(handle.attributes)
            if handle.error:
                span.set_status(Status(StatusCode.ERROR, handle.error))
            span.end()

    def shutdown(self) -> None:
        """Export remaining spans within two seconds."""
        self._provider.force_flush(2000)
        self._provider.shutdown()


def _to_endpoint(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
