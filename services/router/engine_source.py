"""The connection to an engine, as an exchange sees it."""

from typing import Protocol


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
