"""Traces in the JSON of Jaeger's query service, so that Grafana's Jaeger data source and jaeger-ui read them.

Shapes follow jaeger-ui's `model/json` (TraceResponse, Span, Process, KeyValue): times and durations in microseconds.
OTLP fields are translated as OpenTelemetry's "OTLP to Jaeger" mapping asks: kind, status and scope become tags.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from services.console.spans import Attributes, AttributeValue, Resource, Span
from services.console.trace_store import Pairs, TraceStore, TraceSummary

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d|w)")
_UNIT_US = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "m": 60e6, "h": 3600e6, "d": 86400e6, "w": 604800e6}
_KIND_NAMES = dict(enumerate(("internal", "server", "client", "producer", "consumer"), start=1))  # OTLP's numbers
_STATUS_NAMES: dict[int, str] = {Status.STATUS_CODE_OK: "OK", Status.STATUS_CODE_ERROR: "ERROR"}
MAX_LIMIT = 1500


class BadQuery(ValueError):
    """A search parameter that cannot be read; the message names it."""


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """A search as Jaeger's API takes it. Times are epoch microseconds; None means no bound."""

    service: str = ""
    operation: str = ""
    tags: Mapping[str, str] = msgspec.field(default_factory=dict)
    limit: int = 20
    start_us: int | None = None
    end_us: int | None = None
    min_duration_us: float | None = None
    max_duration_us: float | None = None


def duration_us(text: str, name: str) -> float | None:
    """A Go duration such as '1.2s', '100us' or '1h30m' in microseconds; None for ''. Raises BadQuery."""
    if not text:
        return None
    parts = _DURATION.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        raise BadQuery(f"{name} must be a duration such as 1.2s, 100us or 1h30m, got {text!r}")
    return sum(float(number) * _UNIT_US[unit] for number, unit in parts)


def parse_search(query: Mapping[str, str], now_s: float) -> Search:
    """Query parameters of GET /api/traces. `lookback` counts back from now unless `start` is given. Raises BadQuery."""
    start_us = _whole(query, "start")
    lookback = query.get("lookback", "")
    if start_us is None and lookback and lookback != "custom":
        back_us = duration_us(lookback, "lookback")
        start_us = int(now_s * 1e6 - back_us) if back_us is not None else None
    limit = _whole(query, "limit")
    return Search(
        service=query.get("service", ""),
        operation="" if query.get("operation", "") in ("", "all") else query["operation"],
        tags=_tags(query.get("tags", "")) | _pairs(query.get("tag", "")),
        limit=min(MAX_LIMIT, 20 if limit is None else max(0, limit)),
        start_us=start_us,
        end_us=_whole(query, "end"),
        min_duration_us=duration_us(query.get("minDuration", ""), "minDuration"),
        max_duration_us=duration_us(query.get("maxDuration", ""), "maxDuration"),
    )


def find(store: TraceStore, wanted: Search) -> list[dict[str, Any]]:
    """Traces that match, latest first, at most `wanted.limit`."""
    kept = (store.get(summary.trace_id) or [] for summary in store.newest() if _could_match(summary, wanted))
    found = (spans for spans in kept if any(_matches(span, resource, wanted) for span, resource in spans))
    return [trace_json(spans) for spans in islice(found, wanted.limit)]


def routes(store: TraceStore, clock: Callable[[], float]) -> APIRouter:
    """Jaeger's HTTP JSON API (query service), for Grafana's Jaeger data source and jaeger-ui."""
    router = APIRouter(prefix="/api", tags=["jaeger"])

    @router.get("/services")
    async def services() -> dict[str, Any]:
        """Names of all services seen."""
        names = store.services()
        return envelope(names, total=len(names))

    @router.get("/services/{service}/operations")
    async def operation_names(service: str) -> dict[str, Any]:
        """Span names of one service."""
        names = sorted({op["name"] for op in operations(store, service)})
        return envelope(names, total=len(names))

    @router.get("/operations")
    async def kinds(service: str, spanKind: str = "") -> dict[str, Any]:
        """Span names and kinds of one service."""
        found = [op for op in operations(store, service) if spanKind in ("", op["spanKind"])]
        return envelope(found, total=len(found))

    @router.get("/traces", response_model=None)
    async def traces(request: Request) -> dict[str, Any] | JSONResponse:
        """Search: service, operation, tags, limit, lookback or start and end, minDuration, maxDuration; or traceID."""
        ids = request.query_params.getlist("traceID")[:MAX_LIMIT]
        if ids:
            return envelope([trace_json(spans) for id_ in ids if (spans := store.get(id_))])
        try:
            given = dict(request.query_params) | {"tag": "\n".join(request.query_params.getlist("tag"))}
            wanted = parse_search(given, clock())
        except BadQuery as why:
            return refusal(400, str(why))
        return envelope(find(store, wanted))

    @router.get("/traces/{trace_id}", response_model=None)
    async def one(trace_id: str) -> dict[str, Any] | JSONResponse:
        """One trace, as a list of one."""
        spans = store.get(trace_id)
        if not spans:
            return refusal(404, "trace not found")
        return envelope([trace_json(spans)])

    @router.get("/dependencies", response_model=None)
    async def calls(request: Request) -> dict[str, Any] | JSONResponse:
        """Calls between services. endTs and lookback are milliseconds, as Jaeger has it."""
        query = request.query_params
        end, back = query.get("endTs", ""), query.get("lookback", "86400000")
        if not (end == "" or end.isdecimal()) or not back.isdecimal():
            return refusal(400, "endTs and lookback must be milliseconds")
        end_us = int(end) * 1000 if end else clock() * 1e6
        return envelope(dependencies(store, end_us - int(back) * 1000, end_us))

    return router


def envelope(data: object, *, total: int = 0) -> dict[str, Any]:
    """The wrapper of each answer."""
    return {"data": data, "total": total, "limit": 0, "offset": 0, "errors": None}


def refusal(status: int, message: str) -> JSONResponse:
    """The wrapper of a refusal."""
    return JSONResponse(envelope(None) | {"errors": [{"code": status, "msg": message}]}, status_code=status)


def operations(store: TraceStore, service: str) -> list[dict[str, str]]:
    """Distinct (name, kind) of one service's spans in the traces kept, sorted."""
    seen = {
        (span.name, _KIND_NAMES.get(span.kind, ""))
        for summary in store.newest()
        if service in summary.services
        for span, resource in store.get(summary.trace_id) or ()
        if resource.service == service
    }
    return [{"name": name, "spanKind": kind} for name, kind in sorted(seen)]


def dependencies(store: TraceStore, start_us: float, end_us: float) -> list[dict[str, Any]]:
    """Calls between services, counted over the traces that overlap the window."""
    calls = Counter[tuple[str, str]]()
    for summary in store.newest():
        if summary.end_ns / 1000 < start_us or summary.start_ns / 1000 > end_us or len(summary.services) < 2:
            continue
        spans = store.get(summary.trace_id) or []
        service_of = {span.span_id: resource.service for span, resource in spans}
        for span, resource in spans:
            parent = service_of.get(span.parent_id)
            if parent and parent != resource.service:
                calls[parent, resource.service] += 1
    return [{"parent": p, "child": c, "callCount": count} for (p, c), count in sorted(calls.items())]


def trace_json(spans: Pairs) -> dict[str, Any]:
    """One trace of at least one span. Each distinct resource becomes a process p1, p2, ..."""
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


def _could_match(summary: TraceSummary, search: Search) -> bool:
    """Cheap look at the summary before any span is decoded."""
    return (
        (not search.service or search.service in summary.services)
        and (search.start_us is None or summary.end_ns / 1000 >= search.start_us)
        and (search.end_us is None or summary.start_ns / 1000 <= search.end_us)
    )


def _matches(span: Span, resource: Resource, search: Search) -> bool:
    took_us = (span.end_ns - span.start_ns) / 1000
    tags = {**dict(resource.attributes), **dict(_tag_pairs(span))} if search.tags else {}
    return (
        (not search.service or resource.service == search.service)
        and (not search.operation or span.name == search.operation)
        and (search.min_duration_us is None or took_us >= search.min_duration_us)
        and (search.max_duration_us is None or took_us <= search.max_duration_us)
        and all(key in tags and _text(tags[key]) == value for key, value in search.tags.items())
    )


def _text(value: AttributeValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"-?\d{1,19}", text):
        raise BadQuery(f"{name} must be a whole number, got {text!r}")
    return int(text)


def _pairs(text: str) -> dict[str, str]:
    """Jaeger's repeated `tag=key:value`, as lines."""
    found = {}
    for line in filter(None, text.split("\n")):
        key, colon, value = line.partition(":")
        if not colon:
            raise BadQuery(f"tag must be key:value, got {line!r}")
        found[key] = value
    return found


def _tags(text: str) -> dict[str, str]:
    """Jaeger's `tags`: a JSON object of strings; numbers and booleans are taken too."""
    if not text:
        return {}
    try:
        tags = msgspec.json.decode(text, type=dict[str, str | int | float | bool])
    except msgspec.MsgspecError as why:
        raise BadQuery(f"tags must be a JSON object of strings: {why}") from why
    return {key: _text(value) for key, value in tags.items()}
