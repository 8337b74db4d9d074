"""The store in memory, for tests."""

import time
from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import replace

from glowplug.domain.lease import Lease
from glowplug.state.port import Fenced, NotATable, StoreUnavailable


class MemoryStore:
    """`down = True` makes every call raise StoreUnavailable; tables in `no_tables` raise NotATable. Share one between
    services, or a `client()` of it each where fences differ."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.leases: dict[str, tuple[Lease, float]] = {}  # service -> lease and its end by `clock`
        self._clock, self._floor = clock, 0
        self._fence: tuple[str, int] | None = None
        self.tables: dict[str, dict[str, bytes]] = defaultdict(dict)
        self.logs: dict[str, list[bytes]] = defaultdict(list)
        self.epochs: dict[str, int] = defaultdict(int)
        self.down = False
        self.refusal = ""  # makes writes raise StoreUnavailable
        self.no_tables: set[str] = set()

    def _check(self) -> None:
        if self.down:
            raise StoreUnavailable("memory store is down")

    def _check_kind(self, name: str) -> None:
        if name in self.no_tables:
            raise NotATable(f"WRONGTYPE {name}")

    async def put(self, table: str, key: str, row: bytes) -> None:
        self._check_fence()
        self._check_kind(table)
        self.tables[table][key] = row

    async def delete(self, table: str, key: str) -> None:
        self._check_fence()
        self.tables[table].pop(key, None)

    async def get(self, table: str, key: str) -> bytes | None:
        self._check()
        return self.tables[table].get(key)

    async def load(self, table: str) -> dict[str, bytes]:
        self._check()
        self._check_kind(table)
        return dict(self.tables[table])

    async def append(self, log: str, row: bytes, *, keep: int) -> None:
        self._check_fence()
        self.logs[log].append(row)
        del self.logs[log][:-keep]

    async def tail(self, log: str, count: int) -> list[bytes]:
        self._check()
        self._check_kind(log)
        return self.logs[log][: -count - 1 : -1] if count > 0 else []

    async def next_epoch(self, issuer: str) -> int:
        self._check()
        self.epochs[issuer] = max(self.epochs[issuer], self._floor) + 1
        return self.epochs[issuer]

    async def see_lease(self, service: str, known_epoch: int = 0) -> Lease:
        self._check()
        lease, ends_at = self.leases.get(service, (Lease(), 0.0))
        left_s = ends_at - self._clock()
        if left_s > 0 and lease.epoch < known_epoch:
            self.epochs[service] = max(self.epochs[service], known_epoch)
        held = lease if left_s > 0 else Lease()
        return replace(held, left_s=max(left_s, 0.0), newest_epoch=self.epochs[service])

    async def take_lease(self, service: str, holder: str, url: str, lease_s: float) -> Lease:
        held = await self.see_lease(service)
        if held.holder not in ("", holder):
            return held
        return self._hold(service, holder, await self.next_epoch(service), url, lease_s)

    async def keep_lease(self, service: str, holder: str, epoch: int, url: str, lease_s: float) -> Lease:
        held = await self.see_lease(service)
        if held.newest_epoch > epoch or held.holder not in ("", holder):
            return held
        return self._hold(service, holder, epoch, url, lease_s)

    def _hold(self, service: str, holder: str, epoch: int, url: str, lease_s: float) -> Lease:
        lease = Lease(holder=holder, epoch=epoch, url=url, left_s=lease_s, newest_epoch=epoch)
        self.epochs[service] = epoch
        self.leases[service] = (lease, self._clock() + lease_s)
        return lease

    async def drop_lease(self, service: str, holder: str) -> None:
        if (await self.see_lease(service)).holder == holder:
            del self.leases[service]

    def fence(self, service: str, epoch: int) -> None:
        self._fence = (service, epoch) if epoch else None

    def _check_fence(self) -> None:
        if self.refusal:
            raise StoreUnavailable(self.refusal)
        self._check()
        if self._fence is not None and self.epochs[self._fence[0]] > self._fence[1]:
            raise Fenced(f"{self._fence[0]} has a newer epoch than {self._fence[1]}")

    def client(self) -> "MemoryStore":
        """Share the rows, with another fence."""
        other = copy(self)
        other._fence = None
        return other

    def empty(self) -> None:
        """Lose every row; epochs still grow, as on a real store."""
        self._floor = max([self._floor, *self.epochs.values()])
        for kept in (self.tables, self.logs, self.epochs, self.leases):
            kept.clear()

    async def ping(self) -> bool:
        return not self.down

    async def close(self) -> None:
        return None
