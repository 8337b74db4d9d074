"""Named keys for a service that keeps no table of them: the row of a presented key is read from the store when it is
asked for, and again after a second, so that a revocation is felt within that."""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from glowplug.domain.access import KEYS, ApiKey, find_key, key_id_of
from glowplug.domain.errors import NoCapacity
from glowplug.events.envelope import MalformedEvent
from glowplug.state.port import Store, StoreUnavailable
from glowplug.state.rows import read_row

FRESH_S: Final = 1.0  # a row is read again after so long
KEPT_S: Final = 60.0  # a row is used for so long while the store does not answer
MAX_ROWS: Final = 4096


class KeyReader:
    """`clock`: seconds since the epoch."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._rows: OrderedDict[str, tuple[float, ApiKey]] = OrderedDict()  # by key id, with when it was read

    async def find(self, presented: str) -> ApiKey | None:
        """The living key that is presented, or None. Raises NoCapacity where the store does not answer."""
        key = await self.row(key_id_of(presented))
        return find_key({key.key_id: key}, presented, self._clock()) if key is not None else None

    async def row(self, key_id: str) -> ApiKey | None:
        """The row of a key, revoked or not; None where there is none. Raises NoCapacity where the store does not
        answer."""
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
            raise NoCapacity("the store does not answer; keys are read there", retry_after_s=2) from error
        self._rows.pop(key_id, None)
        if raw is None:
            return None
        try:
            row = read_row(KEYS, key_id, raw, ApiKey)
        except MalformedEvent:
            return None  # the owner of the table names the row and counts it
        self._rows[key_id] = now_s, row
        if len(self._rows) > MAX_ROWS:
            self._rows.popitem(last=False)
        return row
