"""The store in memory, for tests."""

from collections import defaultdict

from glowplug.state.port import StoreUnavailable


class MemoryStore:
    """Set `down = True` to make every call raise StoreUnavailable. Share one object between services under test."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, bytes]] = defaultdict(dict)
        self.logs: dict[str, list[bytes]] = defaultdict(list)
        self.epochs: dict[str, int] = defaultdict(int)
        self.down = False

    def _check(self) -> None:
        if self.down:
            raise StoreUnavailable("memory store is down")

    async def put(self, table: str, key: str, row: bytes) -> None:
        self._check()
        self.tables[table][key] = row

    async def delete(self, table: str, key: str) -> None:
        self._check()
        self.tables[table].pop(key, None)

    async def get(self, table: str, key: str) -> bytes | None:
        self._check()
        return self.tables[table].get(key)

    async def load(self, table: str) -> dict[str, bytes]:
        self._check()
        return dict(self.tables[table])

    async def append(self, log: str, row: bytes, *, keep: int) -> None:
        self._check()
        self.logs[log].append(row)
        del self.logs[log][:-keep]

    async def tail(self, log: str, count: int) -> list[bytes]:
        self._check()
        return self.logs[log][: -count - 1 : -1] if count > 0 else []

    async def next_epoch(self, issuer: str) -> int:
        self._check()
        self.epochs[issuer] += 1
        return self.epochs[issuer]

    async def ping(self) -> bool:
        return not self.down

    async def close(self) -> None:
        return None
