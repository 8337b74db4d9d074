"""The spans of one sampled request: router.request, router.hold, engine.generate. Unsampled requests make none."""

from typing import TYPE_CHECKING

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from glowplug.telemetry import semconv
from glowplug.telemetry.tracing import Tracing, format_traceparent
from services.router.request_body import OPERATIONS

if TYPE_CHECKING:
    from services.router.proxy_exchange import Exchange

_NANO = 1_000_000_000


class RequestTrace:
    """At most three spans. They are exported when the request ends; their contexts travel before that."""

    def __init__(self, tracing: Tracing, parent: str, exchange: "Exchange") -> None:
        self._tracing = tracing
        attributes: dict[str, str | float | int | bool] = {
            semconv.ATTR_REQUEST_ID: exchange.request_id,
            semconv.ATTR_MODEL: exchange.model.key,
            semconv.GEN_AI_REQUEST_MODEL: exchange.model.name,
            semconv.GEN_AI_OPERATION: OPERATIONS.get(exchange.path, "chat"),
        }
        self._root = tracing.begin("router.request", parent, exchange.arrived_at, attributes, kind=SpanKind.SERVER)
        self.traceparent = format_traceparent(self._root.get_span_context())
        self._hold: Span | None = None
        self._engine: Span | None = None
        self.engine_traceparent = self.traceparent

    def held(self, exchange: "Exchange", eta_s: float) -> None:
        """The request begins to wait. Waiting again after an engine's end is the same span."""
        if self._hold is None:
            attributes: dict[str, str | float | int | bool] = {
                semconv.ATTR_MODEL: exchange.model.key,
                semconv.ATTR_PREDICTED_SECONDS: eta_s,
            }
            self._hold = self._tracing.begin("router.hold", self.traceparent, exchange.arrived_at, attributes)

    def dispatched(self, exchange: "Exchange") -> None:
        """The request goes to an engine. A second engine is the same span with its later attributes."""
        instance = exchange.instance
        assert instance is not None
        if self._engine is None:
            at = exchange.arrived_at + (exchange.dispatched - exchange.arrived)
            if self._hold is not None:
                self._hold.end(int(at * _NANO))
            self._engine = self._tracing.begin("engine.generate", self.traceparent, at, kind=SpanKind.CLIENT)
            self.engine_traceparent = format_traceparent(self._engine.get_span_context())
        self._engine.set_attributes(
            {
                semconv.ATTR_INSTANCE_ID: instance.instance_id,
                semconv.ATTR_NODE_ID: instance.node_id if instance.workers else "",
                semconv.ATTR_GPU_ID: instance.gpu_id if instance.workers else "",
                semconv.ATTR_EMULATED: instance.emulated,
            }
        )

    def finish(self, exchange: "Exchange", prompt_tokens: int, response_tokens: int) -> None:
        """Close and export."""
        ended_at = int((exchange.arrived_at + (exchange.ended - exchange.arrived)) * _NANO)
        failed = exchange.status >= 500
        if self._engine is not None:
            counts = {semconv.GEN_AI_INPUT_TOKENS: prompt_tokens, semconv.GEN_AI_OUTPUT_TOKENS: response_tokens}
            self._engine.set_attributes(counts)
            if exchange.first_byte:
                at_ns = int((exchange.arrived_at + (exchange.first_byte - exchange.arrived)) * _NANO)
                self._engine.add_event("first token" if exchange.is_sse else "first byte", timestamp=at_ns)
            _end(self._engine, ended_at, exchange.error_code if failed else "")
        elif self._hold is not None:
            _end(self._hold, ended_at, exchange.error_code if failed else "")
        self._root.set_attributes({"http.response.status_code": exchange.status, "glowplug.cold": exchange.cold})
        _end(self._root, ended_at, exchange.error_code if failed else "")


def _end(span: Span, at_ns: int, error: str) -> None:
    if error:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(at_ns)
