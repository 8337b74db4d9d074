"""The usage ledger: a database of each request's usage, with hourly totals kept for good.

A batch is one transaction: known records are left out, the totals grow by the others, so each record counts once.
Methods block and raise SQLAlchemyError if the database is down, locked or full."""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    and_,
    case,
    create_engine,
    delete,
    event,
    func,
    insert,
    inspect,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.sql.elements import ColumnElement

from glowplug.domain.usage import UsageRecord

HOUR_S: Final = 3600
DELETED_AT_ONCE: Final = 5000
COLLISIONS: Final = 5  # with other consoles that write the same record or total, per batch
KEYS: Final = ("tenant", "key_id", "model_key")
COUNTS: Final = ("num_requests", "num_failed", "num_exact", "prompt_tokens", "cached_tokens", "response_tokens")
SUMS: Final = (*COUNTS, "held_s", "gpu_s")

_metadata = MetaData()
RECORDS: Final = Table(
    "usage_records",
    _metadata,
    Column("record_id", String(64), primary_key=True),
    Column("request_id", String(256), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("key_id", String(8), nullable=False),
    Column("model_key", String(256), nullable=False),
    Column("path", String(256), nullable=False),
    Column("arrived_at", Float(53), nullable=False),
    Column("finished_at", Float(53), nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("response_tokens", BigInteger, nullable=False),
    Column("tokens_exact", Boolean, nullable=False),
    Column("held_s", Float(53), nullable=False),
    Column("cold", Boolean, nullable=False),
    Column("instance_id", String(256), nullable=False),
    Column("status", Integer, nullable=False),
    Column("error_code", String(128), nullable=False),
    Column("emulated", Boolean, nullable=False),
    Column("second", BigInteger, nullable=False),  # of its end, since the epoch
    Column("gpu_s", Float(53)),  # null: unknown
    Index("usage_records_by_second", "second"),
)
HOURS: Final = Table(
    "usage_hours",
    _metadata,
    Column("hour", BigInteger, primary_key=True),  # first second, since the epoch
    *(Column(name, RECORDS.c[name].type, primary_key=True) for name in KEYS),
    *(Column(name, BigInteger, nullable=False) for name in COUNTS),
    Column("held_s", Float(53), nullable=False),
    Column("gpu_s", Float(53)),  # of requests with a known value
)
_WIDTHS: Final = {"request_id": 256, "model_key": 256, "path": 256, "instance_id": 256, "error_code": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Requests that ended in [start, end) (epoch seconds), of these models, tenants and keys (default: all), summed by
    `by` (KEYS) in buckets of `width_s` from `start`; 0: one bucket."""

    start: int
    end: int
    by: tuple[str, ...] = ()
    width_s: int = 0
    models: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


class UsageLedger:
    def __init__(self, url: str) -> None:
        self._engine = create_engine(url, pool_pre_ping=True)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _careful)
        self._is_made, self._making = False, threading.Lock()

    def add(self, records: Sequence[UsageRecord]) -> int:
        """Keep new records and return their number."""
        rows = {record.record_id: _row(record) for record in records}
        for left in reversed(range(COLLISIONS)):
            try:
                with self._begin() as connection:
                    return _add(connection, rows)
            except IntegrityError:
                if not left:
                    raise
        raise AssertionError("the last collision is raised")

    def sums(self, question: UsageQuery) -> list[dict[str, Any]]:
        """Return a row for each bucket and group with usage, the oldest first: `bucket` (its start), the fields of
        `by`, SUMS. Whole hours are read from the totals."""
        is_whole = not any(edge % HOUR_S for edge in (question.start, question.end, question.width_s))
        table = HOURS if is_whole else RECORDS
        ended = HOURS.c.hour if is_whole else RECORDS.c.second
        wanted = [ended >= question.start, ended < question.end]
        given = {"model_key": question.models, "tenant": question.tenants, "key_id": question.keys}
        wanted += [table.c[name].in_(values) for name, values in given.items() if values]
        groups = [table.c[name] for name in question.by]
        number = (ended - _number(question.start)) // _number(question.width_s or question.end - question.start)
        sums = [(func.sum(table.c[name]) if is_whole else _SUM_OF[name]).label(name) for name in SUMS]
        asked = select(number.label("bucket"), *groups, *sums).where(*wanted)
        asked = asked.group_by(number, *groups).order_by(number, *groups)
        with self._begin() as connection:
            found = [dict(row) for row in connection.execute(asked).mappings()]
        for row in found:
            row |= {name: int(row[name]) for name in ("bucket", *COUNTS)}
            row |= {name: None if row[name] is None else float(row[name]) for name in ("held_s", "gpu_s")}
            row["bucket"] = question.start + row["bucket"] * question.width_s
        return found

    def forget(self, before: float) -> int:
        """Delete records of requests that ended before `before`, and return their number; totals stay."""
        num = 0
        while True:
            with self._begin() as connection:
                old = select(RECORDS.c.record_id).where(RECORDS.c.second < int(before)).limit(DELETED_AT_ONCE)
                ids = connection.execute(old).scalars().all()
                if not ids:
                    return num
                connection.execute(delete(RECORDS).where(RECORDS.c.record_id.in_(ids)))
                num += len(ids)

    def close(self) -> None:
        self._engine.dispose()

    def _begin(self) -> Any:
        with self._making:
            self._make()
        return self._engine.begin()

    def _make(self) -> None:
        if not self._is_made:
            if self._engine.dialect.name == "sqlite" and self._engine.url.database:
                with contextlib.suppress(OSError):
                    Path(self._engine.url.database).parent.mkdir(parents=True, exist_ok=True)
            _metadata.create_all(self._engine)
            for table in (RECORDS, HOURS):
                self._add_columns(table)
            self._is_made = True

    def _add_columns(self, table: Table) -> None:
        """Add columns missing in a table of an older version, as null."""
        for column in table.columns:
            if column.name in self._columns(table):
                continue
            kind = column.type.compile(self._engine.dialect)
            try:
                with self._engine.begin() as connection:
                    connection.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {column.name} {kind}"))
            except DBAPIError:
                if column.name not in self._columns(table):  # else another console has just added it
                    raise

    def _columns(self, table: Table) -> set[str]:
        return {column["name"] for column in inspect(self._engine).get_columns(table.name)}


_SUM_OF: Final[dict[str, ColumnElement[Any]]] = {
    "num_requests": func.count(),
    "num_failed": func.sum(case((RECORDS.c.status >= 400, 1), else_=0)),
    "num_exact": func.sum(case((RECORDS.c.tokens_exact, 1), else_=0)),
    **{name: func.sum(RECORDS.c[name]) for name in SUMS[3:]},
}


def _number(value: int) -> ColumnElement[int]:
    """Return a literal, not a parameter: PostgreSQL compares selected and grouped expressions as text."""
    return literal_column(str(int(value)), BigInteger)


def _careful(connection: Any, _: object) -> None:
    """Sync each transaction, and allow reads during a write."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()


def _row(record: UsageRecord) -> dict[str, Any]:
    row = asdict(record)
    if not row.pop("gpu_known"):
        row["gpu_s"] = None
    return row | {name: row[name][:width] for name, width in _WIDTHS.items()} | {"second": int(record.finished_at)}


def _add(connection: Connection, rows: dict[str, dict[str, Any]]) -> int:
    known = set(connection.execute(select(RECORDS.c.record_id).where(RECORDS.c.record_id.in_(rows))).scalars())
    new = [row for id_, row in rows.items() if id_ not in known]
    if not new:
        return 0
    connection.execute(insert(RECORDS), new)
    for key, sums in sorted(_totals(new).items()):
        named = dict(zip(("hour", *KEYS), key, strict=True))
        here = and_(*(HOURS.c[name] == value for name, value in named.items()))
        now = {name: func.coalesce(HOURS.c[name], 0) + value for name, value in sums.items() if value is not None}
        grown = update(HOURS).where(here).values(now)
        if not connection.execute(grown).rowcount:
            connection.execute(insert(HOURS).values(**named, **sums))
    return len(new)


def _totals(rows: Iterable[dict[str, Any]]) -> dict[tuple[int, str, str, str], dict[str, Any]]:
    none = {**dict.fromkeys(SUMS, 0), "gpu_s": None}
    totals: defaultdict[tuple[int, str, str, str], dict[str, Any]] = defaultdict(none.copy)
    for row in rows:
        hour = row["second"] // HOUR_S * HOUR_S
        sums = totals[hour, row["tenant"], row["key_id"], row["model_key"]]
        sums["num_requests"] += 1
        sums["num_failed"] += row["status"] >= 400
        sums["num_exact"] += row["tokens_exact"]
        for name in SUMS[3:]:
            if row[name] is not None:
                sums[name] = (sums[name] or 0) + row[name]
    return totals
