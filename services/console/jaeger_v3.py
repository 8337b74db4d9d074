"""Jaeger's stable read API, /api/v3: the same traces as OTLP JSON (TracesData), ids in hex, 64-bit numbers as strings.

After Jaeger's `api_v3/query_service.proto` (GetTrace, FindTraces, GetServices, GetOperations) over HTTP. It is what
newer readers use; the older JSON of /api stays beside it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from services.console import jaeger
from services.console.spans import Attributes, AttributeValue, Resource, Span
from services.console.trace_store import TraceStore

SEARCH_DEPTH = 100  # traces, when the query does not say


def routes(store: TraceStore, clock: Callable[[], float] = time.time) -> APIRouter:
    router = APIRouter(prefix="/api/v3", tags=["jaeger"])

    @router.get("/services")
    async def services() -> dict[str, Any]:
        """Names of all services seen."""
        return {"services": store.services()}

    @router.get("/operations")
    async def operations(service: str, span_kind: str = "", spanKind: str = "") -> dict[str, Any]:
        """Span names and kinds of one service."""
        kind = (span_kind or spanKind).lower().removeprefix("span_kind_")
        return {"operations": [op for op in jaeger.operations(store, service) if kind in ("", op["spanKind"])]}

    @router.get("/traces", response_model=None)
    async def find(request: Request) -> dict[str, Any] | JSONResponse:
        """Search: query.service_name, operation_name, start_time_min and _max (RFC 3339), duration_min and _max (Go
        durations), search_depth, attributes."""
        try:
            wanted = read_query(dict(request.query_params), clock())
        except jaeger.BadQuery as why:
            return _refused(400, 3, str(why))
        return result(pair for spans in jaeger.search(store, wanted) for pair in spans)

    @router.get("/traces/{trace_id}", response_model=None)
    async def one(trace_id: str) -> dict[str, Any] | JSONResponse:
        """One trace."""
        spans = store.get(trace_id)
        return result(spans) if spans else _refused(404, 5, "trace not found")

    return router


def read_query(query: Mapping[str, str], now_s: float) -> jaeger.Search:
    """The parameters of GET /api/v3/traces. Raises jaeger.BadQuery."""
    given = {name.removeprefix("query."): value for name, value in query.items()}
    depth = given.get("search_depth") or given.get("num_traces") or str(SEARCH_DEPTH)
    if not depth.isdecimal():
        raise jaeger.BadQuery(f"search_depth must be a whole number, got {depth!r}")
    plain = {"tags": given.get("attributes", ""), "limit": depth}
    plain |= {"service": given.get("service_name", ""), "operation": given.get("operation_name", "")}
    plain |= {"minDuration": given.get("duration_min", ""), "maxDuration": given.get("duration_max", "")}
    for name, ours in (("start_time_min", "start"), ("start_time_max", "end")):
        if text := given.get(name, ""):
            plain[ours] = str(_epoch_us(text, name))
    return jaeger.parse_search(plain, now_s)


def result(pairs: Iterable[tuple[Span, Resource]]) -> dict[str, Any]:
    """`{"result": TracesData}`: spans by resource, then by scope."""
    by_resource: dict[Resource, dict[str, list[Span]]] = {}
    for span, resource in pairs:
        by_resource.setdefault(resource, {}).setdefault(span.scope, []).append(span)
    return {
        "result": {
            "resourceSpans": [
                {
                    "resource": {
                        "attributes": key_values((("service.name", resource.service), *resource.attributes)),
                    },
                    "scopeSpans": [
                        {"scope": {"name": scope} if scope else {}, "spans": [span_json(span) for span in spans]}
                        for scope, spans in scopes.items()
                    ],
                }
                for resource, scopes in by_resource.items()
            ]
        }
    }


def span_json(span: Span) -> dict[str, Any]:
    """One span as OTLP JSON; what is empty is left out, as protobuf's JSON does."""
    found: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": key_values(span.attributes),
        "events": [
            {"timeUnixNano": str(event.time_ns), "name": event.name, "attributes": key_values(event.attributes)}
            for event in span.events
        ],
        "links": [{"traceId": link.trace_id, "spanId": link.span_id} for link in span.links],
        "status": {"code": span.status, "message": span.status_message} if span.status else {},
    }
    return {name: value for name, value in found.items() if value not in ("", []) or name == "status"}


def key_values(attributes: Attributes) -> list[dict[str, Any]]:
    """Attributes as OTLP's KeyValue list."""
    return [{"key": key, "value": _any_value(value)} for key, value in attributes]


def _any_value(value: AttributeValue) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def _epoch_us(text: str, name: str) -> int:
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e6)
    except (ValueError, OverflowError) as error:
        raise jaeger.BadQuery(f"{name} must be a moment such as 2026-01-31T12:00:00Z, got {text!r}") from error


def _refused(status: int, code: int, message: str) -> JSONResponse:
    """gRPC-gateway's error body; `code` is gRPC's."""
    return JSONResponse({"error": {"grpcCode": code, "httpCode": status, "message": message}}, status_code=status)
