"""Decode table rows one by one: an unreadable one is named and skipped."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from glowplug.events.envelope import SAID, MalformedEvent, from_json

T = TypeVar("T")
# Key field by table.
KEYS: Mapping[str, str] = {
    "models": "key",
    "instances": "instance_id",
    "nodes": "node_id",
    "cordons": "node_id",
    "leaders": "service",
    "start_times": "key",
    "scaling_learned": "key",
    "tenants": "name",
    "keys": "key_id",
    "files": "file_id",
    "batches": "batch_id",
    "batches_open": "batch_id",
}
SHOWN = 80  # characters of a key in a log line


def read_row(table: str, key: str, raw: bytes, cls: type[T]) -> T:
    """Raises MalformedEvent, also for a row under another's key."""
    if not raw:
        raise MalformedEvent(f"{cls.__name__}: no bytes, or a key that is not UTF-8")
    row = from_json(raw, cls)
    if table in KEYS and (own := getattr(row, KEYS[table])) != key:
        raise MalformedEvent(f"{cls.__name__}: it is the row of {own!r}"[:SAID])
    return row


def read_rows(table: str, raw_rows: Mapping[str, bytes], cls: type[T]) -> tuple[dict[str, T], dict[str, str]]:
    """Return the readable rows, and the fault of each other one."""
    rows: dict[str, T] = {}
    unreadable: dict[str, str] = {}
    for key, raw in raw_rows.items():
        try:
            rows[key] = read_row(table, key, raw, cls)
        except MalformedEvent as error:
            unreadable[key] = str(error)
    return rows, unreadable


class TableReader(Generic[T]):
    """Decode only changed rows of a table; others stay the same objects. `lay`: done to each decoded row."""

    def __init__(self, table: str, cls: type[T], lay: Callable[[T], T] | None = None) -> None:
        self._table, self._cls, self._lay = table, cls, lay
        self._known: dict[str, tuple[bytes, T]] = {}

    def read(self, raw_rows: Mapping[str, bytes]) -> tuple[dict[str, T], dict[str, str]]:
        known = self._known
        changed = {key: raw for key, raw in raw_rows.items() if key not in known or known[key][0] != raw}
        fresh, unreadable = read_rows(self._table, changed, self._cls)
        if self._lay is not None:
            fresh = {key: self._lay(row) for key, row in fresh.items()}
        rows = {key: fresh[key] if key in fresh else known[key][1] for key in raw_rows if key not in unreadable}
        self._known = {key: (raw_rows[key], row) for key, row in rows.items()}
        return rows, unreadable


def shown(key: str) -> str:
    """Shorten a key for a log line or finding."""
    return key if len(key) <= SHOWN else f"{key[:SHOWN]}..."
