"""Reading traces: Jaeger's query API under /api, the page's own shapes under /api/v1."""

import time
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from glowplug.domain.errors import NotFound
from services.console import jaeger
from services.console.trace_disk import TraceDisk
from services.console.trace_store import TraceStore, TraceSummary
from services.console.waterfall import waterfall

MAX_LINES = 500
_encode = msgspec.json.Encoder().encode


class TracePage(msgspec.Struct, frozen=True):
    """Summaries, latest arrival first, and how full the store is.

    `disk`: "memory" (they end with the console), "kept" (they survive it), or why the disk takes none now.
    """

    traces: list[TraceSummary]
    num_kept: int
    num_bytes: int
    num_evicted: int
    disk: str


def json_response(value: object) -> Response:
    """A msgspec value as JSON that no cache keeps."""
    return Response(_encode(value), media_type="application/json", headers={"Cache-Control": "no-store"})


def own_routes(store: TraceStore, disk: TraceDisk | None = None) -> APIRouter:
    """What the page and the command line read."""
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
                "memory" if disk is None else disk.problem or "kept",
            )
        )

    @router.get("/traces/{trace_id}")
    async def one(trace_id: str) -> Response:
        """The waterfall of one trace."""
        return _waterfall(store, trace_id, f"trace {trace_id[:64]} is not here (it may have left the ring)")

    @router.get("/requests/{request_id}/trace")
    async def of_request(request_id: str) -> Response:
        """The waterfall of the trace one request left."""
        missing = f"no trace of request {request_id[:128]}: not sampled, not exported yet, or gone from the ring"
        return _waterfall(store, store.trace_of_request(request_id) or "", missing)

    return router


def jaeger_routes(store: TraceStore, clock: Callable[[], float] = time.time) -> APIRouter:
    """Jaeger's HTTP JSON API (query service), for Grafana's Jaeger data source and jaeger-ui."""
    router = APIRouter(prefix="/api", tags=["jaeger"])

    @router.get("/services")
    async def services() -> dict[str, Any]:
        """Names of all services seen."""
        names = store.services()
        return jaeger.envelope(names, total=len(names))

    @router.get("/services/{service}/operations")
    async def operation_names(service: str) -> dict[str, Any]:
        """Span names of one service."""
        names = sorted({op["name"] for op in jaeger.operations(store, service)})
        return jaeger.envelope(names, total=len(names))

    @router.get("/operations")
    async def operations(service: str, spanKind: str = "") -> dict[str, Any]:
        """Span names and kinds of one service."""
        found = [op for op in jaeger.operations(store, service) if spanKind in ("", op["spanKind"])]
        return jaeger.envelope(found, total=len(found))

    @router.get("/traces", response_model=None)
    async def search(request: Request) -> dict[str, Any] | JSONResponse:
        """Search: service, operation, tags, limit, lookback or start and end, minDuration, maxDuration; or traceID."""
        ids = request.query_params.getlist("traceID")[: jaeger.MAX_LIMIT]
        if ids:
            return jaeger.envelope([jaeger.trace_json(spans) for id_ in ids if (spans := store.get(id_))])
        try:
            given = dict(request.query_params) | {"tag": "\n".join(request.query_params.getlist("tag"))}
            wanted = jaeger.parse_search(given, clock())
        except jaeger.BadQuery as why:
            return JSONResponse(jaeger.error(400, str(why)), status_code=400)
        return jaeger.envelope(jaeger.find(store, wanted))

    @router.get("/traces/{trace_id}", response_model=None)
    async def one(trace_id: str) -> dict[str, Any] | JSONResponse:
        """One trace, as a list of one."""
        spans = store.get(trace_id)
        if not spans:
            return JSONResponse(jaeger.error(404, "trace not found"), status_code=404)
        return jaeger.envelope([jaeger.trace_json(spans)])

    @router.get("/dependencies", response_model=None)
    async def dependencies(request: Request) -> dict[str, Any] | JSONResponse:
        """Calls between services. endTs and lookback are milliseconds, as Jaeger has it."""
        query = request.query_params
        end, back = query.get("endTs", ""), query.get("lookback", "86400000")
        if not (end == "" or end.isdecimal()) or not back.isdecimal():
            return JSONResponse(jaeger.error(400, "endTs and lookback must be milliseconds"), status_code=400)
        end_us = int(end) * 1000 if end else clock() * 1e6
        return jaeger.envelope(jaeger.dependencies(store, end_us - int(back) * 1000, end_us))

    return router


def _latest(store: TraceStore, limit: int, wanted: str) -> list[TraceSummary]:
    lines: list[TraceSummary] = []
    for line in store.newest():
        if len(lines) >= limit:
            break
        if not wanted or any(wanted in text.lower() for text in _words(line)):
            lines.append(line)
    return lines


def _words(line: TraceSummary) -> tuple[str, ...]:
    return (line.trace_id, line.name, line.model, *line.services, *line.request_ids)


def _waterfall(store: TraceStore, trace_id: str, missing: str) -> Response:
    summary, spans = store.summary(trace_id), store.get(trace_id)
    if not summary or not spans:
        raise NotFound(missing)
    return json_response(waterfall(summary, spans))
