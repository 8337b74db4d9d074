"""The two ends of an exchange, as it sees them: the client it writes to and the engine it reads from."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from services.router import wire
from services.router.http_request import HttpRequest

if TYPE_CHECKING:
    from services.router.exchange import Exchange


class ClientSink(Protocol):
    """The connection of a client, as its exchange writes to it."""

    exchange: "Exchange | None"
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

    def pause(self) -> None: ...
    def resume(self) -> None: ...

    def abandon(self) -> None:
        """The answer is not wanted any more."""
        ...

    def give_up(self, reason: str) -> None:
        """Nothing more is expected of the engine: the exchange is notified that it is lost."""
        ...
