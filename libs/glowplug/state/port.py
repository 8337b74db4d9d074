"""What a service needs of a store: small tables of JSON rows, capped logs, and epochs."""

from typing import Protocol

from glowplug.domain.lease import Lease


class StoreUnavailable(Exception):
    """The store cannot answer now. Callers keep what they know and try again at the next tick."""


class NotATable(StoreUnavailable):
    """Something else stands where a table or a log is kept, and stays there until it is deleted."""


class Fenced(StoreUnavailable):
    """Another process leads with a newer epoch: this one's writes are refused."""


class Store(Protocol):
    """Tables are maps from id to bytes (JSON). Each table has one writing service. All raise StoreUnavailable."""

    async def put(self, table: str, key: str, row: bytes) -> None: ...

    async def delete(self, table: str, key: str) -> None: ...

    async def get(self, table: str, key: str) -> bytes | None: ...

    async def load(self, table: str) -> dict[str, bytes]:
        """The whole table. A row whose key is no UTF-8 comes without bytes under its escaped key, so that a reader
        the table leaves it out and names it. Raises NotATable."""
        ...

    async def append(self, log: str, row: bytes, *, keep: int) -> None:
        """Add to the end of a log that keeps its newest `keep` rows."""
        ...

    async def tail(self, log: str, count: int) -> list[bytes]:
        """The newest `count` rows, newest first. Raises NotATable."""
        ...

    async def next_epoch(self, issuer: str) -> int:
        """A number greater than any given for `issuer` before: its fencing epoch."""
        ...

    async def see_lease(self, service: str, known_epoch: int = 0) -> Lease:
        """Who leads `service` now. One that leads with less than `known_epoch`, the highest the caller has seen,
        is refused by all who have seen it too: it cannot keep its lease, and begins anew."""
        ...

    async def take_lease(self, service: str, holder: str, url: str, lease_s: float) -> Lease:
        """Lead for `lease_s`, with a new epoch, unless another process does: the answer says which."""
        ...

    async def keep_lease(self, service: str, holder: str, epoch: int, url: str, lease_s: float) -> Lease:
        """Lead on for `lease_s` from now, unless a newer epoch has been given or another process leads: the answer
        says which. A store that has lost the lease, with everything else, accepts it from the process that had it."""
        ...

    async def drop_lease(self, service: str, holder: str) -> None:
        """Lead no more, if it is `holder` who does: the next may begin at once."""
        ...

    @property
    def refusal(self) -> str:
        """Why the store takes no writes though it answers, or ""."""
        ...

    def fence(self, service: str, epoch: int) -> None:
        """From now on refuse this client's writes (Fenced) once a newer epoch of `service` has been given; with
        epoch 0, no more."""
        ...

    async def ping(self) -> bool:
        """Whether the store answers now. Never raises."""
        ...

    async def close(self) -> None: ...
