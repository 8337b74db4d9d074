"""Look up named keys for services without a table of them: rows are cached for a second, which bounds a revocation's
delay."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from glowplug.domain.access import KEYS, ApiKey, find_key, key_id_of
from glowplug.domain.errors import NoCapacity
from glowplug.events.envelope import MalformedEvent
from glowplug.state.port import Store, StoreUnavailable
from glowplug.state.rows import read_row

FRESH_S: Final = 1.0
KEPT_S: Final = 60.0  # use of a row while the store is silent
MAX_ROWS: Final = 4096


class KeyReader:
    """`clock`: epoch seconds."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._rows: OrderedDict[str, tuple[float, ApiKey]] = OrderedDict()  # key id -> time read, row

    async def find(self, presented: str) -> ApiKey | None:
        """Find the presented living key, or None. Raises NoCapacity if the store is silent."""
        key = await self.row(key_id_of(presented))
        return find_key({key.key_id: key}, presented, self._clock()) if key is not None else None

    async def row(self, key_id: str) -> ApiKey | None:
        """Row of a key, even revoked, or None. Raises NoCapacity if the store is silent."""
        if not key_id:
            return None
        now_s = self._clock()
        read_at, known = self._rows.get(key_id, (0.0, None))
        if known is not None and now_s - read_at < FRESH_S:
            return known
        try:
            raw = await self._store.get(KEYS, key_id)
        except StoreUnavailable as error:
            if known is not None and now_s - read_at < KEPT_S:
                return known
            raise NoCapacity("the store, which keeps the keys, does not answer", retry_after_s=2) from error
        self._rows.pop(key_id, None)
        if raw is None:
            return None
        try:
            row = read_row(KEYS, key_id, raw, ApiKey)
        except MalformedEvent:
            return None  # its table's owner reports the row
        self._rows[key_id] = now_s, row
        if len(self._rows) > MAX_ROWS:
            self._rows.popitem(last=False)
        return row
