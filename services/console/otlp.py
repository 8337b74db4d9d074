"""POST /v1/traces, OTLP/HTTP after the OTLP specification 1.x: bounded bodies become spans.

Reads binary protobuf and JSON (ids in hex, 64-bit numbers as strings or numbers), and answers in the sender's
encoding; every refusal is an `OtlpError` with its status."""

import base64
import binascii
import json
import zlib
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from google.rpc import code_pb2, status_pb2  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from glowplug.domain.errors import TooLarge
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.settings import ConsoleSettings
from glowplug.services.console.spans import (
    MAX_EVENTS,
    MAX_LINKS,
    MAX_NAME_CHARS,
    MAX_VALUE_CHARS,
    Attributes,
    AttributeValue,
    Resource,
    Span,
    SpanEvent,
    SpanLink,
    bounded,
    clip,
)
from glowplug.services.console.trace_store import TraceStore, TraceSummary
from glowplug.services.console.upstream import read_chunks

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
_UNSOUND: Final = "span without a 16-byte trace id, an 8-byte span id or a start time"
_MAX_ANY_DEPTH: Final = 8
RETRY_AFTER_S = 1


class OtlpError(Exception):
    """`status`: 400, 413, 415 or 503."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Batch(NamedTuple):
    """Spans of one export with their sender, and the number refused (not `_is_sound`)."""

    spans: tuple[tuple[Span, Resource], ...]
    num_rejected: int


def media_type(content_type: str) -> str:
    """Return PROTOBUF or JSON. Raises OtlpError 415."""
    kind = content_type.split(";", 1)[0].strip().lower()
    if kind not in (PROTOBUF, JSON):
        raise OtlpError(415, f"Content-Type must be {PROTOBUF} or {JSON}, got {kind or 'none'}")
    return kind


def decompress(body: bytes, encoding: str, *, max_bytes: int) -> bytes:
    """Undo Content-Encoding, with at most `max_bytes` in memory.

    Raises OtlpError: 415 unknown encoding, 400 not gzip or cut short, 413 too large once unpacked."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise OtlpError(415, f"Content-Encoding must be gzip or identity, got {encoding}")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        plain = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise OtlpError(400, f"body is not gzip: {error}") from error
    if len(plain) > max_bytes:
        raise OtlpError(413, f"body is larger than {max_bytes} bytes once unpacked")
    if not unpacker.eof:
        raise OtlpError(400, "gzip body ends too early")
    return plain


def decode(body: bytes, kind: str, *, keep_content: bool = False) -> Batch:
    """Raises OtlpError 400 for a body that is no ExportTraceServiceRequest."""
    return _to_batch(_parse_protobuf(body) if kind == PROTOBUF else _parse_json(body), keep_content=keep_content)


def encode_response(batch: Batch, kind: str) -> bytes:
    """`partial_success` is set only if spans were refused (as the specification asks)."""
    response = ExportTraceServiceResponse()
    if batch.num_rejected:
        response.partial_success.rejected_spans = batch.num_rejected
        response.partial_success.error_message = _UNSOUND
    return _encoded(response, kind)


def encode_error(error: OtlpError, kind: str) -> bytes:
    """Return a google.rpc.Status, OTLP/HTTP's error body."""
    code = code_pb2.UNAVAILABLE if error.status == 503 else code_pb2.INVALID_ARGUMENT
    return _encoded(status_pb2.Status(code=code, message=error.message), kind)


def _encoded(answer: Message, kind: str) -> bytes:
    return answer.SerializeToString() if kind == PROTOBUF else json_format.MessageToJson(answer, indent=None).encode()


def _parse_protobuf(body: bytes) -> ExportTraceServiceRequest:
    try:
        return ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise OtlpError(400, "body is not an ExportTraceServiceRequest in protobuf") from error


def _parse_json(body: bytes) -> ExportTraceServiceRequest:
    try:
        tree = json.loads(body)
        if not isinstance(tree, dict):
            raise OtlpError(400, "body is not a JSON object")
        _hex_ids_to_base64(tree)
        return json_format.ParseDict(tree, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.ParseError) as error:
        raise OtlpError(400, f"body is not OTLP JSON: {clip(str(error), 200)}") from error


def _hex_ids_to_base64(tree: dict[str, Any]) -> None:
    """Convert in place: OTLP JSON has ids in hex, protobuf's JSON mapping in base64."""
    for resource_spans in tree.get("resourceSpans") or ():
        for scope_spans in resource_spans.get("scopeSpans") or ():
            for span in scope_spans.get("spans") or ():
                for holder in (span, *(span.get("links") or ())):
                    for key in ("traceId", "spanId", "parentSpanId"):
                        if holder.get(key):
                            holder[key] = base64.b64encode(binascii.unhexlify(holder[key])).decode()


def _to_batch(request: ExportTraceServiceRequest, *, keep_content: bool) -> Batch:
    spans: list[tuple[Span, Resource]] = []
    num_rejected = 0
    for resource_spans in request.resource_spans:
        resource = _resource(resource_spans, keep_content=keep_content)
        for scope_spans in resource_spans.scope_spans:
            scope = clip(scope_spans.scope.name, MAX_NAME_CHARS)
            for wire in scope_spans.spans:
                if _is_sound(wire):
                    spans.append((_span(wire, scope, keep_content=keep_content), resource))
                else:
                    num_rejected += 1
    return Batch(tuple(spans), num_rejected)


def _is_sound(wire: WireSpan) -> bool:
    return (
        len(wire.trace_id) == 16
        and len(wire.span_id) == 8
        and any(wire.trace_id)
        and any(wire.span_id)
        and len(wire.parent_span_id) in (0, 8)
        and 0 < wire.start_time_unix_nano < 1 << 63
        and wire.end_time_unix_nano < 1 << 63
    )


def _resource(resource_spans: ResourceSpans, *, keep_content: bool) -> Resource:
    attributes = _attributes(resource_spans.resource.attributes, keep_content=keep_content)
    service = next((str(value) for key, value in attributes if key == "service.name"), "") or "unknown_service"
    return Resource(service, tuple(pair for pair in attributes if pair[0] != "service.name"))


def _span(wire: WireSpan, scope: str, *, keep_content: bool) -> Span:
    parent = wire.parent_span_id.hex() if any(wire.parent_span_id) else ""
    return Span(
        trace_id=wire.trace_id.hex(),
        span_id=wire.span_id.hex(),
        parent_id=parent,
        name=clip(wire.name, MAX_NAME_CHARS) or "unnamed",
        kind=int(wire.kind),
        start_ns=wire.start_time_unix_nano,
        end_ns=max(wire.start_time_unix_nano, wire.end_time_unix_nano),
        status=int(wire.status.code),
        status_message=clip(wire.status.message, MAX_VALUE_CHARS),
        scope=scope,
        attributes=_attributes(wire.attributes, keep_content=keep_content),
        events=tuple(
            SpanEvent(
                event.time_unix_nano,
                clip(event.name, MAX_NAME_CHARS),
                _attributes(event.attributes, keep_content=keep_content),
            )
            for event in wire.events[:MAX_EVENTS]
        ),
        links=tuple(SpanLink(link.trace_id.hex(), link.span_id.hex()) for link in wire.links[:MAX_LINKS]),
    )


def _attributes(pairs: Any, *, keep_content: bool) -> Attributes:
    return bounded([(pair.key, _plain(pair.value)) for pair in pairs], keep_content=keep_content)


def _plain(value: AnyValue) -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind in ("array_value", "kvlist_value", "bytes_value"):
        return json.dumps(_tree(value, 0), ensure_ascii=False)
    scalar: AttributeValue = getattr(value, kind) if kind else ""
    return scalar


def _tree(value: AnyValue, depth: int) -> Any:
    if depth >= _MAX_ANY_DEPTH:
        return "…"
    match value.WhichOneof("value"):
        case "array_value":
            return [_tree(item, depth + 1) for item in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _tree(pair.value, depth + 1) for pair in value.kvlist_value.values}
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case _:
            return _plain(value)


class Receiver:
    def __init__(
        self,
        settings: ConsoleSettings,
        store: TraceStore,
        metrics: ConsoleMetrics,
        on_change: Callable[[TraceSummary], None],
    ) -> None:
        self._settings, self._store, self._metrics, self._on_change = settings, store, metrics, on_change
        self._held_bytes = 0

    async def export(self, request: Request) -> Response:
        kind = PROTOBUF
        try:
            kind = media_type(request.headers.get("content-type", ""))
            body = await self._body(request)
            encoding = request.headers.get("content-encoding", "")
            plain = decompress(body, encoding, max_bytes=self._settings.otlp_max_plain_bytes)
            batch = decode(plain, kind, keep_content=self._settings.log_prompts)
        except OtlpError as error:
            self._metrics.exports_refused.labels(str(error.status)).inc()
            headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else {}
            return Response(encode_error(error, kind), error.status, headers, kind)
        self._keep(batch)
        return Response(encode_response(batch, kind), 200, media_type=kind)

    def _keep(self, batch: Batch) -> None:
        dropped_before, evicted_before = self._store.num_dropped_spans, self._store.num_evicted
        for summary in self._store.add(batch.spans):
            self._on_change(summary)
        self._metrics.spans.inc(len(batch.spans))
        self._metrics.spans_refused.inc(batch.num_rejected + self._store.num_dropped_spans - dropped_before)
        self._metrics.traces.set(len(self._store))
        self._metrics.trace_bytes.set(self._store.num_bytes)
        self._metrics.traces_evicted.inc(self._store.num_evicted - evicted_before)

    async def _body(self, request: Request) -> bytes:
        """Read a body, bounded for one export and for all concurrent ones."""
        body = bytearray()
        try:
            async for chunk in read_chunks(request, self._settings.otlp_max_body_bytes):
                body += chunk
                self._held_bytes += len(chunk)
                if self._held_bytes > self._settings.otlp_max_held_bytes:
                    raise OtlpError(503, "too many exports at once")
            return bytes(body)
        except TooLarge as error:
            raise OtlpError(413, error.message) from error
        finally:
            self._held_bytes -= len(body)


def routes(receiver: Receiver) -> APIRouter:
    router = APIRouter(tags=["otlp"])
    refusals: dict[int | str, dict[str, object]] = {
        400: {"description": "not an ExportTraceServiceRequest"},
        413: {"description": "too large"},
        415: {"description": "neither protobuf nor JSON, or an unknown Content-Encoding"},
        503: {"description": "too many exports at once; Retry-After says when to try again"},
    }

    @router.post("/v1/traces", response_class=Response, responses=refusals)
    async def export(request: Request) -> Response:
        """OTLP/HTTP: an ExportTraceServiceRequest as protobuf or JSON, plain or gzip."""
        return await receiver.export(request)

    return router
