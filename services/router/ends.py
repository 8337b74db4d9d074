"""Protocols between an exchange and its connections to client and engine."""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from glowplug.services.router import wire
from glowplug.services.router.exchange_states import ExchangeState
from glowplug.services.router.http_request import HttpRequest


class Answerer(Protocol):
    """An exchange, or a slow call of the router's own, as seen by the client's connection."""

    def client_left(self) -> None: ...

    def client_paused(self, paused: bool) -> None: ...

    def probe(self) -> bool:
        """Write harmless bytes, if the client has the head. Returns whether it has."""
        ...


class ClientSink(Protocol):
    """A client's connection, as seen by its exchange."""

    exchange: Any
    write_paused: bool
    counts_all: bool  # it sums the tokens of several sequences

    @property
    def write(self) -> Callable[[bytes], None]: ...

    def respond(
        self, request: HttpRequest, status: int, body: bytes, headers: bytes = wire.JSON_HEADERS, more: bytes = b""
    ) -> bool:
        """Send a whole answer of the router's own. Returns whether the connection stays open."""
        ...

    def exchange_over(self, keep_alive: bool) -> None:
        """Take the connection back after the whole answer."""
        ...


class Connection(Protocol):
    """A client's connection, as seen by its port."""

    transport: asyncio.Transport

    @property
    def is_idle(self) -> bool:
        """No request is answered or received."""
        ...

    def bound_buffer(self) -> None:
        """Take the port's present bound of unsent bytes."""
        ...

    def sweep(self, now: float) -> None:
        """Time out a slow client; called about once a second."""
        ...

    def postpone(self, by_s: float) -> None:
        """Let nothing be late by a pause of the process."""
        ...

    def close(self) -> None: ...


class EngineSource(Protocol):
    """An engine's connection, as seen by its exchange."""

    status: int
    headers: list[bytes]
    length: int | None  # None: chunked, or until the connection closes
    is_sse: bool
    paused: bool
    heard_at: float  # the time of its last byte
    exchange: "EngineReader | None"

    def pause(self) -> None: ...
    def resume(self) -> None: ...

    def abandon(self) -> None: ...

    def give_up(self, reason: str) -> None:
        """Close the connection and report the engine as lost."""
        ...


class EngineReader(Protocol):
    """An exchange, or the move of its stream."""

    state: ExchangeState
    engine: EngineSource | None

    def engine_request(self, credentials: bytes) -> bytes: ...

    def wanted(self) -> Callable[[], bool]:
        """Return a check, for a connection just made, that this attempt still wants it."""
        ...

    def attach(self, engine: EngineSource) -> None:
        """Take the connection that carries the request."""
        ...

    def pass_on(self, body: bytes, chunk: bytes) -> None:
        """Pass on whole events while FLOWING; `chunk`: the same in HTTP's framing."""
        ...

    def engine_data(self, engine: EngineSource, body: bytes, complete: bool) -> None:
        """Take a part of the answer, after its head."""
        ...

    def engine_over(self) -> None: ...

    def engine_unreachable(self, reason: str) -> None: ...

    def engine_refused(self, reason: str) -> None:
        """The engine has not started the request."""
        ...

    def engine_lost(self, reason: str, *, stale: bool) -> None:
        """`stale`: the connection had been idle, without a byte of answer."""
        ...
