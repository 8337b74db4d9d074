"""POST /v1/traces: the OTLP/HTTP door. Reads bounded bodies, keeps the spans, answers in the sender's encoding."""

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.console import otlp
from services.console.metrics import ConsoleMetrics
from services.console.otlp import OtlpError
from services.console.settings import ConsoleSettings
from services.console.trace_store import TraceStore, TraceSummary

RETRY_AFTER_S = 1


class Receiver:
    """Takes exports into a store. `on_change` hears the summary of each trace that grew."""

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
        """One ExportTraceServiceRequest."""
        kind = otlp.PROTOBUF
        try:
            kind = otlp.media_type(request.headers.get("content-type", ""))
            body = await self._body(request)
            encoding = request.headers.get("content-encoding", "")
            plain = otlp.decompress(body, encoding, max_bytes=self._settings.otlp_max_plain_bytes)
            batch = otlp.decode(plain, kind, keep_content=self._settings.log_prompts)
        except OtlpError as error:
            self._metrics.exports_refused.labels(str(error.status)).inc()
            headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else {}
            return Response(otlp.encode_error(error, kind), error.status, headers, kind)
        self._keep(batch)
        return Response(otlp.encode_response(batch, kind), 200, media_type=kind)

    def _keep(self, batch: otlp.Batch) -> None:
        dropped_before, evicted_before = self._store.num_dropped_spans, self._store.num_evicted
        for summary in self._store.add(batch.spans):
            self._on_change(summary)
        self._metrics.spans.inc(len(batch.spans))
        self._metrics.spans_refused.inc(batch.num_rejected + self._store.num_dropped_spans - dropped_before)
        self._metrics.traces.set(len(self._store))
        self._metrics.trace_bytes.set(self._store.num_bytes)
        self._metrics.traces_evicted.inc(self._store.num_evicted - evicted_before)

    async def _body(self, request: Request) -> bytes:
        """The body, within the bound for one export and the bound for all that are being read."""
        limit = self._settings.otlp_max_body_bytes
        told = request.headers.get("content-length", "")
        if told.isdecimal() and int(told) > limit:
            raise OtlpError(413, f"body is larger than {limit} bytes")
        body = bytearray()
        try:
            async for chunk in request.stream():
                body += chunk
                self._held_bytes += len(chunk)
                if len(body) > limit:
                    raise OtlpError(413, f"body is larger than {limit} bytes")
                if self._held_bytes > self._settings.otlp_max_held_bytes:
                    raise OtlpError(503, "too many exports at once")
            return bytes(body)
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
