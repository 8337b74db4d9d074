"""Request ids, W3C trace contexts and the spans of sampled requests, without trust in the client.

A sampled request has at most three spans (router.request, router.hold and engine.generate) and one router.continue per
continuation of its stream.
"""

import itertools
import os
import random
import re
from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from glowplug.domain.instance import Instance
from glowplug.events.facts import RequestFinished
from glowplug.telemetry import semconv
from glowplug.telemetry.tracing import Tracing, format_traceparent

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_NANO = 1_000_000_000
_chance = random.Random(os.urandom(16))
_bits = _chance.getrandbits
_PREFIX = f"req-{_bits(40):010x}"
_numbers = itertools.count(1)
Attributes = dict[str, str | float | int | bool]


def request_id(given: bytes | None) -> str:
    """Return the client's id if it is safe to print, else a new one."""
    if given is not None and _SAFE_ID.fullmatch(given):
        return given.decode("ascii")
    return f"{_PREFIX}{next(_numbers):06x}"


def event_id() -> str:
    """Return 128 random bits in hexadecimal."""
    return f"{_bits(128):032x}"


@dataclass(slots=True)
class Sampler:
    """A head sampler: follows the parent's decision; of the rest it takes `ratio`, at most `per_s` traces a second (a
    token bucket of that size)."""

    ratio: float = 1.0
    per_s: float = 20.0
    _tokens: float = 1.0
    _at: float = 0.0

    def root(self, now_s: float) -> bool:
        self._tokens = min(self._tokens + (now_s - self._at) * self.per_s, max(self.per_s, 1.0))
        self._at = now_s
        if self._tokens < 1.0 or (self.ratio < 1.0 and _chance.random() >= self.ratio):
            return False
        self._tokens -= 1.0
        return True


def parent_context(given: bytes | None) -> tuple[str, bool] | None:
    """Return the client's (traceparent, sampled), or None without a well-formed one."""
    if given is None:
        return None
    match = _TRACEPARENT.fullmatch(given)
    return (given.decode("ascii"), bool(int(match[3], 16) & 1)) if match else None


def new_context() -> str:
    """Return an unsampled traceparent."""
    return f"00-{_bits(128) | 1:032x}-{_bits(64) | 1:016x}-00"


class RequestTrace:
    """The spans of one request, exported at its end. Times are epoch seconds."""

    def __init__(self, tracing: Tracing, parent: str, arrived_at: float, attributes: Attributes) -> None:
        self._tracing, self._arrived_at = tracing, arrived_at
        self._root = tracing.begin("router.request", parent, arrived_at, attributes, kind=SpanKind.SERVER)
        self.traceparent = format_traceparent(self._root.get_span_context())
        self._hold: Span | None = None
        self._engine: Span | None = None
        self._continue: Span | None = None
        self.engine_traceparent = self.traceparent

    def held(self, model_key: str, eta_s: float) -> None:
        """Holding again after an engine's loss extends the span."""
        if self._hold is None:
            attributes: Attributes = {semconv.ATTR_MODEL: model_key, semconv.ATTR_PREDICTED_SECONDS: eta_s}
            self._hold = self._tracing.begin("router.hold", self.traceparent, self._arrived_at, attributes)

    def dispatched(self, instance: Instance, after_s: float) -> None:
        """`after_s`: after the arrival. A second engine replaces the span's attributes."""
        if self._engine is None:
            at = self._arrived_at + after_s
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

    def broken(self, at: float, reason: str, message: str, num_tokens: int, instance: Instance | None) -> None:
        """Begin a continuation's span; the client has `num_tokens`."""
        if self._continue is not None:
            self._continue.end(int(at * _NANO))
        attributes: Attributes = {
            semconv.ATTR_CONTINUE_REASON: reason,
            semconv.ATTR_REASON: message,
            semconv.ATTR_TOKENS_BEFORE: num_tokens,
            semconv.ATTR_FROM_INSTANCE: instance.instance_id if instance is not None else "",
        }
        self._continue = self._tracing.begin("router.continue", self.traceparent, at, attributes)

    def continued(self, at: float, instance: Instance | None) -> None:
        if self._continue is not None:
            self._continue.set_attribute(semconv.ATTR_INSTANCE_ID, instance.instance_id if instance is not None else "")
            self._continue.end(int(at * _NANO))
            self._continue = None

    def stayed(self, at: float, why: str) -> None:
        if self._continue is not None:
            self._continue.set_attribute(semconv.ATTR_CONTINUE_OUTCOME, f"it stayed: {why}")
            self._continue.end(int(at * _NANO))
            self._continue = None

    def stays(self, at: float, why: str) -> None:
        """Note that no other engine can continue the stream."""
        self._root.add_event("stays", {semconv.ATTR_REASON: why}, timestamp=int(at * _NANO))

    def finish(self, fact: RequestFinished, begun: str) -> None:
        """Export the spans. `begun`: the name of the first byte's event, or ""."""
        ended_at = int(fact.finished_at * _NANO)
        error = fact.error_code if fact.status >= 500 else ""
        if self._continue is not None:
            _end(self._continue, ended_at, error)
        if self._engine is not None:
            self._engine.set_attributes(
                {
                    semconv.GEN_AI_INPUT_TOKENS: fact.prompt_tokens,
                    semconv.GEN_AI_OUTPUT_TOKENS: fact.response_tokens,
                }
            )
            if begun:
                self._engine.add_event(begun, timestamp=int((fact.arrived_at + fact.ttft_s) * _NANO))
            _end(self._engine, ended_at, error)
        elif self._hold is not None:
            _end(self._hold, ended_at, error)
        self._root.set_attributes({"http.response.status_code": fact.status, "glowplug.cold": fact.cold})
        _end(self._root, ended_at, error)


def _end(span: Span, at_ns: int, error: str) -> None:
    if error:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(at_ns)
