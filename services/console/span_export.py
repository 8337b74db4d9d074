"""Send the rows of sampled stories as OpenTelemetry spans to OTEL_EXPORTER_OTLP_ENDPOINT, each once.

Only the console does so, since only it receives all parts of a story. While it is down no spans are sent."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SpanEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from glowplug import __version__
from glowplug.domain.address import is_loopback
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.records import Newest
from glowplug.services.console.stories import Stories
from glowplug.services.console.story import Span, Told

EVERY_S: Final = 0.5
SETTLE_S: Final = 1.0  # from a story's first change until it is sent: its parts come on several subjects
MAX_WAITING: Final = 2048  # stories
MAX_BATCH: Final = 512
TIMEOUT_S: Final = 3
_KINDS: Final = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_SCOPE: Final = InstrumentationScope("glowplug", __version__)
_NANO: Final = 1_000_000_000


class SpanExport:
    """`stories` tells it of changes. Rows that ended before it began are left out: an earlier process has sent them."""

    def __init__(
        self, stories: Stories, exporter: SpanExporter, metrics: ConsoleMetrics, clock: Callable[[], float]
    ) -> None:
        self._stories, self._exporter, self._metrics, self._clock = stories, exporter, metrics, clock
        self._since = clock()
        self._waiting: dict[str, tuple[float, Told]] = {}  # by trace id: changed at
        self._sent: Newest[str, set[str]] = Newest(2 * MAX_WAITING)
        stories.on_change = self.changed

    def changed(self, told: Told) -> None:
        if not told.is_sampled or told.trace_id in self._waiting:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting[told.trace_id] = (self._clock(), told)
        else:
            self._metrics.spans_dropped.inc()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.flush(self._clock() - SETTLE_S)

    async def flush(self, until: float) -> None:
        """Send the stories that changed before `until`."""
        due = [told for at, told in self._waiting.values() if at <= until]
        for told in due:
            del self._waiting[told.trace_id]
        spans = [span for told in due for span in self._unsent(told)]
        for at in range(0, len(spans), MAX_BATCH):
            batch = spans[at : at + MAX_BATCH]
            is_taken = await asyncio.to_thread(self._exporter.export, batch) is SpanExportResult.SUCCESS
            (self._metrics.spans_exported if is_taken else self._metrics.spans_dropped).inc(len(batch))

    async def close(self) -> None:
        await self.flush(self._clock())
        await asyncio.to_thread(self._exporter.shutdown)

    def _unsent(self, told: Told) -> Iterator[ReadableSpan]:
        sent = self._sent.get(told.trace_id) or set()
        self._sent.put(told.trace_id, sent)
        for row in self._stories.rows(told):
            if row.span_id not in sent and row.ended_at >= self._since:
                sent.add(row.span_id)
                yield span_of(row, told.trace_id)


def span_of(row: Span, trace_id: str) -> ReadableSpan:
    resource = {"service.name": row.service, "service.instance.id": row.process, "service.version": __version__}
    return ReadableSpan(
        name=row.name,
        context=_context(trace_id, row.span_id),
        parent=_context(trace_id, row.parent_id) if row.parent_id else None,
        resource=Resource(resource),
        attributes=row.attributes,
        events=[SpanEvent(mark.name, mark.attributes, int(mark.at * _NANO)) for mark in row.marks],
        kind=_KINDS.get(row.kind, SpanKind.INTERNAL),
        instrumentation_scope=_SCOPE,
        status=Status(StatusCode.ERROR, row.error) if row.error else Status(),
        start_time=int(row.started_at * _NANO),
        end_time=int(max(row.started_at, row.ended_at) * _NANO),
    )


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def to_endpoint(endpoint: str) -> SpanExporter:
    """A proxy of the environment is for other machines than this one."""
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    session = requests.Session()
    session.trust_env = not is_loopback(urlsplit(endpoint).hostname or "")
    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=TIMEOUT_S, session=session)
