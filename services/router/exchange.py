"""One request's life on the data port: arrived, held, sent to an engine, answered, reported.

exchange_states.py has its states and their parts; the methods follow its life from top to bottom.

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
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from glowplug.controllers.router import messages as msg
from glowplug.domain.errors import EngineFailed, GlowplugError
from glowplug.domain.instance import Instance, Phase
from glowplug.domain.model import Model
from glowplug.engines.apis import EngineApi
from glowplug.services.router import api_errors, resumption, wire
from glowplug.services.router import exchange_states as states
from glowplug.services.router.api_errors import STOPPING, refused
from glowplug.services.router.continuation import NotContinuable
from glowplug.services.router.ends import ClientSink, EngineSource
from glowplug.services.router.exchange_states import AnswerKind, ExchangeState
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.moving import MovingAnswer
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.request_body import tool_choice_refused
from glowplug.services.router.resumption import LOG_BYTES, Resumption
from glowplug.services.router.tracing import Way
from glowplug.services.router.usage_journal import NO_SLOT
from glowplug.services.router.wire import DONE_ENDS, EVENT_ENDS

WAITING, ASKED, ANSWERING, FLOWING, MOVING, BROKEN, CONTINUING, ENDED = ExchangeState
BODY, STREAM, ERROR = AnswerKind
PLAIN, CHUNKED = states.Framing.PLAIN, states.Framing.CHUNKED
LEFT = refused(499, "The client has left.", "client_left")
_monotonic = time.monotonic


class Exchange(Struct, eq=False):
    """One complete request for a known model, and its answer."""

    __repr__ = object.__repr__  # prompts never reach a log
    context: "PortContext[Exchange]"
    ticket: int
    client: ClientSink
    request: HttpRequest
    model: Model
    api: EngineApi
    stream: bool
    needs: str  # a feature that the instance must not lack
    prompt_tokens: int  # estimated
    way: Way
    traceparent: str
    unread: Any = None  # the body's fields, for an estimate of the answer's length
    slot: int = NO_SLOT  # in the usage journal
    state: ExchangeState = WAITING
    # Measured up to the first byte.
    queue_s: float = 0.0
    router_s: float = 0.0
    cold: bool = False
    phases: Sequence[Phase] = ()  # of the start that it waited for
    num_continued: int = 0
    # The parts that some states alone have.
    timer: asyncio.TimerHandle | None = None  # of the next keep-alive comment
    attempt: states.Attempt | None = None
    engine: EngineSource | None = None
    framing: states.Framing | None = None  # of the client's answer; None: it has no head
    answer: states.Answer | None = None
    resumption: Resumption | None = None
    moving: MovingAnswer | None = None
    ending: states.Ending | None = None

    @property
    def instance(self) -> Instance | None:
        """The one that it was last sent to."""
        return self.attempt.instance if self.attempt is not None else None

    # -- held by the controller -----------------------------------------------------------------------------------

    def hold(self, effect: msg.Hold) -> None:
        """Hold the request; a stream's client gets keep-alive comments after `keepalive_after_s`."""
        self.context.journal.held(self)
        if self.state is WAITING:
            self.way.hold(effect.eta_s)
        if self.stream and self.timer is None:
            since = self.resumption.broken_at if self.resumption is not None else self.request.complete
            delay_s = self.context.limits.keepalive_after_s - (_monotonic() - since)
            self.timer = self.context.loop.call_later(max(delay_s, 0.0), self._keep_client)

    def _keep_client(self) -> None:
        context, request = self.context, self.request
        self.timer = context.loop.call_later(context.limits.keepalive_every_s, self._keep_client)
        if self.client.write_paused:
            return
        if self.framing is None:
            context.table.take(msg.HeadDue(self.ticket))
            if self.state is ENDED:  # refused, with a status of its own
                return
        eta_s = context.table.eta_s(self.model.key)
        comment = b": glowplug waiting model=%b eta_s=%.1f\n\n" % (self.model.key.encode(), eta_s)
        if self.framing is not None:
            self._write(comment)
            return
        self.framing = CHUNKED if request.is_http11 else PLAIN
        request.keep_alive = request.keep_alive and request.is_http11
        headers = wire.EVENT_STREAM_HEADERS + self._own_headers()
        self.client.write(self._head(200, headers, None) + self._frame(comment))

    def reject(self, effect: msg.Reject) -> None:
        self._fail(effect.error)

    # -- sent to an instance --------------------------------------------------------------------------------------

    def dispatch(self, effect: msg.Dispatch) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        instance, is_first, now = effect.instance, self.state is WAITING, _monotonic()
        self.attempt = states.Attempt(instance, now)
        if is_first:
            self.queue_s, self.cold = effect.held_s, self.cold or effect.cold
        if self.cold:
            self.phases = instance.phases
        if self.needs and self.needs in instance.lacks:
            self._fail(tool_choice_refused(self.model))
            return
        self.state = ASKED if is_first else CONTINUING
        self.context.journal.sent(self)
        self.way.send(now - self.request.complete)
        if is_first and self.framing is not None:
            self._write(b": glowplug ready %b\n\n" % wire.server_timing(self.queue_s, self.phases, self.router_s))
        self.context.connect(self, instance, False)

    def wanted(self) -> Callable[[], bool]:
        attempt = self.attempt
        return lambda: self.state in states.SENT and self.attempt is attempt and self.engine is None

    def engine_request(self, credentials: bytes) -> bytes:
        request, body, kept = self.request, self.request.body, self.resumption
        if kept is not None:
            return self.request_with(kept.target, kept.body, credentials)
        self.router_s = max(_monotonic() - request.complete - self.queue_s, 0.0)
        if self.stream and self.api.token_ids and self.context.max_continuations:
            body = wire.asking_for_ids(request.path, body)
        return self.request_with(request.target, body, credentials)

    def request_with(self, target: bytes, body: bytes, credentials: bytes) -> bytes:
        return b"POST %b HTTP/1.1\r\n%b%bx-request-id: %b\r\ntraceparent: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            target,
            self.request.passed_headers(),
            credentials,
            self.request.request_id.encode(),
            self.traceparent.encode(),
            len(body),
            body,
        )

    def attach(self, engine: EngineSource) -> None:
        self.engine = engine
        if self.client.write_paused:
            engine.pause()

    def engine_unreachable(self, reason: str) -> None:
        self._back_to_controller(reason, reached=False)

    def engine_refused(self, reason: str) -> None:
        """Have an unstarted request sent elsewhere; this counts as no failure."""
        if self.state in states.SENT:
            self.context.metrics.retries.inc()
            self._back_to_controller(reason, reached=False)

    def _back_to_controller(self, reason: str, *, reached: bool) -> None:
        self.state = WAITING if self.state is ASKED else BROKEN
        self.context.table.change(msg.DispatchFailed(self.ticket, reached, reason))

    def recall(self, effect: msg.Recall) -> None:
        """Take the request back from its instance. A begun answer stays unless the engine has ended or another can
        continue it."""
        if self.moving is not None:  # the controller counts the stream at the new instance
            self.moving.stay(effect.reason)
        elif self.state in states.PASSING:
            if self.attempt is not None and not (effect.ended or effect.moved or effect.gives_way):
                self.attempt.is_deserted = True
            elif self._is_whole():
                self._end_whole()
            elif self.engine is not None:
                self._interrupted(effect.reason, resumption.why(effect))
        elif self.state in states.SENT and not effect.moved:
            self._leave_engine()
            (self.engine_unreachable if effect.gives_way else self.engine_refused)(effect.reason)

    # -- answered -------------------------------------------------------------------------------------------------

    def engine_data(self, engine: EngineSource, body: bytes, complete: bool) -> None:
        if self.state is ASKED:
            if body[:1] == b":" and engine.is_sse and engine.status == 200 and not complete:
                pings, body = wire.after_pings(body)
                self._ping(engine, pings)
            if body or complete:
                self._begin(engine, body, complete)
        elif self.state is CONTINUING:
            if body or complete:
                self._continue(engine, body, complete)
        elif self.moving is not None:
            self.moving.hold(body, complete)
        elif self.num_continued:
            self._splice(body, complete)
        else:
            self._pass(body, complete)

    def _ping(self, engine: EngineSource, pings: bytes) -> None:
        """Pass on comments of an engine that still reads the prompt: another may have the request yet."""
        if pings:
            head = self._begin_client(engine, 0) if self.framing is None else b""
            self.client.write(head + self._frame(pings))

    def _begin(self, engine: EngineSource, body: bytes, complete: bool) -> None:
        context, num_bytes, head = self.context, len(body), b""
        is_anthropic = self.request.path.startswith(wire.MESSAGES)
        if is_anthropic:
            body = wire.with_message_id(body)
        answer = self.answer = states.Answer(STREAM if engine.is_sse else BODY, engine.status, _monotonic())
        self.state = ANSWERING
        is_error = engine.status >= 400 or (engine.is_sse and wire.first_error(body))
        if is_error or (self.framing is not None and (engine.status != 200 or not engine.is_sse)):
            answer.kind, answer.collected = ERROR, []
        elif self.framing is None:
            head = self._begin_client(engine, len(body) - num_bytes)
        if answer.kind is STREAM:
            if context.max_continuations:
                answer.log = []
            if is_anthropic:
                if wire.begins_late(body):
                    body = wire.message_start(self.request.request_id, self.model.name, self.prompt_tokens) + body
                answer.opening = body[: wire.TAIL_BYTES]
            if context.table.controller.tracks_tokens:
                context.table.take(msg.FirstToken(self.ticket))
        self._pass(body, complete, head)

    def _begin_client(self, engine: EngineSource, grown: int) -> bytes:
        """Return the head of the client's answer. `grown`: bytes added to the body."""
        request, length = self.request, None if engine.is_sse else engine.length
        self.framing = PLAIN
        if engine.status in (204, 304):
            length = 0
        elif length is not None:
            length += grown
        elif request.is_http11:
            self.framing = CHUNKED
        else:
            request.keep_alive = False  # HTTP/1.0: the answer ends with the connection
        timings = b"server-timing: %b\r\n" % wire.server_timing(self.queue_s, self.phases, self.router_s)
        return self._head(engine.status, b"".join(engine.headers) + self._own_headers() + timings, length)

    def pass_on(self, body: bytes, chunk: bytes) -> None:
        answer = self.answer
        assert answer is not None
        log = answer.log
        if log is not None:
            if b'"abort"' in body or b'data: {"error"' in body:  # an engine's failure, or a text like one
                self._pass(body, False)
                return
            log.append(body)
            answer.log_left -= len(body)
            if answer.log_left < 0:
                self._shorten_log(answer)
        answer.previous, answer.last = answer.last, body
        self.context.journal.words[self.slot] = answer.num_events = answer.num_events + body.count(b"data: {")
        if body.endswith(DONE_ENDS) or (body.startswith(b"event:") and b'_tokens"' in body):
            self.note_counts()
        self.client.write(chunk)

    def _pass(self, body: bytes, complete: bool, out: bytes = b"") -> None:
        """Pass on a part of the answer, behind `out`: of a stream, the whole events."""
        answer, failure, is_chunked = self.answer, "", self.framing is CHUNKED
        assert answer is not None
        is_stream, collected = answer.kind is STREAM, answer.collected
        if body:
            if is_stream:
                answer.num_events += body.count(b"data: {")
                if answer.kept or not body.endswith(EVENT_ENDS):
                    body = answer.kept + body
                    end = wire.whole_events(body, self.context.limits.event_bytes)
                    body, answer.kept = body[:end], body[end:]
                if answer.log is not None:
                    if b'"abort"' in body or b'data: {"error"' in body:
                        body, failure = wire.before_failure(body)
                    answer.log.append(body)
                    answer.log_left -= len(body)
                    if answer.log_left < 0:
                        self._shorten_log(answer)
            if body:
                answer.previous, answer.last = answer.last, body
            if collected is not None:
                if sum(map(len, collected)) < self.context.limits.engine_error_bytes:
                    collected.append(body)
            elif not is_chunked:
                out += body
            elif body:
                out += b"%x\r\n%b\r\n" % (len(body), body)
        if complete and collected is None and not failure:
            if answer.kept:
                out += self._frame(answer.kept)
                answer.previous, answer.last, answer.kept = answer.last, answer.kept, b""
            if is_chunked:
                out += wire.LAST_CHUNK
        if is_stream and is_chunked and not self.num_continued:
            self.state = ANSWERING if answer.kept else FLOWING
        if out:
            self.context.journal.words[self.slot] = answer.num_events
            if not is_stream or b'_tokens"' in body or b'"timings"' in body:
                self.note_counts()
            self.client.write(out)
        if failure:
            self._interrupted(failure, resumption.ERROR)

    def token_counts(self) -> states.Counts:
        """Without the engine's usage the prompt's tokens are an estimate."""
        answer, kept = self.answer, self.resumption
        if answer is None:
            return self.prompt_tokens, 0, False, -1
        if kept is not None and kept.usage is not None:
            return *kept.usage, False, answer.counted[3] if answer.counted is not None else -1
        if answer.counted is None:
            answer.counted = self._count(answer)
        return answer.counted

    def _count(self, answer: states.Answer) -> states.Counts:
        last = answer.last[-wire.TAIL_BYTES :]
        tail = answer.opening + (answer.previous[-wire.TAIL_BYTES :] + last if len(last) < wire.TAIL_BYTES else last)
        prompt, response, exact = wire.count_tokens(tail, answer.num_events)
        cached = wire.cached_tokens(tail) if exact and b"cache" in tail else -1
        return prompt or (0 if exact else self.prompt_tokens), response, exact, cached

    def note_counts(self) -> None:
        """Put the engine's counts into the journal, before the client has them: they survive a kill."""
        answer = self.answer
        assert answer is not None
        counts = answer.counted
        if counts is None:
            if self.num_continued or self.client.counts_all:
                return
            counts = self._count(answer)
        if counts[2]:
            self.context.journal.counted(self.slot, counts[0], max(counts[3], 0), counts[1])

    def probe(self) -> bool:
        """Write an SSE comment where it harms no answer. Returns whether the head has been sent."""
        answer = self.answer
        if answer is None:
            is_harmless = self.framing is not None
        else:
            is_harmless = answer.kind is STREAM and answer.last.endswith(EVENT_ENDS)
        if is_harmless and not self.client.write_paused:
            self._write(b":\n\n")
        return self.framing is not None

    def client_paused(self, paused: bool) -> None:
        if self.engine is not None:
            (self.engine.pause if paused else self.engine.resume)()

    # -- between two engines --------------------------------------------------------------------------------------

    def engine_lost(self, reason: str, *, stale: bool) -> None:
        if self.moving is not None:
            self.moving.first_lost()
        elif self.state in states.PASSING:
            if self._is_whole():
                self._end_whole()
            else:
                self._interrupted(reason, resumption.LOST)
        elif self.state in states.SENT:
            if stale and self.attempt is not None:
                self.context.connect(self, self.attempt.instance, True)
            else:
                self.context.metrics.retries.inc()
                self._back_to_controller(reason, reached=True)

    def _shorten_log(self, answer: states.Answer) -> None:
        kept = self._read_log()
        if kept is not None and kept.why_not:
            answer.log = None

    def _read_log(self) -> Resumption | None:
        answer = self.answer
        if answer is None or answer.log is None:
            return self.resumption
        kept = self.resumption = self.resumption or Resumption(self.request, self.model, self.api)
        if answer.log:
            kept.read(b"".join(answer.log))
            answer.log, answer.log_left = [], LOG_BYTES
        return kept

    def _interrupted(self, reason: str, kind: str) -> None:
        """Leave the engine in mid-stream: another continues the answer, or it ends with an error. An answer that none
        can continue stays at a running engine (MOVED)."""
        answer, attempt, kept = self.answer, self.attempt, self._read_log()
        assert answer is not None and attempt is not None
        try:
            ending = kept.prepare() if kept is not None else b""
        except NotContinuable as why:
            self.context.metrics.continued(kind, "refused")
            moved = ", and its instance answers at another address by now" if attempt.has_moved else ""
            kept, reason = None, f"{reason}{moved}; the answer cannot be continued: {why}"
        if kept is None and kind == resumption.GAVE_WAY:
            self.context.table.take(msg.MoveFailed(self.ticket, is_refused=True))
            return
        if kept is None and kind == resumption.MOVED:
            attempt.has_moved = True
            self.way.stay_put(self.context.table.clock(), kind, reason, attempt.instance)
            return
        self._leave_engine()
        answer.kept, answer.log = b"", None
        if kept is None:
            self._fail(EngineFailed(reason))
        elif ending:
            self._pass(ending, True)
            self._finish()
        else:
            self.state, self.num_continued = BROKEN, self.num_continued + 1
            kept.lost(kind)
            self.way.leave(self.context.table.clock(), kind, reason, kept.num_tokens, attempt.instance)
            is_lost, is_reached = kind not in resumption.ENGINE_RUNS, kind == resumption.ERROR
            self.context.table.change(msg.StreamBroken(self.ticket, reason, kept.num_tokens, is_lost, is_reached))

    def _continue(self, engine: EngineSource, body: bytes, complete: bool) -> None:
        """Begin with the next engine's part of the answer."""
        kept = self.resumption
        assert kept is not None
        if engine.status != 200 or not engine.is_sse:
            self._leave_engine()
            said = api_errors.read(engine.status, body, self.request.path)
            if said.status >= 500 or said.status == 429:
                self.context.metrics.retries.inc()
                self._back_to_controller(f"the next engine answered: {said.message}", reached=True)
            else:
                self._fail(EngineFailed(f"the next engine does not continue the answer: {said.message}"))
            return
        self.state = ANSWERING
        self.context.metrics.continued(kept.reason, "continued")
        self.way.go_on(self.context.table.clock(), self.instance)
        if self.context.table.controller.tracks_tokens:
            self.context.table.take(msg.FirstToken(self.ticket))
        self._splice(body, complete)

    def _splice(self, body: bytes, complete: bool) -> None:
        kept = self.resumption
        assert kept is not None
        try:
            out, failure = kept.splice(body, self.context.limits.event_bytes)
        except NotContinuable as why:
            self._leave_engine()
            self._fail(EngineFailed(f"the next engine continued the answer, and {why}"))
            return
        self._pass(out, complete and not failure)
        if failure:
            self._interrupted(failure, resumption.ERROR)

    # -- moved to another engine before it leaves this one (moving.py) --------------------------------------------

    def move(self, effect: msg.MoveStream) -> None:
        context, kept, is_refused = self.context, None, False
        try:
            kept = self._fork()
        except NotContinuable as why:
            is_refused = True
            context.metrics.continued(resumption.DRAINED, "refused")
            said = f"{effect.reason}; the answer cannot be continued: {why}"
            self.way.stay_put(context.table.clock(), resumption.DRAINED, said, self.instance)
        if kept is None or (self.needs and self.needs in effect.instance.lacks):
            context.table.change(msg.MoveFailed(self.ticket, is_refused=is_refused))
            return
        self.way.leave(context.table.clock(), resumption.DRAINED, effect.reason, kept.num_tokens, self.instance)
        self.state, self.moving = MOVING, MovingAnswer(self, kept, effect.instance)
        context.connect(self.moving, effect.instance, False)

    def _fork(self) -> Resumption | None:
        """Return a copy of the resumption; None unless in mid-stream. Raises NotContinuable."""
        kept, is_midway = self._read_log(), self.state in states.PASSING and not self._is_whole()
        if kept is None and (is_midway or not self.stream):
            raise NotContinuable("the answer is not a stream, or the router kept nothing of it")
        if kept is None or not is_midway:
            return None
        kept = kept.fork()
        return None if kept.prepare() else kept

    def stays(self, why: str, held: bytes, *, complete: bool, is_asked: bool, is_unreachable: bool) -> None:
        """Stay with this engine, and pass on its output `held` meanwhile. `complete`: it has ended the stream."""
        engine, context = self.engine, self.context
        self.state, self.moving = ANSWERING, None
        context.metrics.continued(resumption.DRAINED, "stayed")
        self.way.stay(context.table.clock(), why)
        context.table.change(msg.MoveFailed(self.ticket, is_asked=is_asked, is_unreachable=is_unreachable))
        if self.state is ANSWERING and self.engine is engine:  # else another one has it
            (self._splice if self.num_continued else self._pass)(held, complete)

    def goes_on_at(self, kept: Resumption, instance: Instance, engine: EngineSource | None) -> None:
        """Leave this engine for the other instance, over `engine` if connected."""
        self._leave_engine()
        answer = self.answer
        assert answer is not None
        answer.kept, answer.log = b"", None
        self.state, self.moving, self.resumption = CONTINUING, None, kept
        self.attempt, self.engine = states.Attempt(instance, _monotonic()), engine
        self.num_continued += 1
        kept.lost(resumption.DRAINED)
        if engine is not None:
            engine.exchange = self
            if self.client.write_paused:
                engine.pause()
        self.context.table.change(msg.StreamMoved(self.ticket, kept.num_tokens))

    # -- ended ----------------------------------------------------------------------------------------------------

    def engine_over(self) -> None:
        answer = self.answer
        if answer is None or self.state not in states.PASSING:  # the answer failed, and another engine has been asked
            return
        if answer.collected is not None:
            said = b"".join(answer.collected)
            self._fail(api_errors.read(answer.status, wire.starts_stream(said) or said, self.request.path))
        else:
            self._finish()

    def stop(self) -> None:
        if self.state in states.PASSING and self._is_whole():
            self._end_whole()
        elif self.state is not ENDED:
            self._leave_engine()
            self._fail(STOPPING)

    def client_left(self) -> None:
        if self.state is ENDED:
            return
        is_whole = self._is_whole() and not self.client.write_paused  # else the end is still in our buffer
        self._leave_engine()
        self._end(None if is_whole else LEFT)

    def _is_whole(self) -> bool:
        answer = self.answer
        return answer is not None and answer.kind is STREAM and wire.is_over(self.request.path, answer.last)

    def _end_whole(self) -> None:
        self._leave_engine()
        self._pass(b"", True)
        self._finish()

    def _leave_engine(self) -> None:
        if self.engine is not None:
            self.engine.abandon()
            self.engine = None

    def _fail(self, error: GlowplugError) -> None:
        """End the request with an error; a begun answer that is not a stream breaks off."""
        request, answer = self.request, self.answer
        body = api_errors.body(request.path, error)
        if self.framing is None:
            headers = wire.JSON_HEADERS
            if (instance := self.instance) is not None:
                headers += wire.instance_headers(instance.instance_id, instance.emulated)
            if answer is not None:
                headers += b"server-timing: %b\r\n" % wire.server_timing(self.queue_s, self.phases, self.router_s)
            headers += api_errors.no_retry(error)
            more = b"traceparent: %b\r\n" % self.traceparent.encode() + api_errors.retry_after(error)
            request.keep_alive = self.client.respond(request, error.status, body, headers, more)
        else:
            request.keep_alive = False
            if answer is None or answer.kind is not BODY:
                self._write(api_errors.event(request.path, body))
                if self.framing is CHUNKED:
                    self.client.write(wire.LAST_CHUNK)
        self._finish(error)

    def _finish(self, error: GlowplugError | None = None) -> None:
        self._end(error)
        self.client.exchange_over(self.request.keep_alive)

    def _end(self, error: GlowplugError | None) -> None:
        """End and report it; only its client's connection is left to take back."""
        context, attempt = self.context, self.attempt
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.moving is not None:
            self.moving.end()
            self.moving = None
        if self.state in states.BETWEEN and self.resumption is not None:
            context.metrics.continued(self.resumption.reason, "client_left" if error is LEFT else "failed")
        status, code = self.answer.status if self.answer is not None else 0, ""
        if error is not None:
            status, code = error.status, error.code
        ending = states.Ending(_monotonic(), status, code)
        self.state, self.ending = ENDED, ending
        context.buffered_bytes -= len(self.request.body)
        context.report(self)
        took_s, num_tokens, cached_tokens = 0.0, 0, -1
        if ending.status == 200 and attempt is not None and not self.num_continued:
            took_s = ending.at - attempt.at
            if context.table.controller.tracks_tokens and self.answer is not None:
                _, num_tokens, _, cached_tokens = self.answer.counted or self.token_counts()
        context.table.end(msg.RequestEnded(self.ticket, took_s, num_tokens, cached_tokens if num_tokens else -1))

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _frame(self, data: bytes) -> bytes:
        return wire.chunk(data) if self.framing is CHUNKED else data

    def _write(self, data: bytes) -> None:
        self.client.write(self._frame(data))

    def _head(self, status: int, headers: bytes, length: int | None) -> bytes:
        request = self.request
        if length is not None:
            headers += wire.content_length(length)
        elif self.framing is CHUNKED:
            headers += wire.CHUNKED
        request.keep_alive = request.keep_alive and not self.context.table.stage
        return wire.head(status, headers, keep_alive=request.keep_alive)

    def _own_headers(self) -> bytes:
        request, attempt = self.request, self.attempt
        own = b"x-request-id: %b\r\ntraceparent: %b\r\n" % (request.request_id.encode(), self.traceparent.encode())
        own += request.notes
        if b"origin" in request.headers:
            own += self.context.access.cors(request)
        if attempt is not None:
            own += wire.instance_headers(attempt.instance.instance_id, attempt.instance.emulated)
        return own
