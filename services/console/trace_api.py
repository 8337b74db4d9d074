"""Traces for the page: the latest, and the waterfall of one.

A waterfall is rows in tree order, each span exactly once. A span without its parent is a marked top row (an orphan);
a ring of parents is cut at its earliest span."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from glowplug.domain.errors import NotFound
from glowplug.domain.instance import PhaseName
from glowplug.services.console.records import json_response
from glowplug.services.console.roles import reads_texts
from glowplug.services.console.spans import AttributeValue, Resource, Span
from glowplug.services.console.trace_store import TraceStore, TraceSummary
from glowplug.telemetry import semconv

REQUEST, HOLD, GENERATE = "router.request", "router.hold", "engine.generate"
# The time of one request: queue, decide, fetch, launch, load, warmup, prefill, decode. Stages overlap, so each has its
# duration and its own share. Shares partition the request: of concurrent stages, the last to end has the moment, as the
# one waited for.

FIRST_TOKEN = "first token"
QUEUE, PREFILL, DECODE, ANSWER, OTHER = "queue", "prefill", "decode", "answer", "other"
COLD = tuple(phase.value for phase in PhaseName)
ORDER = (QUEUE, *COLD, PREFILL, DECODE, ANSWER, OTHER)
MAX_STRETCHES = 256
_Stretch = tuple[str, int, int]  # stage, from, to (epoch nanoseconds)


class Stage(msgspec.Struct, frozen=True):
    """`own_s`: share of the whole; `seconds`: duration."""

    name: str
    seconds: float
    own_s: float


def stages(spans: Sequence[Span], phases: Iterable[tuple[str, int, int]]) -> list[Stage]:
    """Return the stages of a trace's first request, in order; empty without one. `phases`: name, from, to.

    Uncovered time is "other": the router, the network, missing spans."""
    request = min((s for s in spans if s.name == REQUEST), key=lambda s: (s.start_ns, s.span_id), default=None)
    if request is None or request.end_ns <= request.start_ns:
        return []
    begin, end = request.start_ns, request.end_ns
    found = [*_stretches(spans, request), *phases]
    inside = [(name, max(a, begin), min(b, end)) for name, a, b in found]
    inside = [stretch for stretch in inside if stretch[1] < stretch[2]][:MAX_STRETCHES]
    own = _partition(inside, begin, end)
    return [
        Stage(name, _covered(inside, name) if name != OTHER else own[OTHER] / 1e9, own.get(name, 0) / 1e9)
        for name in ORDER
        if name in own or any(stretch[0] == name for stretch in inside)
    ]


def _stretches(spans: Sequence[Span], request: Span) -> Iterator[_Stretch]:
    """Yield queue, prefill and decode, or "answer" for both if the first token was not seen."""
    for span in (span for span in spans if span.parent_id == request.span_id):
        if span.name == HOLD:
            yield (QUEUE, span.start_ns, span.end_ns)
        elif span.name == GENERATE:
            first = next((event.time_ns for event in span.events if event.name == FIRST_TOKEN), 0)
            if first:
                yield (PREFILL, span.start_ns, first)
            yield (DECODE if first else ANSWER, first or span.start_ns, span.end_ns)


def _partition(stretches: Sequence[_Stretch], begin: int, end: int) -> dict[str, int]:
    """Return each stage's own nanoseconds. The queue yields to the stage that holds the request there."""
    cuts = sorted({begin, end, *(at for _, a, b in stretches for at in (a, b))})
    own: dict[str, int] = {}
    for a, b in itertools.pairwise(cuts):
        here = [s for s in stretches if s[1] <= a and s[2] >= b]
        name = max(here, key=_waited_for)[0] if here else OTHER
        own[name] = own.get(name, 0) + b - a
    return own


def _waited_for(stretch: _Stretch) -> tuple[bool, int, int]:
    name, _, end = stretch
    return (name != QUEUE, end, ORDER.index(name) if name in ORDER else 0)


def _covered(stretches: Sequence[_Stretch], name: str) -> float:
    total = reached = 0
    for _, a, b in sorted(s for s in stretches if s[0] == name):
        total += max(0, b - max(a, reached))
        reached = max(reached, b)
    return total / 1e9


MAX_LINES = 500


class Point(msgspec.Struct, frozen=True):
    """`offset_s`: from the start of the trace."""

    name: str
    offset_s: float
    attributes: dict[str, AttributeValue]


class Row(msgspec.Struct, frozen=True):
    span_id: str
    parent_id: str
    depth: int
    num_children: int
    name: str
    service: str
    kind: int
    offset_s: float
    duration_s: float
    is_error: bool
    is_orphan: bool
    status_message: str
    phase: str
    attributes: dict[str, AttributeValue]
    resource: dict[str, AttributeValue]
    events: list[Point]


class PhaseBar(msgspec.Struct, frozen=True):
    """`predicted_s`: 0 without a prediction."""

    name: str
    span_id: str
    offset_s: float
    duration_s: float
    predicted_s: float


class Waterfall(msgspec.Struct, frozen=True):
    """`start_at`: epoch seconds."""

    trace_id: str
    name: str
    service: str
    model: str
    request_ids: tuple[str, ...]
    start_at: float
    duration_s: float
    num_errors: int
    num_orphans: int
    num_dropped: int
    is_emulated: bool
    revision: int
    services: list[str]
    phases: list[PhaseBar]
    stages: list[Stage]
    rows: list[Row]


def waterfall(summary: TraceSummary, spans: Sequence[tuple[Span, Resource]]) -> Waterfall:
    """Return rows depth first, siblings by start. `spans`: by start."""
    known = {span.span_id for span, _ in spans}
    children: dict[str, list[tuple[Span, Resource]]] = {}
    tops: list[tuple[Span, Resource]] = []
    for pair in spans:
        parent = pair[0].parent_id
        if parent in known and parent != pair[0].span_id:
            children.setdefault(parent, []).append(pair)
        else:
            tops.append(pair)
    rows: list[Row] = []
    seen: set[str] = set()
    for top in (*tops, *spans):
        _descend(top, children, summary.start_ns, rows, seen)
    return Waterfall(
        trace_id=summary.trace_id,
        name=summary.name,
        service=summary.service,
        model=summary.model,
        request_ids=summary.request_ids,
        start_at=summary.start_ns / 1e9,
        duration_s=summary.duration_s,
        num_errors=summary.num_errors,
        num_orphans=sum(row.is_orphan for row in rows),
        num_dropped=summary.num_dropped,
        is_emulated=summary.is_emulated,
        revision=summary.revision,
        services=list(dict.fromkeys(row.service for row in rows)),
        phases=[_phase(row) for row in sorted(rows, key=_by_stage) if row.phase],
        stages=stages([span for span, _ in spans], _phases_of(spans)),
        rows=rows,
    )


def _by_stage(row: Row) -> tuple[float, int]:
    return (row.offset_s, COLD.index(row.phase) if row.phase in COLD else len(COLD))


def _phases_of(spans: Sequence[tuple[Span, Resource]]) -> list[tuple[str, int, int]]:
    named = [(str(span.attribute(semconv.ATTR_PHASE) or ""), span.start_ns, span.end_ns) for span, _ in spans]
    return [stretch for stretch in named if stretch[0] in COLD]


def _descend(
    top: tuple[Span, Resource],
    children: dict[str, list[tuple[Span, Resource]]],
    origin_ns: int,
    rows: list[Row],
    seen: set[str],
) -> None:
    stack = [(top, 0)]
    while stack:
        (span, resource), depth = stack.pop()
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        mine = children.get(span.span_id, [])
        rows.append(_row(span, resource, depth, len(mine), origin_ns, is_top=depth == 0))
        stack.extend((child, depth + 1) for child in reversed(mine))


def _row(span: Span, resource: Resource, depth: int, num_children: int, origin_ns: int, *, is_top: bool) -> Row:
    return Row(
        span_id=span.span_id,
        name=span.name,
        kind=span.kind,
        is_error=span.is_error,
        status_message=span.status_message,
        parent_id="" if is_top else span.parent_id,
        depth=depth,
        num_children=num_children,
        service=resource.service,
        offset_s=(span.start_ns - origin_ns) / 1e9,
        duration_s=(span.end_ns - span.start_ns) / 1e9,
        is_orphan=is_top and bool(span.parent_id),
        phase=str(span.attribute(semconv.ATTR_PHASE) or ""),
        attributes=dict(span.attributes),
        resource=dict(resource.attributes),
        events=[Point(e.name, (e.time_ns - origin_ns) / 1e9, dict(e.attributes)) for e in span.events],
    )


def _phase(row: Row) -> PhaseBar:
    predicted = row.attributes.get(semconv.ATTR_PREDICTED_SECONDS, 0.0)
    predicted_s = float(predicted) if isinstance(predicted, int | float) else 0.0
    return PhaseBar(row.phase, row.span_id, row.offset_s, row.duration_s, predicted_s)


class TracePage(msgspec.Struct, frozen=True):
    """`disk`: "memory" (lost with the console), "kept", or why the disk refuses."""

    traces: list[TraceSummary]
    num_kept: int
    num_bytes: int
    num_evicted: int
    disk: str


def routes(store: TraceStore) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["traces"])

    @router.get("/traces")
    async def latest(limit: int = Query(100, ge=1, le=MAX_LINES), q: str = Query("", max_length=200)) -> Response:
        """Summaries of the latest traces; `q` looks in names, models, services and ids."""
        return json_response(
            TracePage(
                _latest(store, limit, q.lower().strip()),
                len(store),
                store.num_bytes,
                store.num_evicted,
                "memory" if store.disk is None else store.disk.problem or "kept",
            )
        )

    @router.get("/traces/{trace_id}")
    async def one(request: Request, trace_id: str) -> Response:
        """The waterfall of one trace."""
        return _waterfall(request, store, trace_id, f"the console has no trace {trace_id[:64]}: it keeps the latest")

    @router.get("/requests/{request_id}/trace")
    async def of_request(request: Request, request_id: str) -> Response:
        """The waterfall of the trace one request left."""
        missing = f"no trace of request {request_id[:128]}: not sampled, not exported yet, or older than those kept"
        return _waterfall(request, store, store.trace_of_request(request_id) or "", missing)

    return router


def _latest(store: TraceStore, limit: int, wanted: str) -> list[TraceSummary]:
    matching = (line for line in store.newest() if any(wanted in text.lower() for text in _texts(line)))
    return list(islice(matching, limit))


def _texts(line: TraceSummary) -> tuple[str, ...]:
    return (line.trace_id, line.name, line.model, *line.services, *line.request_ids)


def _waterfall(request: Request, store: TraceStore, trace_id: str, missing: str) -> Response:
    summary, spans = store.summary(trace_id), store.get(trace_id, with_texts=reads_texts(request))
    if not summary or not spans:
        raise NotFound(missing)
    return json_response(waterfall(summary, spans))
