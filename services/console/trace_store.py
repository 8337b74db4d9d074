"""The latest traces in a bounded ring of memory: the oldest one leaves when a bound is reached.

Spans are kept encoded (msgpack), so that `num_bytes` is what they really cost and memory stays flat however long
the fleet runs. Bounds: traces, bytes, spans per trace, and a quarter of the bytes for any one trace.
Nothing here touches a clock or a file.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import msgspec

from glowplug.telemetry import semconv
from services.console.spans import Resource, Span

TRACE_OVERHEAD_BYTES: Final = 2048  # dict, summary and ids of one trace, measured with tracemalloc and rounded up
SPAN_OVERHEAD_BYTES: Final = 256  # dict slot, key and bytes header of one span
MAX_REQUEST_IDS: Final = 8  # of one trace: a client may send many requests under its own trace
MAX_REQUEST_ID_CHARS: Final = 128

_encode = msgspec.msgpack.Encoder().encode
_decode_span = msgspec.msgpack.Decoder(Span).decode
_decode_resource = msgspec.msgpack.Decoder(Resource).decode


class TraceSummary(msgspec.Struct):
    """One line about a trace. Times are epoch nanoseconds; `revision` grows with each span that arrives."""

    trace_id: str
    start_ns: int
    end_ns: int
    name: str = ""
    service: str = ""
    model: str = ""
    request_ids: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    num_spans: int = 0
    num_errors: int = 0
    num_dropped: int = 0
    is_cold: bool = False
    is_emulated: bool = False
    has_root: bool = False
    revision: int = 0

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class _Trace:
    __slots__ = ("num_bytes", "resources", "spans", "summary")

    def __init__(self, trace_id: str, span: Span) -> None:
        self.summary = TraceSummary(trace_id, span.start_ns, span.end_ns)
        self.spans: dict[str, tuple[bytes, bytes]] = {}  # span id -> (span, its resource), both encoded
        self.resources: set[bytes] = set()
        self.num_bytes = TRACE_OVERHEAD_BYTES


class Journal(Protocol):
    """Hears what the ring keeps and what leaves it; returns at once."""

    def keep(self, trace_id: str, span_id: str, span: bytes, resource: bytes) -> None: ...

    def forget(self, trace_id: str) -> None: ...


class TraceStore:
    """A ring of traces by first arrival. All lookups are by exact id; `newest` walks from the latest back.

    `journal`, when there is one, hears of every span kept and every trace that left.
    """

    def __init__(self, *, max_traces: int = 2000, max_bytes: int = 32 << 20, max_spans_per_trace: int = 2000) -> None:
        assert max_traces > 0 and max_bytes > 0 and max_spans_per_trace > 0
        self._max_traces = max_traces
        self._max_bytes = max_bytes
        self._max_spans = max_spans_per_trace
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._by_request: dict[str, str] = {}  # request id -> trace id
        self.journal: Journal | None = None
        self.num_bytes = 0
        self.num_spans = 0
        self.num_evicted = 0
        self.num_dropped_spans = 0

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, batch: Iterable[tuple[Span, Resource]]) -> list[TraceSummary]:
        """Keep these spans; summaries of the traces they changed. A span that is sent again is kept once."""
        touched: dict[str, TraceSummary] = {}
        for span, resource in batch:
            trace = self._traces.get(span.trace_id)
            if trace is None:
                trace = self._traces[span.trace_id] = _Trace(span.trace_id, span)
                self.num_bytes += trace.num_bytes
            if self._insert(trace, span, _encode(resource)):
                self._summarise(trace, span, resource.service)
            touched[span.trace_id] = trace.summary
        self._evict()
        return [summary for trace_id, summary in touched.items() if trace_id in self._traces]

    def restore(self, traces: Iterable[list[tuple[Span, Resource]]], journal: Journal) -> None:
        """Traces of an earlier run, oldest first, and from then on a journal. Those that do not fit leave it too."""
        had = []
        for spans in traces:
            had.append(spans[0][0].trace_id)
            self.add(spans)
        self.num_evicted = self.num_dropped_spans = 0  # what the bounds took was told by the earlier run
        self.journal = journal
        for trace_id in had:
            if trace_id not in self._traces:
                journal.forget(trace_id)

    def get(self, trace_id: str) -> list[tuple[Span, Resource]] | None:
        """Spans of one trace by start time, or None. Short ids are taken as zero-padded, like Jaeger does."""
        trace = self._traces.get(normal_id(trace_id))
        if trace is None:
            return None
        resources = {encoded: _decode_resource(encoded) for encoded in trace.resources}
        pairs = [(_decode_span(span), resources[resource]) for span, resource in trace.spans.values()]
        return sorted(pairs, key=lambda pair: (pair[0].start_ns, -pair[0].end_ns, pair[0].span_id))

    def summary(self, trace_id: str) -> TraceSummary | None:
        trace = self._traces.get(normal_id(trace_id))
        return trace.summary if trace else None

    def trace_of_request(self, request_id: str) -> str | None:
        """The trace whose spans carry this request id."""
        return self._by_request.get(request_id)

    def newest(self) -> Iterator[TraceSummary]:
        """Summaries, latest arrival first."""
        for trace in reversed(self._traces.values()):
            yield trace.summary

    def services(self) -> list[str]:
        """Every service seen in the traces kept, sorted."""
        return sorted({name for trace in self._traces.values() for name in trace.summary.services})

    def _insert(self, trace: _Trace, span: Span, resource: bytes) -> bool:
        if span.span_id in trace.spans:
            return False
        encoded = _encode(span)
        grown = len(encoded) + SPAN_OVERHEAD_BYTES
        if resource not in trace.resources:
            grown += len(resource) + SPAN_OVERHEAD_BYTES
        if len(trace.spans) >= self._max_spans or trace.num_bytes + grown > self._max_bytes // 4:
            trace.summary.num_dropped += 1
            self.num_dropped_spans += 1
            return False
        trace.resources.add(resource)
        trace.spans[span.span_id] = (encoded, resource)
        trace.num_bytes += grown
        self.num_bytes += grown
        self.num_spans += 1
        if self.journal is not None:
            self.journal.keep(trace.summary.trace_id, span.span_id, encoded, resource)
        return True

    def _summarise(self, trace: _Trace, span: Span, service: str) -> None:
        line = trace.summary
        starts_earlier = span.start_ns < line.start_ns
        line.start_ns = min(line.start_ns, span.start_ns)
        line.end_ns = max(line.end_ns, span.end_ns)
        if not span.parent_id or not line.name or (starts_earlier and not line.has_root):
            line.name, line.service = span.name, service
            line.has_root = line.has_root or not span.parent_id
        line.num_spans = len(trace.spans)
        line.num_errors += span.is_error
        line.revision += 1
        if service not in line.services:
            line.services = tuple(sorted((*line.services, service)))
        line.is_cold = line.is_cold or span.attribute(semconv.ATTR_PHASE) is not None
        line.is_emulated = line.is_emulated or span.attribute(semconv.ATTR_EMULATED) is True
        request_id = str(span.attribute(semconv.ATTR_REQUEST_ID) or "")[:MAX_REQUEST_ID_CHARS]
        model = str(span.attribute(semconv.ATTR_MODEL) or "")
        if model and (not line.model or (request_id and not line.request_ids)):
            line.model = model  # a request's own model before those that made room for it
        if request_id and request_id not in line.request_ids and len(line.request_ids) < MAX_REQUEST_IDS:
            line.request_ids = (*line.request_ids, request_id)
            self._by_request[request_id] = line.trace_id

    def _evict(self) -> None:
        while len(self._traces) > self._max_traces or self.num_bytes > self._max_bytes:
            _, trace = self._traces.popitem(last=False)
            self.num_bytes -= trace.num_bytes
            self.num_spans -= len(trace.spans)
            self.num_evicted += 1
            if self.journal is not None:
                self.journal.forget(trace.summary.trace_id)
            for request_id in trace.summary.request_ids:
                if self._by_request.get(request_id) == trace.summary.trace_id:
                    del self._by_request[request_id]


def normal_id(trace_id: str) -> str:
    """A trace id in lower case, padded to 32 characters."""
    return trace_id.strip().lower().rjust(32, "0")
