"""Rows of a table, one by one: one that cannot be read is named and left out, and takes nothing else with it."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from glowplug.events.envelope import SAID, MalformedEvent, from_json

T = TypeVar("T")
# The field of a row that repeats its key, by table.
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
SHOWN = 80  # characters of a key in a log line: a key may be anything


def read_row(table: str, key: str, raw: bytes, cls: type[T]) -> T:
    """One row. Raises MalformedEvent, also for one that stands under the key of another."""
    if not raw:
        raise MalformedEvent(f"{cls.__name__}: no bytes, or a key that is no UTF-8")
    row = from_json(raw, cls)
    if table in KEYS and (own := getattr(row, KEYS[table])) != key:
        raise MalformedEvent(f"{cls.__name__}: it is the row of {own!r}"[:SAID])
    return row


def read_rows(table: str, raw_rows: Mapping[str, bytes], cls: type[T]) -> tuple[dict[str, T], dict[str, str]]:
    """The rows that can be read, and of each other one what is wrong with it."""
    rows: dict[str, T] = {}
    unreadable: dict[str, str] = {}
    for key, raw in raw_rows.items():
        try:
            rows[key] = read_row(table, key, raw, cls)
        except MalformedEvent as error:
            unreadable[key] = str(error)
    return rows, unreadable


class TableReader(Generic[T]):
    """Reads one table again and again, and decodes only the rows whose bytes have changed: the others are the same
    objects as before."""

    def __init__(self, table: str, cls: type[T]) -> None:
        self._table, self._cls = table, cls
        self._known: dict[str, tuple[bytes, T]] = {}

    def read(self, raw_rows: Mapping[str, bytes]) -> tuple[dict[str, T], dict[str, str]]:
        """As `read_rows`."""
        known = self._known
        changed = {key: raw for key, raw in raw_rows.items() if key not in known or known[key][0] != raw}
        fresh, unreadable = read_rows(self._table, changed, self._cls)
        rows = {key: fresh[key] if key in fresh else known[key][1] for key in raw_rows if key not in unreadable}
        self._known = {key: (raw_rows[key], row) for key, row in rows.items()}
        return rows, unreadable


def shown(key: str) -> str:
    """A key as a log line or a finding names it."""
    return key if len(key) <= SHOWN else f"{key[:SHOWN]}..."
