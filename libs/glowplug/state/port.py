"""What a service needs of a store: small tables of JSON rows, capped logs, and epochs."""

from typing import Protocol


class StoreUnavailable(Exception):
    """The store cannot answer now. Callers keep what they know and try again at the next tick."""


class Store(Protocol):
    """Tables are maps from id to bytes (JSON). Each table has one writing service. All raise StoreUnavailable."""

    async def put(self, table: str, key: str, row: bytes) -> None: ...

    async def delete(self, table: str, key: str) -> None: ...

    async def get(self, table: str, key: str) -> bytes | None: ...

    async def load(self, table: str) -> dict[str, bytes]:
        """The whole table."""
        ...

    async def append(self, log: str, row: bytes, *, keep: int) -> None:
        """Add to the end of a log that keeps its newest `keep` rows."""
        ...

    async def tail(self, log: str, count: int) -> list[bytes]:
        """The newest `count` rows, newest first."""
        ...

    async def next_epoch(self, issuer: str) -> int:
        """A number greater than any given for `issuer` before: its fencing epoch."""
        ...

    async def ping(self) -> bool:
        """Whether the store answers now. Never raises."""
        ...

    async def close(self) -> None: ...
