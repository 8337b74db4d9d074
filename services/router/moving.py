"""The move of a stream to another engine, which begins before the first one is left (make before break).

Meanwhile the first engine's output is held, so that the other continues where the client's part ends. The other's first
byte moves the stream. The stream stays, with the held output passed on, if the other does not begin within
`move_within_s`, is unreachable or refuses, or if the first completes it. If the first is lost, the other continues, as
after any loss.
"""

from collections.abc import Callable
from typing import Any, Protocol

from glowplug.domain.instance import Instance
from glowplug.services.router import api_errors
from glowplug.services.router.ends import EngineReader, EngineSource
from glowplug.services.router.exchange_states import ExchangeState
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.resumption import LOG_BYTES, Resumption


class MovedExchange(EngineReader, Protocol):
    """An exchange, as seen by its stream's move."""

    request: HttpRequest

    @property
    def context(self) -> PortContext[Any]: ...

    def request_with(self, target: bytes, body: bytes, credentials: bytes) -> bytes: ...
    def stays(self, why: str, held: bytes, *, complete: bool, is_asked: bool, is_unreachable: bool) -> None: ...
    def goes_on_at(self, kept: Resumption, instance: Instance, engine: EngineSource | None) -> None: ...


class MovingAnswer:
    """One attempt to move a stream: the reader of the other engine while that is ASKED. It is ANSWERING once the stream
    has moved, and else ENDED."""

    def __init__(self, stream: MovedExchange, kept: Resumption, instance: Instance) -> None:
        self.state = ExchangeState.ASKED
        self.engine: EngineSource | None = None
        self._stream, self._kept, self._instance = stream, kept, instance
        self._held: list[bytes] = []  # the first engine's output
        self._held_left = LOG_BYTES
        context, why = stream.context, f"{instance.instance_id} has not started the request in time"
        self._timer = context.loop.call_later(context.table.controller.params.move_within_s, self.stay, why)

    def end(self, state: ExchangeState = ExchangeState.ENDED) -> None:
        self.state = state
        self._timer.cancel()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.abandon()

    def stay(self, why: str, *, complete: bool = False, is_asked: bool = True, is_unreachable: bool = False) -> None:
        if self.state is ExchangeState.ASKED:
            self.end()
            held = b"".join(self._held)
            self._stream.stays(why, held, complete=complete, is_asked=is_asked, is_unreachable=is_unreachable)

    # -- the first engine -----------------------------------------------------------------------------------------

    def hold(self, body: bytes, complete: bool) -> None:
        """Hold the first engine's output; stay if it is complete or too long."""
        self._held.append(body)
        self._held_left -= len(body)
        if complete or self._held_left < 0:
            self.stay("its first engine answered sooner", complete=complete, is_asked=False)

    def first_lost(self) -> None:
        engine, self.engine = self.engine, None
        self.end()
        self._stream.goes_on_at(self._kept, self._instance, engine)
        if engine is None:
            self._stream.context.connect(self._stream, self._instance, False)

    # -- the other engine -----------------------------------------------------------------------------------------

    def engine_request(self, credentials: bytes) -> bytes:
        return self._stream.request_with(self._kept.target, self._kept.body, credentials)

    def wanted(self) -> Callable[[], bool]:
        return lambda: self.state is ExchangeState.ASKED and self.engine is None

    def attach(self, engine: EngineSource) -> None:
        self.engine = engine

    def engine_data(self, engine: EngineSource, body: bytes, complete: bool) -> None:
        if not body and not complete:
            return
        if engine.status != 200 or not engine.is_sse:
            said = api_errors.read(engine.status, body, self._stream.request.path)
            self.stay(f"{self._instance.instance_id} answered: {said.message}")
            return
        self.engine = None
        self.end(ExchangeState.ANSWERING)
        self._stream.goes_on_at(self._kept, self._instance, None if complete else engine)
        self._stream.engine_data(engine, body, complete)

    def pass_on(self, body: bytes, chunk: bytes) -> None:
        raise AssertionError("nothing flows before the stream has moved")

    def engine_over(self) -> None:
        if self.state is ExchangeState.ANSWERING:
            self._stream.engine_over()

    def engine_unreachable(self, reason: str) -> None:
        self.stay(reason, is_unreachable=True)

    engine_refused = engine_unreachable

    def engine_lost(self, reason: str, *, stale: bool) -> None:
        if stale:
            self._stream.context.connect(self, self._instance, True)
        else:
            self.stay(reason)
