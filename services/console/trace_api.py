"""Traces for the page: the latest, and the waterfall of one, in tree order."""

import itertools
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response

from glowplug.domain.errors import NotFound
from glowplug.domain.instance import PhaseName
from glowplug.services.console.records import json_response
from glowplug.services.console.stories import Stories, TraceSummary
from glowplug.services.console.story import FIRST_TOKEN, GENERATE, HOLD, REQUEST, Attributes, Span, Told, tree
from glowplug.telemetry import semconv

# The time of one request: queue, decide, fetch, launch, load, warmup, prefill, decode. Stages overlap, so each has its
# duration and its own share. Shares partition the request: of concurrent stages, the last to end has the moment, as the
# one waited for.
QUEUE, PREFILL, DECODE, ANSWER, OTHER = "queue", "prefill", "decode", "answer", "other"
COLD = tuple(phase.value for phase in PhaseName)
ORDER = (QUEUE, *COLD, PREFILL, DECODE, ANSWER, OTHER)
MAX_STRETCHES = 256
_Stretch = tuple[str, float, float]  # stage, from, to (epoch seconds)


class TraceStage(msgspec.Struct, frozen=True):
    """`own_s`: share of the whole; `seconds`: duration."""

    name: str
    seconds: float
    own_s: float


def stages(rows: Sequence[Span]) -> list[TraceStage]:
    """Return the stages of a trace's first request, in order; empty without one.

    Uncovered time is "other": the router, the network, missing events."""
    request = min((r for r in rows if r.name == REQUEST), key=lambda r: (r.started_at, r.span_id), default=None)
    if request is None or request.ended_at <= request.started_at:
        return []
    begin, end = request.started_at, request.ended_at
    phases = ((row.phase, row.started_at, row.ended_at) for row in rows if row.phase in COLD)
    inside = [(name, max(a, begin), min(b, end)) for name, a, b in (*_stretches(rows, request), *phases)]
    inside = [stretch for stretch in inside if stretch[1] < stretch[2]][:MAX_STRETCHES]
    own = _partition(inside, begin, end)
    return [
        TraceStage(name, _covered(inside, name) if name != OTHER else own[OTHER], own.get(name, 0.0))
        for name in ORDER
        if name in own or any(stretch[0] == name for stretch in inside)
    ]


def _stretches(rows: Sequence[Span], request: Span) -> Iterator[_Stretch]:
    """Yield queue, prefill and decode, or "answer" for both if the first token was not seen."""
    for row in (row for row in rows if row.parent_id == request.span_id):
        if row.name == HOLD:
            yield (QUEUE, row.started_at, row.ended_at)
        elif row.name == GENERATE:
            first = next((mark.at for mark in row.marks if mark.name == FIRST_TOKEN), 0.0)
            if first:
                yield (PREFILL, row.started_at, first)
            yield (DECODE if first else ANSWER, first or row.started_at, row.ended_at)


def _partition(stretches: Sequence[_Stretch], begin: float, end: float) -> dict[str, float]:
    """Return each stage's own seconds. The queue yields to the stage that holds the request there."""
    cuts = sorted({begin, end, *(at for _, a, b in stretches for at in (a, b))})
    own: dict[str, float] = {}
    for a, b in itertools.pairwise(cuts):
        here = [s for s in stretches if s[1] <= a and s[2] >= b]
        name = max(here, key=_waited_for)[0] if here else OTHER
        own[name] = own.get(name, 0.0) + b - a
    return own


def _waited_for(stretch: _Stretch) -> tuple[bool, float, int]:
    name, _, end = stretch
    return (name != QUEUE, end, ORDER.index(name) if name in ORDER else 0)


def _covered(stretches: Sequence[_Stretch], name: str) -> float:
    total = reached = 0.0
    for _, a, b in sorted(s for s in stretches if s[0] == name):
        total += max(0, b - max(a, reached))
        reached = max(reached, b)
    return total


MAX_LINES = 500


class Point(msgspec.Struct, frozen=True):
    """`offset_s`: from the start of the trace."""

    name: str
    offset_s: float
    attributes: Attributes


class DrawnRow(msgspec.Struct, frozen=True):
    span_id: str
    parent_id: str  # "": a top row
    depth: int
    num_children: int
    name: str
    service: str
    process: str
    kind: str
    offset_s: float
    duration_s: float
    error: str
    phase: str
    attributes: Attributes
    events: list[Point]


class PhaseBar(msgspec.Struct, frozen=True):
    """`predicted_s`: 0 without a prediction."""

    name: str
    span_id: str
    offset_s: float
    duration_s: float
    predicted_s: float


class Waterfall(TraceSummary, frozen=True, kw_only=True):
    phases: list[PhaseBar]
    stages: list[TraceStage]
    rows: list[DrawnRow]


def waterfall(summary: TraceSummary, rows: Sequence[Span]) -> Waterfall:
    """Return rows depth first, siblings by start; services in the order of the rows."""
    drawn = [_drawn(row, depth, num_children, summary.start_at) for row, depth, num_children in tree(rows)]
    return Waterfall(
        **msgspec.structs.asdict(summary) | {"services": tuple(dict.fromkeys(row.service for row in drawn))},
        phases=[_phase(row) for row in sorted(drawn, key=_by_stage) if row.phase],
        stages=stages(rows),
        rows=drawn,
    )


def _by_stage(row: DrawnRow) -> tuple[float, int]:
    return (row.offset_s, COLD.index(row.phase) if row.phase in COLD else len(COLD))


def _drawn(row: Span, depth: int, num_children: int, origin: float) -> DrawnRow:
    return DrawnRow(
        span_id=row.span_id,
        parent_id=row.parent_id if depth else "",
        depth=depth,
        num_children=num_children,
        name=row.name,
        service=row.service,
        process=row.process,
        kind=row.kind,
        offset_s=row.started_at - origin,
        duration_s=row.ended_at - row.started_at,
        error=row.error,
        phase=row.phase,
        attributes=row.attributes,
        events=[Point(mark.name, mark.at - origin, mark.attributes) for mark in row.marks],
    )


def _phase(row: DrawnRow) -> PhaseBar:
    predicted = row.attributes.get(semconv.ATTR_PREDICTED_SECONDS, 0.0)
    return PhaseBar(row.phase, row.span_id, row.offset_s, row.duration_s, float(predicted))


class TracePage(msgspec.Struct, frozen=True):
    traces: list[TraceSummary]
    num_kept: int
    num_evicted: int


def routes(stories: Stories) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["traces"])

    @router.get("/traces")
    async def latest(limit: int = Query(100, ge=1, le=MAX_LINES), q: str = Query("", max_length=200)) -> Response:
        """Summaries of the latest traces; `q` looks in names, models, services and ids."""
        found = _latest(stories, limit, q.lower().strip())
        return json_response(TracePage(found, len(stories), stories.num_evicted))

    @router.get("/traces/{trace_id}")
    async def one(trace_id: str) -> Response:
        """The waterfall of one trace."""
        missing = f"the console has no trace {trace_id[:64]}: it keeps the latest"
        return _waterfall(stories, stories.get(trace_id), missing)

    @router.get("/requests/{request_id}/trace")
    async def of_request(request_id: str) -> Response:
        """The waterfall of one request that has ended."""
        missing = f"no trace of request {request_id[:128]}: it is not over, or older than those kept"
        return _waterfall(stories, stories.of_request(request_id), missing)

    return router


def _latest(stories: Stories, limit: int, wanted: str) -> list[TraceSummary]:
    matching = (line for line in stories.newest() if any(wanted in text.lower() for text in _texts(line)))
    return list(islice(matching, limit))


def _texts(line: TraceSummary) -> tuple[str, ...]:
    return (line.trace_id, line.name, line.model, *line.services, *line.request_ids)


def _waterfall(stories: Stories, told: Told | None, missing: str) -> Response:
    summary = stories.summary(told) if told is not None else None
    if told is None or summary is None:
        raise NotFound(missing)
    return json_response(waterfall(summary, stories.rows(told)))
