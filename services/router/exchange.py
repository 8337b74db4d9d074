"""One request's life on the data port: arrived, held, sent to an engine, answered; then reported.

An exchange owns both of its ends: the client it writes to (ClientSink) and the engine it reads from (EngineSource). The
answer's body passes through untouched; what an engine refuses is translated to the client's API (api_errors.py). A
streamed answer is passed on in whole SSE events, so that when its engine dies the client gets one error event and a
clean end, never half an event and never a silent stop.

An answer is whole when the client has been handed its end: by HTTP's framing, or, of a stream, by the event that ends
it (`[DONE]`), since clients close their connection on reading that and the last chunk may come in a later read. From
there on it is 200, even when a side leaves or dies. A plain chunked answer has no end but its last chunk.

What may be sent again: a request of which not one byte has been answered, whatever its path, for every answer is made
anew and no engine keeps anything of it. A stream that has begun is continued by another engine (resumption.py), behind
what the client has of it; where that cannot be, it ends with the error event. Another answer that has begun breaks off.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from glowplug.controllers.router import messages as msg
from glowplug.domain.errors import EngineFailed, GlowplugError
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.engines.apis import EngineApi
from services.router import api_errors, moving, resumption, wire
from services.router.api_errors import STOPPING, ApiError
from services.router.continuation import NotContinuable
from services.router.ends import ClientSink, EngineSource
from services.router.http_request import HttpRequest
from services.router.moving import Move
from services.router.port_context import PortContext
from services.router.request_body import tool_choice_refused
from services.router.resumption import LOG_BYTES, Resumption
from services.router.tracing import RequestTrace
from services.router.wire import EVENT_ENDS

_monotonic = time.monotonic


@dataclass(slots=True, eq=False, repr=False)  # prompts never reach a log
class Exchange:
    """Made when a well-formed request for a known model is complete. `arrived_at` is epoch seconds, other times are
    monotonic."""

    context: "PortContext[Exchange]"
    client: ClientSink
    request: HttpRequest
    model: Model
    api: EngineApi
    stream: bool
    needs: str  # a feature that an instance may lack
    prompt_tokens: int  # as request_body.sizes reads them
    trace: RequestTrace | None
    traceparent: str
    ticket: int = field(init=False)
    arrived: float = field(init=False)
    keep_alive: bool = field(init=False)
    chunked: bool = field(init=False)  # the answer, as the client gets it
    instance: Instance | None = None
    engine: EngineSource | None = None
    cold: bool = False
    dispatched: float = 0.0
    queue_s: float = 0.0
    router_s: float = 0.0
    head_sent: bool = False
    started: bool = False  # the engine's answer has
    first_byte: float = 0.0
    is_sse: bool = False
    is_flowing: bool = False  # a stream of which all whole events have been passed on, and nothing is kept
    num_events: int = 0
    resumption: Resumption | None = None  # of a stream that is long, or that has lost an engine
    moving: Move | None = None  # it is about to leave its engine for another one
    is_deserted: bool = False  # the node of its engine has left
    left_behind: str = ""  # why its engine is no target any more; no other can go on with it
    status: int = 0
    error_code: str = ""
    done: bool = False
    ended: float = 0.0
    _num_attempts: int = 0
    _timer: asyncio.TimerHandle | None = None
    _collected: list[bytes] | None = None  # what an engine answers instead of an answer
    _kept: bytes = b""  # an event that is not whole yet
    _log: list[bytes] | None = None  # what was passed on and is not in `resumption` yet; None: nothing is kept
    _log_left: int = LOG_BYTES
    _opening: bytes = b""  # of Anthropic's streams, whose prompt is counted there
    _previous: bytes = b""
    _last: bytes = b""  # passed on last, and before that: token counts stand there
    _counted: tuple[int, int, bool] | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.ticket = next(self.context.table.tickets)
        self.arrived, self.keep_alive, self.chunked = request.complete, request.keep_alive, request.is_http11

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_continued(self) -> int:
        """How often another engine was asked to go on with its stream."""
        return self.resumption.num_times if self.resumption is not None else 0

    @property
    def arrived_at(self) -> float:
        return self.request.complete_at

    # -- what the controller decides ----------------------------------------------------------------------------

    def dispatch(self, effect: msg.Dispatch) -> None:
        """Send the request to the instance now."""
        self._stop_timer()
        instance = self.instance = effect.instance
        self.is_deserted = False
        if not self.awaits_next:
            self.queue_s, self.cold = effect.held_s, self.cold or effect.cold
        if self.needs and self.needs in instance.lacks:
            self._fail(tool_choice_refused(self.model))
            return
        self._num_attempts += 1
        self.dispatched = _monotonic()
        if self.trace is not None:
            self.trace.dispatched(instance, self.dispatched - self.arrived)
            self.traceparent = self.trace.engine_traceparent
        if self.head_sent and not self.started:
            self._write(b": glowplug ready %b\n\n" % self._timings())
        self.context.connect(self, instance, False)

    def hold(self, effect: msg.Hold) -> None:
        """Wait. A stream's client is kept alive by comments once it has waited a while."""
        if self.trace is not None and not self.awaits_next:  # else it is a part of router.continue
            self.trace.held(self.model.key, effect.eta_s)
        if self.stream and self._timer is None:
            since = self.resumption.broken_at if self.resumption is not None else self.arrived
            delay_s = self.context.limits.keepalive_after_s - (_monotonic() - since)
            self._timer = self.context.loop.call_later(max(delay_s, 0.0), self._keep_client)

    def _keep_client(self) -> None:
        context = self.context
        self._timer = context.loop.call_later(context.limits.keepalive_every_s, self._keep_client)
        if self.client.write_paused:
            return
        if not self.head_sent:
            context.table.take(msg.HeadDue(self.ticket))
            if self.done:  # refused, with a status of its own
                return
        eta_s = context.table.eta_s(self.model.key)
        comment = b": glowplug waiting model=%b eta_s=%.1f\n\n" % (self.model.key.encode(), eta_s)
        if self.head_sent:
            self._write(comment)
            return
        self.head_sent, self.status = True, 200
        self.keep_alive = self.keep_alive and self.chunked
        headers = wire.EVENT_STREAM_HEADERS + self._own_headers()
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

    @property
    def awaits_next(self) -> bool:
        """Whether its stream waits for an engine that goes on with it."""
        return self.resumption is not None and self.resumption.is_waiting

    def recall(self, effect: msg.Recall) -> None:
        """Its instance is said to have failed, or gives its requests up. An answer that has begun goes on unless its
        engine has ended."""
        if self.done or self.instance is None:
            return
        if self.moving is not None:  # it counts at that one
            self.moving.stay(effect.reason)
        elif self.started and not self.awaits_next:
            if not (effect.ended or effect.moved):
                self.is_deserted = True
            elif self._is_whole():
                self._end_whole()
            elif self.engine is not None:
                self._interrupted(effect.reason, resumption.MOVED if effect.moved else resumption.ENDED)
        elif not effect.moved:
            self._leave_engine()
            self._num_attempts += 1  # a connection still being made is of no use
            self._fail_dispatch(reached=False, reason=effect.reason)

    def move(self, effect: msg.MoveStream) -> None:
        """Its instance drains, and would end it: another one goes on with it, and is asked first."""
        moving.begin(self, effect)

    def reject(self, effect: msg.Reject) -> None:
        """Answer with an error: as the response, or as one SSE event when the stream has begun."""
        self._fail(ApiError(effect.status, effect.message, effect.error_type, effect.code, None, effect.retry_after_s))

    def _fail(self, error: GlowplugError) -> None:
        """End it with an error. Of an answer that has begun this is the last event, after which it ends whole; an
        answer that is no stream can only break off."""
        self.status, self.error_code = error.status, error.code
        path = self.request.path
        body = api_errors.body(path, error)
        if not self.head_sent:
            headers = wire.JSON_HEADERS + wire.instance_headers(self.instance)
            if self.started:
                headers += b"server-timing: %b\r\n" % self._timings()
            headers += api_errors.no_retry(error)
            more = b"traceparent: %b\r\n" % self.traceparent.encode() + api_errors.retry_after(error)
            self.keep_alive = self.client.respond(self.request, error.status, body, headers, more)
        else:
            self.keep_alive = False
            if self.is_sse or self._collected is not None or not self.started:
                self._kept = b""
                self._write(api_errors.event(path, body))
                if self.chunked:
                    self.client.write(wire.LAST_CHUNK)
        self._finish()

    # -- what the engine answers --------------------------------------------------------------------------------

    def engine_request(self, credentials: bytes) -> bytes:
        """The request as the engine gets it: same target, headers and body; ours are the hop, the id, the trace and the
        engine's `credentials`."""
        request, target, body = self.request, self.request.target, self.request.body
        if self.resumption is not None and self.resumption.is_waiting:
            target, body = self.resumption.target, self.resumption.body
        else:
            self.router_s = max(_monotonic() - self.arrived - self.queue_s, 0.0)
            if self.stream and self.api.token_ids and self.context.max_continuations:
                body = wire.asking_for_ids(request.path, body)
        return self.request_with(target, body, credentials)

    def request_with(self, target: bytes, body: bytes, credentials: bytes) -> bytes:
        return b"POST %b HTTP/1.1\r\n%b%bx-request-id: %b\r\ntraceparent: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            target,
            self.request.passed_headers(),
            credentials,
            self.request_id.encode(),
            self.traceparent.encode(),
            len(body),
            body,
        )

    def attempt(self) -> Callable[[], bool]:
        """Ask, once a connection has been made, whether it is still of use."""
        attempt = self._num_attempts
        return lambda: not self.done and self._num_attempts == attempt and self.engine is None

    def attach(self, engine: EngineSource) -> None:
        """The request goes out on this connection."""
        self.engine = engine
        if self.client.write_paused:
            engine.pause()

    def pass_on(self, body: bytes, chunk: bytes) -> None:
        """The way of nearly every chunk of a stream that has begun: `body` is whole SSE events, `chunk` is the same in
        HTTP's framing."""
        if self._log is not None:
            if b'"abort"' in body or b'data: {"error"' in body:  # an engine that fails, or a text that reads like it
                self._continue(body, False)
                return
            self._keep(body)
        self._previous, self._last = self._last, body
        self.num_events += body.count(b"data: {")
        self.client.write(chunk)

    def engine_data(self, engine: EngineSource, body: bytes, complete: bool) -> None:
        """Part of the answer: the head is complete. Written to the client in one go."""
        if self.moving is not None:
            self.moving.hold(body, complete)
            return
        if self.resumption is not None and self.resumption.num_times:
            self._splice(engine, self.resumption, body, complete)
            return
        out = b""
        if not self.started:
            if not body and not complete:
                return
            self.started, self.first_byte = True, _monotonic()
            out = self._begin(engine, body)
            if self.is_sse and self._collected is None:
                if self.context.max_continuations:
                    self._log = []
                if wire.is_anthropic(self.request.path):
                    if wire.begins_late(body):
                        body = wire.message_start(self.request_id, self.model.name, self.prompt_tokens) + body
                    self._opening = body[: wire.TAIL_BYTES]
                if self.context.table.controller.tracks_tokens:
                    self.context.table.take(msg.FirstToken(self.ticket))
        self._continue(body, complete, out)

    def _continue(self, body: bytes, complete: bool, out: bytes = b"") -> None:
        failure = ""
        if body:
            if self.is_sse:
                self.num_events += body.count(b"data: {")
                if self._kept or not body.endswith(EVENT_ENDS):
                    body = self._kept + body
                    end = wire.whole_events(body, self.context.limits.event_bytes)
                    body, self._kept = body[:end], body[end:]
                if self._log is not None:
                    body, failure = wire.before_failure(body)
                    self._keep(body)
            if body:
                self._previous, self._last = self._last, body
            if self._collected is not None:
                if sum(map(len, self._collected)) < self.context.limits.engine_error_bytes:
                    self._collected.append(body)
            elif not self.chunked:
                out += body
            elif body:
                out += b"%x\r\n%b\r\n" % (len(body), body)
        if complete and self._collected is None and not failure:
            if self._kept:
                out += self._frame(self._kept)
                self._previous, self._last = self._last, self._kept
                self._kept = b""
            if self.chunked:
                out += wire.LAST_CHUNK
        if out:
            self.client.write(out)
        can_flow = self.is_sse and self.chunked and self._collected is None and not self.num_continued
        self.is_flowing = can_flow and not self._kept
        if failure:
            self._interrupted(failure, resumption.ERROR)

    def _begin(self, engine: EngineSource, first: bytes) -> bytes:
        """The head of the answer; b"" when the client has one since it was held, or when this is no answer."""
        self.is_sse = engine.is_sse
        is_error = engine.status >= 400 or (self.is_sse and wire.starts_stream(first))
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

    def engine_over(self) -> None:
        """The engine's answer is complete and passed on."""
        if self.done or self.awaits_next:  # it ended with a failure, and another engine has been asked
            return
        if self._collected is not None:
            answer = b"".join(self._collected)
            self._fail(api_errors.read(self.status, wire.starts_stream(answer) or answer, self.request.path))
        else:
            self._finish()

    def engine_unreachable(self, reason: str) -> None:
        self.context.table.change(msg.DispatchFailed(self.ticket, False, reason))

    def engine_refused(self, reason: str) -> None:
        """The engine has not begun with it, and will not: nothing is held against it."""
        if not self.done:
            self._fail_dispatch(reached=False, reason=reason)

    def engine_lost(self, reason: str, *, stale: bool) -> None:
        """The engine went away before its answer was complete. `stale`: it had been idle, and not one byte came."""
        if self.done:
            return
        if self.moving is not None:
            self.moving.first_lost()
        elif self._is_whole():
            self._end_whole()
        elif self.started and not self.awaits_next:
            self._interrupted(reason, resumption.LOST)
        elif stale and self.instance is not None:
            self._num_attempts += 1
            self.context.connect(self, self.instance, True)
        else:
            self._fail_dispatch(reached=True, reason=reason)

    def _fail_dispatch(self, *, reached: bool, reason: str) -> None:
        self.context.metrics.retries.inc()
        self.context.table.change(msg.DispatchFailed(self.ticket, reached, reason))

    # -- a stream that another engine goes on with (`fork`, `goes_on_at`: moving.MovingStream) -------------------

    def _keep(self, events: bytes) -> None:
        """The client was sent these by the first engine."""
        assert self._log is not None
        self._log.append(events)
        self._log_left -= len(events)
        if self._log_left < 0 and self._read_log().why_not:
            self._log = None

    def _read_log(self) -> Resumption:
        found = self.resumption = self.resumption or Resumption(self.request, self.model, self.api)
        if self._log:
            found.read(b"".join(self._log))
            self._log, self._log_left = [], LOG_BYTES
        return found

    def _interrupted(self, reason: str, kind: str) -> None:
        """Its engine gives no more of an answer that has begun: another goes on with it, else it ends. Where the engine
        could have gone on (MOVED), what no other can go on with stays."""
        kept = self._read_log() if self._log is not None else self.resumption
        try:
            ending = kept.prepare() if kept is not None else b""
        except NotContinuable as why:
            self.context.metrics.continued(kind, "refused")
            ended = f"{reason}, and {self.left_behind}" if self.left_behind else reason
            kept, reason = None, f"{ended}; the answer cannot be continued: {why}"
        if kept is None and kind == resumption.MOVED:
            self.left_behind = "its instance answers at another address by now"
            if self.trace is not None:
                self.trace.stays(self.context.table.clock(), reason)
            return
        self._leave_engine()
        self._kept, self._log, self.is_flowing = b"", None, False
        if kept is None:
            self._fail(EngineFailed(reason))
        elif ending:
            self._continue(ending, True)
            self._finish()
        else:
            kept.lost(kind)
            if self.trace is not None:
                self.trace.broken(self.context.table.clock(), kind, reason, kept.num_tokens, self.instance)
            is_lost, is_reached = kind != resumption.MOVED, kind == resumption.ERROR
            self.context.table.change(msg.StreamBroken(self.ticket, reason, kept.num_tokens, is_lost, is_reached))

    def fork(self) -> Resumption | None:
        if self.stream and (not self.started or self.awaits_next or self._is_whole()):
            return None
        kept = self._read_log() if self._log is not None else self.resumption
        if kept is None:
            raise NotContinuable("it is no stream, or nothing is kept of it")
        kept = kept.fork()
        return None if kept.prepare() else kept

    def goes_on_at(self, kept: Resumption, instance: Instance, engine: EngineSource | None) -> None:
        self._leave_engine()
        self._kept, self._log, self.is_flowing, self.is_deserted = b"", None, False, False
        self.resumption, self.instance, self.engine = kept, instance, engine
        self._num_attempts += 1
        kept.lost(resumption.DRAINED)
        if engine is not None:
            engine.exchange = self
            if self.client.write_paused:
                engine.pause()
        self.context.table.change(msg.StreamMoved(self.ticket, kept.num_tokens))

    def _splice(self, engine: EngineSource, kept: Resumption, body: bytes, complete: bool) -> None:
        """Part of what a later engine gives: the client gets what it does not have yet, as if of the first."""
        if kept.is_waiting:
            if not body and not complete:
                return
            if engine.status != 200 or not engine.is_sse:
                self._leave_engine()
                said = api_errors.read(engine.status, body, self.request.path)
                if said.status >= 500 or said.status == 429:
                    self._fail_dispatch(reached=True, reason=f"the next engine answered: {said.message}")
                else:
                    self._fail(EngineFailed(f"the next engine does not go on with the answer: {said.message}"))
                return
            kept.is_waiting = False
            self.context.metrics.continued(kept.reason, "continued")
            if self.trace is not None:
                self.trace.continued(self.context.table.clock(), self.instance)
            if self.context.table.controller.tracks_tokens:
                self.context.table.take(msg.FirstToken(self.ticket))
        try:
            out, failure = kept.splice(body, self.context.limits.event_bytes)
        except NotContinuable as why:
            self._leave_engine()
            self._fail(EngineFailed(f"the next engine went on with the answer, and {why}"))
            return
        self._continue(out, complete and not failure)
        if failure:
            self._interrupted(failure, resumption.ERROR)

    # -- the end ------------------------------------------------------------------------------------------------

    def _is_whole(self) -> bool:
        """Whether the client has been handed all of a stream but its last chunk."""
        return self.is_sse and self._collected is None and wire.is_over(self.request.path, self._last)

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
        self._close()
        self._leave_engine()
        self._report(left=not whole)

    def stop(self) -> None:
        """The router ends this request itself (its drain is over)."""
        if self.done:
            return
        if self._is_whole():
            self._end_whole()
            return
        self._leave_engine()
        self.keep_alive = False
        self._fail(STOPPING)

    def _finish(self) -> None:
        self._close()
        self._report(left=False)
        self.client.exchange_over(self.keep_alive)

    def _close(self) -> None:
        self.done, self.ended = True, _monotonic()
        self._stop_timer()
        if self.moving is not None:
            self.moving.end()
        if self.resumption is not None and self.resumption.is_waiting:
            outcome = "client_left" if self.status == 499 else "failed"
            self.context.metrics.continued(self.resumption.reason, outcome)

    def _report(self, *, left: bool) -> None:
        """Count it, report it, and let the controller give its place to the next."""
        context = self.context
        context.buffered_bytes -= len(self.request.body)
        context.report(self)
        if left:
            context.table.end(msg.ClientLeft(self.ticket))
            return
        took_s = self.ended - self.dispatched if self.status == 200 and not self.num_continued else 0.0
        num_tokens = self.token_counts()[1] if took_s and context.table.controller.tracks_tokens else 0
        context.table.end(msg.RequestEnded(self.ticket, took_s, num_tokens))

    def token_counts(self) -> tuple[int, int, bool]:
        """(prompt, response, exact) of an answer that is over; see wire.count_tokens. Where the engine gives no usage
        (the client asked for none), the prompt is as long as its body is read to be, which is not exact."""
        if self.resumption is not None and self.resumption.usage is not None:
            return *self.resumption.usage, False
        if self._counted is None:
            tail = self._last[-wire.TAIL_BYTES :]
            if len(tail) < wire.TAIL_BYTES:
                tail = self._previous[-wire.TAIL_BYTES :] + tail
            prompt, response, exact = wire.count_tokens(self._opening + tail, self.num_events)
            self._counted = (prompt or (0 if exact else self.prompt_tokens), response, exact)
        return self._counted

    # -- bytes --------------------------------------------------------------------------------------------------

    def client_paused(self, paused: bool) -> None:
        """The client reads slower than its answer comes, or has caught up: so does the engine's connection."""
        if self.engine is not None:
            (self.engine.pause if paused else self.engine.resume)()

    def _frame(self, data: bytes) -> bytes:
        return wire.chunk(data) if self.chunked else data

    def _write(self, data: bytes) -> None:
        self.client.write(self._frame(data))

    def _head(self, status: int, headers: bytes, length: int | None) -> bytes:
        if length is not None:
            headers += wire.content_length(length)
        elif self.chunked:
            headers += wire.CHUNKED
        self.keep_alive = self.keep_alive and not self.context.table.stage
        return wire.head(status, headers, keep_alive=self.keep_alive)

    def _own_headers(self) -> bytes:
        own = b"x-request-id: %b\r\ntraceparent: %b\r\n" % (self.request_id.encode(), self.traceparent.encode())
        return own + self.context.access.cors(self.request) + wire.instance_headers(self.instance)

    def _timings(self) -> bytes:
        phases = self.instance.phases if self.cold and self.instance is not None else ()
        return wire.server_timing(self.queue_s, phases, self.router_s)
