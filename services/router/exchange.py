"""One request's life on the data port: arrived, held, sent to an engine, answered, reported.

An exchange owns its client (ClientSink) and its engine (EngineSource). Answers pass through untouched, streams in whole
SSE events, so that an engine's death ends them with one error event; errors are translated to the client's API
(api_errors.py).

An answer is whole once the client has its end: of HTTP's framing, or the closing event (`[DONE]`), on which clients
close before the last chunk. It counts as 200, even if a side leaves or dies then. A plain chunked answer ends only with
its last chunk.

A request without a byte of answer is sent again; engines keep nothing of it. Another engine continues a begun stream
(resumption.py); if none can, it ends with the error event. Any other begun answer breaks off.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from glowplug.controllers.router import messages as msg
from glowplug.domain.errors import EngineFailed, GlowplugError
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.engines.apis import EngineApi
from glowplug.services.router import api_errors, moving, resumption, token_counts, wire
from glowplug.services.router.api_errors import STOPPING, ApiError
from glowplug.services.router.continuation import NotContinuable
from glowplug.services.router.ends import ClientSink, EngineSource
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.moving import Move
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.request_body import tool_choice_refused
from glowplug.services.router.resumption import LOG_BYTES, Resumption
from glowplug.services.router.tracing import Way
from glowplug.services.router.usage_journal import NO_SLOT
from glowplug.services.router.wire import DONE_ENDS, EVENT_ENDS

_monotonic = time.monotonic


@dataclass(slots=True, eq=False, repr=False)  # prompts never reach a log
class Exchange:
    """One complete request for a known model, and its answer. `arrived_at` is epoch seconds, other times are
    monotonic."""

    context: "PortContext[Exchange]"
    client: ClientSink
    request: HttpRequest
    model: Model
    api: EngineApi
    stream: bool
    needs: str  # a feature that the instance must not lack
    prompt_tokens: int  # estimated
    way: Way
    traceparent: str
    ticket: int = field(init=False)
    arrived: float = field(init=False)
    keep_alive: bool = field(init=False)
    chunked: bool = field(init=False)  # the client's answer
    unread: Any = None  # the body's fields, for an estimate of the answer's length
    instance: Instance | None = None
    engine: EngineSource | None = None
    cold: bool = False
    dispatched: float = 0.0
    queue_s: float = 0.0
    router_s: float = 0.0
    head_sent: bool = False
    started: bool = False
    first_byte: float = 0.0
    is_sse: bool = False
    is_flowing: bool = False  # whole chunks may pass unparsed
    num_events: int = 0
    resumption: Resumption | None = None
    moving: Move | None = None
    is_deserted: bool = False  # the engine's node has left the fleet
    left_behind: str = ""  # why the engine has no route, for a stream that no other can continue
    status: int = 0
    error_code: str = ""
    done: bool = False
    ended: float = 0.0
    _num_attempts: int = 0
    _timer: asyncio.TimerHandle | None = None
    _collected: list[bytes] | None = None
    _kept: bytes = b""  # the beginning of an incomplete event
    _log: list[bytes] | None = None  # sent events unknown to `resumption`; None: none are kept
    _log_left: int = LOG_BYTES
    opening: bytes = b""  # first bytes of an Anthropic stream, with its prompt's token count
    previous: bytes = b""
    last: bytes = b""  # the bytes sent last, and those before them, for the final token counts
    counted: tuple[int, int, bool] | None = None
    cached_tokens: int = -1  # of the prompt; -1: unknown
    client_counts: bool = False  # the client sums the tokens of several sequences
    slot: int = NO_SLOT  # in the usage journal

    def __post_init__(self) -> None:
        request = self.request
        self.ticket = next(self.context.table.tickets)
        self.arrived, self.keep_alive, self.chunked = request.complete, request.keep_alive, request.is_http11

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_continued(self) -> int:
        return self.resumption.num_times if self.resumption is not None else 0

    @property
    def arrived_at(self) -> float:
        return self.request.complete_at

    # -- the controller's decisions -----------------------------------------------------------------------------

    def dispatch(self, effect: msg.Dispatch) -> None:
        self._stop_timer()
        instance = self.instance = effect.instance
        self.is_deserted = False
        if not self.awaits_next:
            self.queue_s, self.cold = effect.held_s, self.cold or effect.cold
        if self.needs and self.needs in instance.lacks:
            self._fail(tool_choice_refused(self.model))
            return
        self._num_attempts += 1
        self.context.journal.sent(self)
        self.dispatched = _monotonic()
        self.way.send(self.dispatched - self.arrived)
        if self.head_sent and not self.started:
            self._write(b": glowplug ready %b\n\n" % self._timings())
        self.context.connect(self, instance, False)

    def hold(self, effect: msg.Hold) -> None:
        """Hold the request; a stream's client gets keep-alive comments after `keepalive_after_s`."""
        self.context.journal.held(self)
        if not self.awaits_next:
            self.way.hold(effect.eta_s)
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
        """Write an SSE comment where it harms no answer. Returns whether the head has been sent."""
        between = self.last.endswith(EVENT_ENDS) if self.started else self.head_sent
        if between and (self.is_sse or not self.started) and not self.client.write_paused:
            self._write(b":\n\n")
        return self.head_sent

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def awaits_next(self) -> bool:
        return self.resumption is not None and self.resumption.is_waiting

    def recall(self, effect: msg.Recall) -> None:
        """Take the request back from its instance. A begun answer stays unless the engine has ended or another can
        continue it."""
        if self.done or self.instance is None:
            return
        if self.moving is not None:  # the controller counts the stream at the new instance
            self.moving.stay(effect.reason)
        elif self.started and not self.awaits_next:
            if not (effect.ended or effect.moved or effect.gives_way):
                self.is_deserted = True
            elif self._is_whole():
                self._end_whole()
            elif self.engine is not None:
                self._interrupted(effect.reason, resumption.why(effect))
        elif not effect.moved:
            self._leave_engine()
            self._num_attempts += 1  # drops a connection in the making
            (self.engine_unreachable if effect.gives_way else self.engine_refused)(effect.reason)

    def move(self, effect: msg.MoveStream) -> None:
        moving.begin(self, effect)

    def reject(self, effect: msg.Reject) -> None:
        self._fail(ApiError(effect.status, effect.message, effect.error_type, effect.code, None, effect.retry_after_s))

    def _fail(self, error: GlowplugError) -> None:
        """End the request with an error; a begun answer that is no stream breaks off."""
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

    # -- the engine's answer ------------------------------------------------------------------------------------

    def engine_request(self, credentials: bytes) -> bytes:
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
        attempt = self._num_attempts
        return lambda: not self.done and self._num_attempts == attempt and self.engine is None

    def attach(self, engine: EngineSource) -> None:
        self.engine = engine
        if self.client.write_paused:
            engine.pause()

    def pass_on(self, body: bytes, chunk: bytes) -> None:
        if self._log is not None:
            if b'"abort"' in body or b'data: {"error"' in body:  # an engine's failure, or a text like one
                self._continue(body, False)
                return
            self._keep(body)
        self.previous, self.last = self.last, body
        self.context.journal.words[self.slot] = self.num_events = self.num_events + body.count(b"data: {")
        if body.endswith(DONE_ENDS) or (body.startswith(b"event:") and b'_tokens"' in body):
            token_counts.note(self)
        self.client.write(chunk)

    def engine_data(self, engine: EngineSource, body: bytes, complete: bool) -> None:
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
            num_bytes = len(body)
            if wire.is_anthropic(self.request.path):
                body = wire.with_message_id(body)
            out = self._begin(engine, body, len(body) - num_bytes)
            if self.is_sse and self._collected is None:
                if self.context.max_continuations:
                    self._log = []
                if wire.is_anthropic(self.request.path):
                    if wire.begins_late(body):
                        body = wire.message_start(self.request_id, self.model.name, self.prompt_tokens) + body
                    self.opening = body[: wire.TAIL_BYTES]
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
                self.previous, self.last = self.last, body
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
                self.previous, self.last, self._kept = self.last, self._kept, b""
            if self.chunked:
                out += wire.LAST_CHUNK
        if out:
            self.context.journal.words[self.slot] = self.num_events
            if not self.is_sse or b'_tokens"' in body or b'"timings"' in body:
                token_counts.note(self)
            self.client.write(out)
        can_flow = self.is_sse and self.chunked and self._collected is None and not self.num_continued
        self.is_flowing = can_flow and not self._kept
        if failure:
            self._interrupted(failure, resumption.ERROR)

    def _begin(self, engine: EngineSource, first: bytes, grown: int) -> bytes:
        """Begin the answer and return its head; b"" if the client has one, or for an engine's error. `grown`: bytes
        added to the body."""
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
            self.chunked, length = False, 0
        elif length is not None:
            self.chunked, length = False, length + grown
        elif not self.chunked:
            self.keep_alive = False  # HTTP/1.0: the answer ends with the connection
        timings = b"server-timing: %b\r\n" % self._timings()
        return self._head(engine.status, b"".join(engine.headers) + self._own_headers() + timings, length)

    def engine_over(self) -> None:
        if self.done or self.awaits_next:  # the answer failed, and another engine has been asked
            return
        if self._collected is not None:
            answer = b"".join(self._collected)
            self._fail(api_errors.read(self.status, wire.starts_stream(answer) or answer, self.request.path))
        else:
            self._finish()

    def engine_unreachable(self, reason: str) -> None:
        self.context.table.change(msg.DispatchFailed(self.ticket, False, reason))

    def engine_refused(self, reason: str) -> None:
        """Have an unstarted request sent elsewhere; this counts as no failure."""
        if not self.done:
            self._fail_dispatch(reached=False, reason=reason)

    def engine_lost(self, reason: str, *, stale: bool) -> None:
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

    # -- continuation by another engine (`fork`, `goes_on_at`: moving.MovingStream) ------------------------------

    def _keep(self, events: bytes) -> None:
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
        """Leave the engine in mid-stream: another continues the answer, or it ends with an error. An answer that none
        can continue stays at a running engine (MOVED)."""
        kept = self._read_log() if self._log is not None else self.resumption
        try:
            ending = kept.prepare() if kept is not None else b""
        except NotContinuable as why:
            self.context.metrics.continued(kind, "refused")
            ended = f"{reason}, and {self.left_behind}" if self.left_behind else reason
            kept, reason = None, f"{ended}; the answer cannot be continued: {why}"
        if kept is None and kind == resumption.GAVE_WAY:
            self.context.table.take(msg.MoveFailed(self.ticket, is_refused=True))
            return
        if kept is None and kind == resumption.MOVED:
            self.left_behind = "its instance answers at another address by now"
            self.way.stay_put(self.context.table.clock(), kind, reason, self.instance)
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
            self.way.leave(self.context.table.clock(), kind, reason, kept.num_tokens, self.instance)
            is_lost, is_reached = kind not in resumption.ENGINE_RUNS, kind == resumption.ERROR
            self.context.table.change(msg.StreamBroken(self.ticket, reason, kept.num_tokens, is_lost, is_reached))

    def fork(self) -> Resumption | None:
        if self.stream and (not self.started or self.awaits_next or self._is_whole()):
            return None
        kept = self._read_log() if self._log is not None else self.resumption
        if kept is None:
            raise NotContinuable("the answer is not a stream, or the router kept nothing of it")
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
            self.way.go_on(self.context.table.clock(), self.instance)
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
        return self.is_sse and self._collected is None and wire.is_over(self.request.path, self.last)

    def _end_whole(self) -> None:
        self._leave_engine()
        self._continue(b"", True)
        self._finish()

    def _leave_engine(self) -> None:
        if self.engine is not None:
            self.engine.abandon()
            self.engine = None

    def client_left(self) -> None:
        if self.done:
            return
        whole = self._is_whole() and not self.client.write_paused  # else the end is still in our buffer
        if not whole:
            self.status, self.error_code = 499, "client_left"
        self._close()
        self._leave_engine()
        self._report(left=not whole)

    def stop(self) -> None:
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
        context = self.context
        context.buffered_bytes -= len(self.request.body)
        context.report(self)
        if left:
            context.table.end(msg.ClientLeft(self.ticket))
            return
        took_s = self.ended - self.dispatched if self.status == 200 and not self.num_continued else 0.0
        num_tokens = self.token_counts()[1] if took_s and context.table.controller.tracks_tokens else 0
        context.table.end(msg.RequestEnded(self.ticket, took_s, num_tokens, self.cached_tokens if num_tokens else -1))

    token_counts = token_counts.token_counts

    # -- bytes --------------------------------------------------------------------------------------------------

    def client_paused(self, paused: bool) -> None:
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
        return own + self.request.notes + self.context.access.cors(self.request) + wire.instance_headers(self.instance)

    def _timings(self) -> bytes:
        phases = self.instance.phases if self.cold and self.instance is not None else ()
        return wire.server_timing(self.queue_s, phases, self.router_s)
