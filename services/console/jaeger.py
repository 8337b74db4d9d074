"""A trace in the JSON of Jaeger's query service, to copy or download for jaeger-ui.

Shapes follow jaeger-ui's `model/json` (TraceResponse, Span, Process, KeyValue): times and durations in microseconds.
OTLP fields follow OpenTelemetry's "OTLP to Jaeger" mapping: kind, status and scope become tags."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from glowplug.services.console.roles import reads_texts
from glowplug.services.console.spans import Attributes, AttributeValue, Resource, Span
from glowplug.services.console.trace_store import Pairs, TraceStore

_KIND_NAMES = dict(enumerate(("internal", "server", "client", "producer", "consumer"), start=1))  # OTLP's numbers
_STATUS_NAMES: dict[int, str] = {Status.STATUS_CODE_OK: "OK", Status.STATUS_CODE_ERROR: "ERROR"}


def routes(store: TraceStore) -> APIRouter:
    router = APIRouter(prefix="/api", tags=["jaeger"])

    @router.get("/traces/{trace_id}", response_model=None)
    async def one(request: Request, trace_id: str) -> dict[str, Any] | JSONResponse:
        """One trace, as a list of one."""
        spans = store.get(trace_id, with_texts=reads_texts(request))
        if not spans:
            return refusal(404, "trace not found")
        return envelope([trace_json(spans)])

    return router


def envelope(data: object) -> dict[str, Any]:
    return {"data": data, "total": 0, "limit": 0, "offset": 0, "errors": None}


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse(envelope(None) | {"errors": [{"code": status, "msg": message}]}, status_code=status)


def trace_json(spans: Pairs) -> dict[str, Any]:
    """Each distinct resource becomes a process p1, p2, ..."""
    names: dict[Resource, str] = {}
    known = {span.span_id for span, _ in spans}
    out = []
    for span, resource in spans:
        process_id = names.setdefault(resource, f"p{len(names) + 1}")
        out.append(_span_json(span, process_id, is_orphan=bool(span.parent_id) and span.parent_id not in known))
    processes = {
        name: {"serviceName": resource.service, "tags": _key_values(resource.attributes)}
        for resource, name in names.items()
    }
    return {"traceID": spans[0][0].trace_id, "spans": out, "processes": processes, "warnings": None}


def _span_json(span: Span, process_id: str, *, is_orphan: bool) -> dict[str, Any]:
    references = [{"refType": "FOLLOWS_FROM", "traceID": link.trace_id, "spanID": link.span_id} for link in span.links]
    if span.parent_id:
        references.insert(0, {"refType": "CHILD_OF", "traceID": span.trace_id, "spanID": span.parent_id})
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "flags": 1,
        "operationName": span.name,
        "references": references,
        "startTime": span.start_ns // 1000,
        "duration": (span.end_ns - span.start_ns) // 1000,
        "tags": _key_values(_tag_pairs(span)),
        "logs": [
            {"timestamp": event.time_ns // 1000, "fields": _key_values((("event", event.name), *event.attributes))}
            for event in span.events
        ],
        "processID": process_id,
        "warnings": ["parent span is not in this trace"] if is_orphan else None,
    }


def _tag_pairs(span: Span) -> Attributes:
    pairs = list(span.attributes)
    if span.scope:
        pairs.append(("otel.scope.name", span.scope))
    if span.kind in _KIND_NAMES:
        pairs.append(("span.kind", _KIND_NAMES[span.kind]))
    if span.is_error:
        pairs.append(("error", True))
    if span.status in _STATUS_NAMES:
        pairs.append(("otel.status_code", _STATUS_NAMES[span.status]))
    if span.status_message:
        pairs.append(("otel.status_description", span.status_message))
    return tuple(pairs)


def _key_values(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "type": _type(value), "value": value} for key, value in attributes]


def _type(value: AttributeValue) -> str:
    if isinstance(value, bool):
        return "bool"
    return {int: "int64", float: "float64"}.get(type(value), "string")
