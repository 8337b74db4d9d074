"""Traces: W3C traceparent in and out, spans with explicit times, OTLP/HTTP export."""

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
QUEUE_SPANS = 2048  # waiting for the exporter; OTEL_BSP_MAX_QUEUE_SIZE sets another bound
NANO = 1_000_000_000
_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
Attributes = Mapping[str, str | float | int | bool]


def parse_traceparent(text: str) -> SpanContext | None:
    """The remote context in a W3C traceparent header, or None when it is malformed or all zero.

    Version 00 is exactly four lower-case fields; a later version may carry more after them.
    """
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


@dataclass
class SpanHandle:
    """An open span. Set `traceparent` on what the block causes; add attributes until it ends."""

    traceparent: str
    attributes: dict[str, str | float | int | bool] = field(default_factory=dict)
    error: str = ""


@dataclass(slots=True)
class SpanCounts:
    """Numbers of spans that the receiver took, and that it never got: refused, unreachable, or pushed out of a full
    queue."""

    num_exported: int = 0
    num_dropped: int = 0


class _CountingExporter(SpanExporter):
    """Pass spans on to the exporter that `make` gives, and count whether they were taken. It is made for the first
    spans: its libraries take 0.2 s of a core, and a process of an idle node never sends any."""

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
    """Count the spans pushed out of the queue as dropped: one that ends while the queue is full pushes the oldest
    out."""

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
    """One service's tracer. Without an endpoint, spans are made and dropped; contexts are still passed on.

    `counts` may be shared by tracers whose spans are counted together.
    """

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
        """Load what sends spans now and not with the first of them: for a process that must not pause then."""
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
        """Record a finished span with explicit times (epoch seconds), child of `traceparent`; returns its own
        traceparent."""
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
        """Begin a span at `started_at` (epoch seconds), or now; the caller ends it."""
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
        """Open a span around a block. An exception marks the span as failed and propagates."""
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
        """Export the remaining spans, within two seconds."""
        self._provider.force_flush(2000)
        self._provider.shutdown()


def _to_endpoint(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT_S)
