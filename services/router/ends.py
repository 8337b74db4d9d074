"""Protocols between an exchange and its connections: the client that it writes to, the engine that it reads from, and
the reader of an engine's answer as the engine's connection sees it."""

from collections.abc import Callable
from typing import Any, Protocol

from glowplug.services.router import wire
from glowplug.services.router.http_request import HttpRequest


class Answerer(Protocol):
    """What answers a request, as its client's connection sees it: an exchange, or a call that the router answers
    itself and that waits."""

    def client_left(self) -> None:
        """Note that the client closed its connection."""
        ...

    def client_paused(self, paused: bool) -> None:
        """Write nothing while the client reads too slowly."""
        ...

    def probe(self) -> bool:
        """Write harmless bytes to the client, if it has the head. Returns whether the head has been sent."""
        ...


class ClientSink(Protocol):
    """The connection to a client, as its exchange sees it."""

    exchange: Any  # the Exchange that has its request, or None
    write: Callable[[bytes], None]
    write_paused: bool  # the client reads slower than its answer comes

    def respond(
        self, request: HttpRequest, status: int, body: bytes, headers: bytes = wire.JSON_HEADERS, more: bytes = b""
    ) -> bool:
        """Send a whole answer of the router's own. Returns whether the connection stays open after it."""
        ...

    def exchange_over(self, keep_alive: bool) -> None:
        """Take the connection back: the exchange has written its whole answer."""
        ...


class EngineSource(Protocol):
    """The connection to an engine, as its exchange sees it."""

    status: int
    headers: list[bytes]
    length: int | None  # None: chunked, or until the connection closes
    is_sse: bool
    paused: bool
    heard_at: float  # when its last byte came
    exchange: "EngineReader | None"  # who reads what comes

    def pause(self) -> None: ...
    def resume(self) -> None: ...

    def abandon(self) -> None:
        """Close the connection, since nobody wants the answer any more."""
        ...

    def give_up(self, reason: str) -> None:
        """Close the connection and notify the exchange that the engine is lost."""
        ...


class EngineReader(Protocol):
    """An exchange, or the move of its stream to another engine."""

    engine: EngineSource | None
    is_flowing: bool  # whole chunks of events may be passed on unparsed

    def engine_request(self, credentials: bytes) -> bytes:
        """The bytes of the request for the engine, with `credentials` among its headers."""
        ...

    def attempt(self) -> Callable[[], bool]:
        """A function that tells, once a connection is made, whether this attempt still needs it."""
        ...

    def attach(self, engine: EngineSource) -> None:
        """Take the connection on which the request has been sent."""
        ...

    def pass_on(self, body: bytes, chunk: bytes) -> None:
        """Pass on whole events (`body`; `chunk` is the same in HTTP's framing) while `is_flowing`."""
        ...

    def engine_data(self, engine: EngineSource, body: bytes, complete: bool) -> None:
        """Take a part of the answer, whose head is complete. `complete`: this is the last part."""
        ...

    def engine_over(self) -> None:
        """Note that the whole answer has been passed to `engine_data`."""
        ...

    def engine_unreachable(self, reason: str) -> None:
        """Note that no connection to the engine could be made."""
        ...

    def engine_refused(self, reason: str) -> None:
        """Note that the engine refused the request without starting it."""
        ...

    def engine_lost(self, reason: str, *, stale: bool) -> None:
        """Note that the engine was lost before its answer was complete. `stale`: the connection had been idle, and no
        byte of an answer came."""
        ...
