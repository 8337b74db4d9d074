"""Define the services' store: small tables of JSON rows, capped logs, and epochs."""

from typing import Protocol

from glowplug.domain.lease import Lease


class StoreUnavailable(Exception):
    """The store cannot answer now; callers keep their knowledge and retry at the next tick."""


class NotATable(StoreUnavailable):
    """The key of a table or log holds another kind of value, until deleted."""


class Fenced(StoreUnavailable):
    """A process with a newer epoch leads, so writes are refused."""


class Store(Protocol):
    """Tables map ids to bytes (JSON), each with one writing service. All methods raise StoreUnavailable."""

    async def put(self, table: str, key: str, row: bytes) -> None: ...

    async def delete(self, table: str, key: str) -> None: ...

    async def get(self, table: str, key: str) -> bytes | None: ...

    async def load(self, table: str) -> dict[str, bytes]:
        """Return the whole table. A key that is not UTF-8 is escaped and has no bytes, so that the reader skips and
        names it. Raises NotATable."""
        ...

    async def append(self, log: str, row: bytes, *, keep: int) -> None:
        """Append to a log that keeps its newest `keep` rows."""
        ...

    async def tail(self, log: str, count: int) -> list[bytes]:
        """Newest rows first. Raises NotATable."""
        ...

    async def next_epoch(self, issuer: str) -> int:
        """Return a fencing epoch above any given for `issuer`."""
        ...

    async def see_lease(self, service: str, known_epoch: int = 0) -> Lease:
        """Return who leads `service`. A leader below `known_epoch`, the highest seen by the caller, is refused by
        others too, cannot keep its lease, and must begin anew."""
        ...

    async def take_lease(self, service: str, holder: str, url: str, lease_s: float) -> Lease:
        """Lead for `lease_s` under a new epoch, unless another process does: see the answer."""
        ...

    async def keep_lease(self, service: str, holder: str, epoch: int, url: str, lease_s: float) -> Lease:
        """Extend the lead to `lease_s` from now, unless another process leads or a newer epoch exists: see the answer.
        An emptied store accepts the last leader."""
        ...

    async def drop_lease(self, service: str, holder: str) -> None:
        """End the lead if `holder` has it; the next may begin at once."""
        ...

    @property
    def refusal(self) -> str:
        """Why the store answers but takes no writes, or ""."""
        ...

    def fence(self, service: str, epoch: int) -> None:
        """Refuse this client's writes (Fenced) once `service` has a newer epoch; epoch 0 lifts the fence."""
        ...

    async def ping(self) -> bool:
        """Return whether the store answers now. Never raises."""
        ...

    async def close(self) -> None: ...
