"""Rows that are made anew only when what they show may have changed."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec

RowT = TypeVar("RowT", bound=msgspec.Struct)


class RowTable(Generic[RowT]):
    """Keys are touched as often as one likes; `refresh` makes each touched row once and keeps those that differ.

    `make(key, now_s)` gives the row, or None when there is none any more.
    """

    def __init__(self, make: Callable[[str, float], RowT | None]) -> None:
        self.rows: dict[str, RowT] = {}
        self._make = make
        self._touched: set[str] = set()
        self._changed: set[str] = set()

    def touch(self, keys: Iterable[str]) -> None:
        self._touched.update(keys)

    def refresh(self, now_s: float) -> None:
        for key in self._touched:
            row = self._make(key, now_s)
            if row is None:
                if self.rows.pop(key, None) is not None:
                    self._changed.add(key)
            elif self.rows.get(key) != row:
                self.rows[key] = row
                self._changed.add(key)
        self._touched.clear()

    def take_changed(self) -> set[str]:
        """Keys whose row is new, other or gone since the last call. One reader only: the hub."""
        changed, self._changed = self._changed, set()
        return changed
