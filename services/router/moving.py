"""The move of a stream to another engine, which begins before the first one is left (make before break).

Meanwhile the first engine's output is held, so that the other continues where the client's part ends. The other's first
byte moves the stream. The stream stays, with the held output passed on, if the other does not begin within
`move_within_s`, is unreachable or refuses, or if the first completes it. If the first is lost, the other continues, as
after any loss.
"""

from collections.abc import Callable
from typing import Any, Protocol

from glowplug.controllers.router.messages import MoveFailed, MoveStream
from glowplug.domain.instance import Instance
from glowplug.services.router import api_errors
from glowplug.services.router.continuation import NotContinuable
from glowplug.services.router.ends import EngineReader, EngineSource
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.resumption import DRAINED, LOG_BYTES, Resumption
from glowplug.services.router.tracing import Way


class MovingStream(EngineReader, Protocol):
    """An exchange, as seen by its stream's move."""

    ticket: int
    request: HttpRequest
    needs: str
    instance: Instance | None
    way: Way
    moving: "Move | None"

    @property
    def context(self) -> PortContext[Any]: ...

    def fork(self) -> Resumption | None:
        """Return a copy of the resumption; None before the stream's beginning or at its end. Raises NotContinuable."""
        ...

    def request_with(self, target: bytes, body: bytes, credentials: bytes) -> bytes: ...

    def goes_on_at(self, kept: Resumption, instance: Instance, engine: EngineSource | None) -> None:
        """Give the stream to the other instance, over `engine` if connected."""
        ...


class Move:
    """One attempt to move a stream: the reader of the other engine until it begins."""

    def __init__(self, stream: MovingStream, kept: Resumption, instance: Instance) -> None:
        self.engine: EngineSource | None = None
        self.is_flowing = False
        self._stream, self._kept, self._instance = stream, kept, instance
        self._first = stream.engine
        self._held: list[bytes] = []  # the first engine's output
        self._held_left = LOG_BYTES
        self._is_over = self._has_begun = False
        context = stream.context
        self._timer = context.loop.call_later(context.table.controller.params.move_within_s, self._late)

    def begin(self) -> None:
        self._stream.context.connect(self, self._instance, False)

    def end(self) -> None:
        self._is_over = True
        self._timer.cancel()
        self._stream.moving = None
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.abandon()

    def stay(self, why: str, *, complete: bool = False, is_asked: bool = True, is_unreachable: bool = False) -> None:
        """Leave the stream with its first engine. `complete`: that engine has ended it."""
        if self._is_over:
            return
        stream, first = self._stream, self._first
        self.end()
        stream.context.metrics.continued(DRAINED, "stayed")
        stream.way.stay(stream.context.table.clock(), why)
        left_to = stream.engine
        failed = MoveFailed(stream.ticket, is_asked=is_asked, is_unreachable=is_unreachable)
        stream.context.table.change(failed)
        if first is not None and stream.engine is left_to and stream.moving is None:  # else another one has it
            stream.engine_data(first, b"".join(self._held), complete)

    def _late(self) -> None:
        self.stay(f"{self._instance.instance_id} has not begun with it in time")

    # -- the first engine -----------------------------------------------------------------------------------------

    def hold(self, body: bytes, complete: bool) -> None:
        """Hold the first engine's output; stay if it is complete or too long."""
        self._held.append(body)
        self._held_left -= len(body)
        if complete or self._held_left < 0:
            self.stay("its first engine was sooner", complete=complete, is_asked=False)

    def first_lost(self) -> None:
        engine, self.engine = self.engine, None
        self.end()
        self._stream.goes_on_at(self._kept, self._instance, engine)
        if engine is None:
            self._stream.context.connect(self._stream, self._instance, False)

    # -- the other engine -----------------------------------------------------------------------------------------

    def engine_request(self, credentials: bytes) -> bytes:
        return self._stream.request_with(self._kept.target, self._kept.body, credentials)

    def attempt(self) -> Callable[[], bool]:
        return lambda: not self._is_over and self.engine is None

    def attach(self, engine: EngineSource) -> None:
        self.engine = engine

    def engine_data(self, engine: EngineSource, body: bytes, complete: bool) -> None:
        if not body and not complete:
            return
        if engine.status != 200 or not engine.is_sse:
            said = api_errors.read(engine.status, body, self._stream.request.path)
            self.stay(f"{self._instance.instance_id} answered: {said.message}")
            return
        self._has_begun, self.engine = True, None
        self.end()
        self._stream.goes_on_at(self._kept, self._instance, None if complete else engine)
        self._stream.engine_data(engine, body, complete)

    def pass_on(self, body: bytes, chunk: bytes) -> None:
        raise AssertionError("nothing flows before the stream has moved")

    def engine_over(self) -> None:
        if self._has_begun:
            self._stream.engine_over()

    def engine_unreachable(self, reason: str) -> None:
        self.stay(reason, is_unreachable=True)

    def engine_refused(self, reason: str) -> None:
        self.stay(reason, is_unreachable=True)

    def engine_lost(self, reason: str, *, stale: bool) -> None:
        if stale:
            self._stream.context.connect(self, self._instance, True)
        else:
            self.stay(reason)


def begin(stream: MovingStream, effect: MoveStream) -> None:
    context, kept, is_refused = stream.context, None, False
    try:
        kept = stream.fork()
    except NotContinuable as why:
        is_refused = True
        context.metrics.continued(DRAINED, "refused")
        said = f"{effect.reason}; the answer cannot be continued: {why}"
        stream.way.stay_put(context.table.clock(), DRAINED, said, stream.instance)
    if kept is None or (stream.needs and stream.needs in effect.instance.lacks):
        context.table.change(MoveFailed(stream.ticket, is_refused=is_refused))
        return
    stream.way.leave(context.table.clock(), DRAINED, effect.reason, kept.num_tokens, stream.instance)
    stream.is_flowing = False
    stream.moving = Move(stream, kept, effect.instance)
    stream.moving.begin()
