"""One request's life on the data port: arrived, held, sent to an engine, answered; then told to metrics and traces.

The answer's body passes through untouched; what an engine refuses is told in the words of the client's API
(api_errors.py). A streamed answer is passed on in whole SSE events, so that when its engine
dies the client gets one error event and a clean end, never half an event and never a silent stop.

An answer is whole when the client has been handed its end: by HTTP's framing, or, of a stream, by the event that ends
it (`[DONE]`), since clients close their connection on reading that and the last chunk may come in a later read. From
there on it is 200, whoever leaves or dies. A plain chunked answer has no end but its last chunk.

What may be sent again: a request of which not one byte has been answered, whatever its path, for every answer is made
anew and no engine keeps anything of it. What has begun is never sent again.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from glowplug.controllers.router.messages import Reject
from glowplug.domain.errors import GlowplugError
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.telemetry.semconv import HEADER_EMULATED
from services.router import api_errors, event_stream, http_text, tokens
from services.router.event_stream import EVENT_ENDS
from services.router.request_body import tool_choice_refused
from services.router.spans import RequestTrace

if TYPE_CHECKING:
    from services.router.proxy import DataPort
    from services.router.proxy_client import ClientConnection
    from services.router.proxy_engine import EngineConnection
    from services.router.request_head import Parsed

_EMULATED = HEADER_EMULATED.encode()
_monotonic = time.monotonic
ENGINE_RETRY_S = 1.0  # after which a client asks again that an engine has sent away for now


class Exchange:
    """Created when a well-formed request for a known model is complete."""

    __slots__ = (
        "_collected",
        "_counted",
        "_kept",
        "_last",
        "_opening",
        "_previous",
        "_timer",
        "arrived",
        "arrived_at",
        "body",
        "chunked",
        "client",
        "cold",
        "dispatched",
        "done",
        "ended",
        "engine",
        "error_code",
        "first_byte",
        "head_sent",
        "instance",
        "is_flowing",
        "is_sse",
        "keep_alive",
        "max_tokens",
        "model",
        "needs",
        "num_attempts",
        "num_events",
        "path",
        "port",
        "prompt_tokens",
        "queue_s",
        "request",
        "request_id",
        "router_s",
        "started",
        "status",
        "stream",
        "ticket",
        "trace",
        "traceparent",
    )

    def __init__(self, port: "DataPort", client: "ClientConnection", parsed: "Parsed", model: Model, stream: bool):
        self.port, self.client, self.request, self.model, self.stream = port, client, parsed, model, stream
        self.arrived, self.arrived_at = parsed.complete, parsed.complete_at
        self.ticket, self.request_id = parsed.ticket, parsed.request_id
        self.path, self.body = parsed.path, parsed.body
        self.chunked = parsed.is_http11
        self.keep_alive = parsed.keep_alive
        self.engine: EngineConnection | None = None
        self.instance: Instance | None = None
        self.trace: RequestTrace | None = None
        self.traceparent = ""
        self.done = self.cold = self.head_sent = self.started = self.is_sse = self.is_flowing = False
        self.status = self.num_attempts = self.num_events = 0
        self.prompt_tokens = self.max_tokens = 0  # as its body has them: see request_body.sizes
        self.error_code = self.needs = ""  # needs: a feature that an instance may lack
        self.dispatched = self.first_byte = self.ended = self.queue_s = self.router_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._kept = self._last = self._previous = self._opening = b""
        self._collected: list[bytes] | None = None
        self._counted: tuple[int, int, bool] | None = None

    # -- what the controller decides ----------------------------------------------------------------------------

    def dispatch(self, instance: Instance, held_s: float, cold: bool) -> None:
        """Send the request to `instance` now."""
        self._stop_timer()
        self.instance, self.queue_s, self.cold = instance, held_s, self.cold or cold
        if self.needs and self.needs in instance.lacks:
            self._refuse(tool_choice_refused(self.model))
            return
        self.num_attempts += 1
        self.dispatched = _monotonic()
        if self.trace is not None:
            self.trace.dispatched(self)
            self.traceparent = self.trace.engine_traceparent
        if self.head_sent:
            self._write(b": glowplug ready %b\n\n" % self._timings())
        self.port.pool(instance).acquire(self)

    def hold(self, eta_s: float) -> None:
        """Wait. A stream's client is kept alive by comments once it has waited a while."""
        if self.trace is not None:
            self.trace.held(self, eta_s)
        if self.stream and self._timer is None:
            delay_s = self.port.limits.keepalive_after_s - (_monotonic() - self.arrived)
            self._timer = self.port.loop.call_later(max(delay_s, 0.0), self._keep_client)

    def _keep_client(self) -> None:
        limits = self.port.limits
        self._timer = self.port.loop.call_later(limits.keepalive_every_s, self._keep_client)
        if self.client.write_paused:
            return
        if not self.head_sent:
            self.port.desk.head_due(self)
            if self.done:  # refused, with a status of its own
                return
        eta_s = self.port.desk.eta_s(self.model.key)
        comment = b": glowplug waiting model=%b eta_s=%.1f\n\n" % (self.model.key.encode(), eta_s)
        if self.head_sent:
            self._write(comment)
            return
        self.head_sent, self.status = True, 200
        self.keep_alive = self.keep_alive and self.chunked
        headers = http_text.EVENT_STREAM_HEADERS + self._own_headers()
        self.client.write(self._head(200, headers, None) + self._frame(comment))

    def probe(self) -> bool:
        """Write a comment to the client where that harms no answer. False while its head is still to come."""
        between = self._last.endswith(EVENT_ENDS) if self.started else self.head_sent
        if between and (self.is_sse or not self.started) and not self.client.write_paused:
            self._write(b":\n\n")
        return self.head_sent

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reject(self, effect: Reject) -> None:
        """Answer with an error: as the response, or as one SSE event when the stream has begun."""
        self._fail(effect.status, effect.message, effect.error_type, effect.code, retry_after_s=effect.retry_after_s)

    def _refuse(self, error: GlowplugError) -> None:
        self._fail(error.status, error.message, error.type, error.code, error.param)

    def _fail(
        self, status: int, message: str, kind: str, code: str, param: str | None = None, retry_after_s: float = 0.0
    ) -> None:
        """End it with an error. Of an answer that has begun this is the last event, after which it ends whole; an
        answer that is no stream can only break off."""
        self.status, self.error_code = status, code
        body = api_errors.body(self.path, status, message, kind, code, param)
        if not self.head_sent:
            headers = http_text.JSON_HEADERS + self._instance_headers()
            if self.started:
                headers += b"server-timing: %b\r\n" % self._timings()
            if status == 501:
                headers += api_errors.NO_RETRY
            self.client.respond(
                self.request,
                status,
                body,
                headers=headers,
                retry_after_s=retry_after_s,
                traceparent=self.traceparent,
            )
        else:
            self.keep_alive = False
            if self.is_sse or self._collected is not None or not self.started:
                self._kept = b""
                self._write(api_errors.event(self.path, body))
                self._write_end()
        self._finish()

    # -- what the engine answers --------------------------------------------------------------------------------

    def engine_request(self, credentials: bytes = b"") -> bytes:
        """The request as the engine gets it: same target, headers and body; ours are the hop, the id, the trace and the
        engine's `credentials`."""
        request = self.request
        self.router_s = max(_monotonic() - self.arrived - self.queue_s, 0.0)
        return b"POST %b HTTP/1.1\r\n%b%bx-request-id: %b\r\ntraceparent: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            request.target,
            request.passed_headers(),
            credentials,
            self.request_id.encode(),
            self.traceparent.encode(),
            len(self.body),
            self.body,
        )

    def wants(self, attempt: int) -> bool:
        """Whether a connection made for this attempt is still of use."""
        return not self.done and self.num_attempts == attempt and self.engine is None

    def pass_on(self, body: bytes) -> None:
        """The way of nearly every chunk: one read from the engine, whole SSE events, in a stream that has begun."""
        if not body.endswith(EVENT_ENDS):
            self.is_flowing = False
            self._continue(body, False)
            return
        self._previous, self._last = self._last, body
        self.num_events += body.count(b"data: {")
        self.client.write(b"%x\r\n%b\r\n" % (len(body), body))

    def engine_data(self, engine: "EngineConnection", body: bytes, complete: bool) -> None:
        """Part of the answer: the head is complete. Written to the client in one go."""
        out = b""
        if not self.started:
            if not body and not complete:
                return
            self.started, self.first_byte = True, _monotonic()
            out = self._begin(engine, body)
            if self.is_sse and self._collected is None:
                if api_errors.is_anthropic(self.path):
                    if event_stream.begins_late(body):
                        body = event_stream.message_start(self.request_id, self.model.name, self.prompt_tokens) + body
                    self._opening = body[: tokens.TAIL_BYTES]
                if self.port.tracks_tokens:
                    self.port.desk.first_token(self)
        self._continue(body, complete, out)

    def _continue(self, body: bytes, complete: bool, out: bytes = b"") -> None:
        if body:
            if self.is_sse:
                self.num_events += body.count(b"data: {")
                if self._kept or not body.endswith(EVENT_ENDS):
                    body = self._kept + body
                    end = event_stream.whole_events(body, self.port.limits.event_bytes)
                    body, self._kept = body[:end], body[end:]
            if body:
                self._previous, self._last = self._last, body
            if self._collected is not None:
                self._collect(body)
            elif not self.chunked:
                out += body
            elif body:
                out += b"%x\r\n%b\r\n" % (len(body), body)
        if complete and self._collected is None:
            if self._kept:
                out += self._frame(self._kept)
                self._previous, self._last = self._last, self._kept
                self._kept = b""
            if self.chunked:
                out += http_text.LAST_CHUNK
        if out:
            self.client.write(out)
        self.is_flowing = self.is_sse and self.chunked and self._collected is None and not self._kept

    def _begin(self, engine: "EngineConnection", first: bytes) -> bytes:
        """The head of the answer; b"" when the client has one since it was held, or when this is no answer."""
        self.is_sse = engine.is_sse
        is_error = engine.status >= 400 or (self.is_sse and api_errors.starts_stream(first))
        if is_error or (self.head_sent and (engine.status != 200 or not engine.is_sse)):
            self._collected, self.status, self.is_sse = [], engine.status, False
            return b""
        if self.head_sent:
            return b""
        self.head_sent, self.status = True, engine.status
        length = None if engine.is_sse else engine.length
        if engine.status in (204, 304):
            self.chunked = False
            length = 0
        elif length is not None:
            self.chunked = False
        elif not self.chunked:
            self.keep_alive = False  # HTTP/1.0: the answer ends with the connection
        timings = b"server-timing: %b\r\n" % self._timings()
        return self._head(engine.status, b"".join(engine.headers) + self._own_headers() + timings, length)

    def _collect(self, body: bytes) -> None:
        assert self._collected is not None
        if sum(map(len, self._collected)) < self.port.limits.engine_error_bytes:
            self._collected.append(body)

    def engine_over(self) -> None:
        """The engine's answer is complete and passed on."""
        if self.done:
            return
        if self._collected is not None:
            answer = b"".join(self._collected)
            error = api_errors.read(self.status, api_errors.starts_stream(answer) or answer, self.path)
            retry_after_s = ENGINE_RETRY_S if error.status in (429, 503) else 0.0
            self._fail(error.status, error.message, error.type, error.code, error.param, retry_after_s)
        else:
            self._finish()

    def engine_unreachable(self, reason: str) -> None:
        self.port.desk.failed(self, reached=False, reason=reason)

    def engine_lost(self, reason: str, *, stale: bool) -> None:
        """The engine went away before its answer was complete."""
        if self.done:
            return
        if self._is_whole():
            self._end_whole()
        elif self.started:
            self._fail_midway(reason)
        elif stale and self.instance is not None:
            self.num_attempts += 1
            self.port.pool(self.instance).acquire(self, fresh=True)
        else:
            self.port.metrics.retries.inc()
            self.port.desk.failed(self, reached=True, reason=reason)

    def recall(self, reason: str, *, ended: bool) -> None:
        """Its instance is said to have failed. An answer that has begun goes on unless its engine has `ended`."""
        if self.started and ended and self.engine is not None:
            self.engine.give_up(reason)
        if self.done or self.started or self.instance is None:
            return
        self._leave_engine()
        self.num_attempts += 1  # a connection still being made is of no use
        self.port.metrics.retries.inc()
        self.port.desk.failed(self, reached=False, reason=reason)

    def _fail_midway(self, reason: str) -> None:
        self._fail(502, reason, "server_error", "engine_failed")

    # -- the end ------------------------------------------------------------------------------------------------

    def _is_whole(self) -> bool:
        """Whether the client has been handed all of a stream but its last chunk."""
        return self.is_sse and self._collected is None and event_stream.is_over(self.path, self._last)

    def _end_whole(self) -> None:
        self._leave_engine()
        self._continue(b"", True)
        self._finish()

    def _leave_engine(self) -> None:
        if self.engine is not None:
            self.engine.abandon()
            self.engine = None

    def client_left(self) -> None:
        """The client closed its connection: nothing more is generated for it."""
        if self.done:
            return
        whole = self._is_whole() and not self.client.write_paused  # else its end lies in our own buffer
        if not whole:
            self.status, self.error_code = 499, "client_left"
        self._close_books()
        self._leave_engine()
        self.port.ended(self, left=not whole)

    def stop(self, status: int, message: str, code: str) -> None:
        """The router ends this request itself (its drain is over)."""
        if self.done:
            return
        if self._is_whole():
            self._end_whole()
            return
        self._leave_engine()
        self.keep_alive = False
        self._fail(status, message, "service_unavailable", code, retry_after_s=1.0)

    def _finish(self) -> None:
        self._close_books()
        self.port.ended(self, left=False)
        self.client.exchange_over(self.keep_alive)

    def _close_books(self) -> None:
        self.done, self.ended = True, _monotonic()
        self._stop_timer()

    def token_counts(self) -> tuple[int, int, bool]:
        """(prompt, response, exact) of an answer that is over; see tokens.count. A prompt whose length the engine did
        not tell, for its client asked for no usage, is as long as its body is read to be, which is not exact."""
        if self._counted is not None:
            return self._counted
        tail = self._last[-tokens.TAIL_BYTES :]
        if len(tail) < tokens.TAIL_BYTES:
            tail = self._previous[-tokens.TAIL_BYTES :] + tail
        prompt, response, exact = tokens.count(self._opening + tail, self.num_events)
        self._counted = (prompt or (0 if exact else self.prompt_tokens), response, exact)
        return self._counted

    # -- bytes --------------------------------------------------------------------------------------------------

    def _frame(self, data: bytes) -> bytes:
        return http_text.chunk(data) if self.chunked else data

    def _write(self, data: bytes) -> None:
        self.client.write(self._frame(data))

    def _write_end(self) -> None:
        if self.chunked:
            self.client.write(http_text.LAST_CHUNK)

    def _head(self, status: int, headers: bytes, length: int | None) -> bytes:
        framing = b""
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif self.chunked:
            framing = http_text.CHUNKED
        self.keep_alive = self.keep_alive and not self.port.leaving
        closing = b"" if self.keep_alive else http_text.CLOSE
        return http_text.status_line(status) + headers + framing + closing + b"\r\n"

    def _own_headers(self) -> bytes:
        own = b"x-request-id: %b\r\ntraceparent: %b\r\n" % (self.request_id.encode(), self.traceparent.encode())
        return own + self.port.web.cors(self.request) + self._instance_headers()

    def _instance_headers(self) -> bytes:
        instance = self.instance
        if instance is None:
            return b""
        name = b"x-glowplug-instance: %b\r\n" % instance.instance_id.encode()
        return name + b"%b: 1\r\n" % _EMULATED if instance.emulated else name

    def _timings(self) -> bytes:
        phases = self.instance.phases if self.cold and self.instance is not None else ()
        return http_text.server_timing(self.queue_s, phases, self.router_s)
