"""The two ends of an exchange, as it sees them: the client it writes to and the engine it reads from; and who reads an
engine's answer, as the connection to the engine sees it."""

from collections.abc import Callable
from typing import Any, Protocol

from services.router import wire
from services.router.http_request import HttpRequest


class ClientSink(Protocol):
    """The connection of a client, as its exchange writes to it."""

    exchange: Any  # the Exchange that has its request, or None
    write: Callable[[bytes], None]
    write_paused: bool  # the client reads slower than its answer comes

    def respond(
        self, request: HttpRequest, status: int, body: bytes, headers: bytes = wire.JSON_HEADERS, more: bytes = b""
    ) -> bool:
        """Send a whole answer of the router's own. Whether the connection stays open after it."""
        ...

    def exchange_over(self, keep_alive: bool) -> None:
        """The answer is written."""
        ...


class EngineSource(Protocol):
    """The connection to an engine, as its exchange reads from it."""

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
        """The answer is not wanted any more."""
        ...

    def give_up(self, reason: str) -> None:
        """Nothing more is expected of the engine: the exchange is notified that it is lost."""
        ...


class EngineReader(Protocol):
    """An exchange, or the move of its stream to another engine."""

    engine: EngineSource | None
    is_flowing: bool  # whole chunks of events may be passed on unparsed

    def engine_request(self, credentials: bytes) -> bytes:
        """The request as the engine gets it, with `credentials` among its headers."""
        ...

    def attempt(self) -> Callable[[], bool]:
        """Ask, once a connection has been made, whether it is still of use."""
        ...

    def attach(self, engine: EngineSource) -> None:
        """The request goes out on this connection."""
        ...

    def pass_on(self, body: bytes, chunk: bytes) -> None:
        """Whole events, and the same in HTTP's framing, while `is_flowing`."""
        ...

    def engine_data(self, engine: EngineSource, body: bytes, complete: bool) -> None:
        """Part of the answer, whose head is complete."""
        ...

    def engine_over(self) -> None:
        """All of the answer has been handed over."""
        ...

    def engine_unreachable(self, reason: str) -> None:
        """There is no connection to it."""
        ...

    def engine_refused(self, reason: str) -> None:
        """It has not begun with the request, and will not."""
        ...

    def engine_lost(self, reason: str, *, stale: bool) -> None:
        """It went away before its answer was complete. `stale`: it had been idle, and not one byte came."""
        ...
