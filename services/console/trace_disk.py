"""Traces on disk, so that they are there after a restart: one SQLite file, written by a thread of its own.

Nothing here ever stops the intake: what a slow, full or broken disk cannot take is dropped and counted, and the console
goes on from memory. The file follows the ring in memory (what leaves one leaves the other) and has a hard bound
besides. A file that cannot be read is put aside and a new one begun.
"""

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from services.console.spans import Resource, Span, SpanEvent, bounded

log = logging.getLogger(__name__)

VERSION: Final = 1
WRITE_EVERY_S: Final = 0.5
RETRY_S: Final = 5.0
MAX_PENDING: Final = 50_000  # spans and farewells that wait for the disk
PAGE_BYTES: Final = 4096
SLACK: Final = 4  # the file may be this many times the ring before SQLite says it is full
PRUNED: Final = 4  # a full file loses the oldest 1/PRUNED of its traces
_SCHEMA: Final = """
create table if not exists meta (name text primary key, value text) without rowid;
create table if not exists traces (seq integer primary key autoincrement, trace_id text unique not null);
create table if not exists spans (
    seq integer not null, span_id text not null, span blob not null, resource blob not null,
    primary key (seq, span_id)
) without rowid;
"""
_encode = msgspec.msgpack.Encoder().encode
_decode_span = msgspec.msgpack.Decoder(Span).decode
_decode_resource = msgspec.msgpack.Decoder(Resource).decode
Pairs = list[tuple[Span, Resource]]


class _Kept(NamedTuple):
    trace_id: str
    span_id: str
    span: bytes
    resource: bytes


class TraceDisk:
    """`keep` and `forget` come from the event loop and return at once; `open` and `close` block.

    `keep_content` False: what a former console kept of prompts is taken out of the file when it is opened.
    `on_failure` is called, on the writing thread, for each batch the disk did not take, with the number of spans.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        keep_content: bool,
        on_failure: Callable[[int], None] = lambda _: None,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._path, self._max_bytes, self._keep_content, self._on_failure = path, max_bytes, keep_content, on_failure
        self._pending: deque[_Kept | str] = deque()  # a span, or the id of a trace to forget
        self._max_pending = max_pending
        self._writing = threading.Lock()
        self._guard, self._wake, self._stopping = threading.Lock(), threading.Event(), threading.Event()
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None
        self.problem = ""  # why the disk takes nothing now
        self.num_bytes = 0  # what the file takes, its log included

    def open(self) -> list[Pairs]:
        """Begin writing; gives the traces the file has, oldest first. Never raises for what the disk does."""
        traces: list[Pairs] = []
        try:
            self._connect()
            traces = self._read()
            self._measure()
        except sqlite3.DatabaseError as error:
            if not _is_broken(error):
                self._failed(error, 0)
            else:
                self._put_aside(error)
        except (OSError, msgspec.MsgspecError) as error:
            self._put_aside(error)
        self._thread = threading.Thread(target=self._write_loop, name="trace-disk", daemon=True)
        self._thread.start()
        return traces

    def keep(self, trace_id: str, span_id: str, span: bytes, resource: bytes) -> None:
        """Write one span soon."""
        self._add(_Kept(trace_id, span_id, span, resource))

    def forget(self, trace_id: str) -> None:
        """Take one trace out soon."""
        self._add(trace_id)

    def close(self, patience_s: float = 3.0) -> None:
        """Write what waits, then end."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def _add(self, one: _Kept | str) -> None:
        with self._guard:
            if len(self._pending) < self._max_pending:
                self._pending.append(one)
                return
        self._on_failure(int(isinstance(one, _Kept)))

    # the writing thread

    def _write_loop(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(RETRY_S if self.problem else WRITE_EVERY_S)
            self.write()
        self.write()
        self._disconnect()

    def write(self) -> None:
        """Write what waits, now."""
        with self._writing:
            with self._guard:
                batch, self._pending = self._pending, deque()
            if batch:
                self._write(batch)

    def _write(self, batch: deque[_Kept | str]) -> None:
        num_spans = sum(isinstance(one, _Kept) for one in batch)
        try:
            if self._connection is None:
                self._connect()
            self._put(batch)
            self._measure()
        except sqlite3.DatabaseError as error:
            if _is_broken(error):
                self._put_aside(error)
            elif "full" in str(error) and self._connection is not None:
                self._prune()
            else:
                self._disconnect()
            self._failed(error, num_spans)
        except msgspec.MsgspecError as error:
            self._put_aside(error)
            self._failed(error, num_spans)
        except OSError as error:
            self._disconnect()
            self._failed(error, num_spans)
        else:
            if self.problem:
                log.warning("traces are written to %s again", self._path)
            self.problem = ""

    def _measure(self) -> None:
        parts = (self._path, self._path.with_name(self._path.name + "-wal"))
        self.num_bytes = sum(part.stat().st_size for part in parts if part.exists())

    def _failed(self, error: Exception, num_spans: int) -> None:
        if not self.problem:
            log.warning("traces are kept in memory only: %s: %s", self._path, error)
        self.problem = str(error) or type(error).__name__
        self._on_failure(num_spans)

    # the file

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._path, timeout=2.0, check_same_thread=False)
        try:
            self._path.chmod(0o600)
            for pragma in ("journal_mode = wal", "synchronous = normal", "secure_delete = on", "temp_store = memory",
                           f"journal_size_limit = {self._max_bytes}",
                           f"max_page_count = {SLACK * self._max_bytes // PAGE_BYTES + 64}"):  # fmt: skip
                connection.execute(f"pragma {pragma}")
            (version,) = connection.execute("pragma user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"not a database of this version: {version}")
            if connection.execute("pragma quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("the database is malformed")
            connection.executescript(_SCHEMA)
            connection.execute(f"pragma user_version = {VERSION}")
            self._note_content(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _note_content(self, connection: sqlite3.Connection) -> None:
        """A file that may hold prompts says so; without leave to keep them they are taken out of it."""
        had = connection.execute("select 1 from meta where name = 'content'").fetchone()
        with connection:
            if self._keep_content:
                connection.execute("insert or ignore into meta values ('content', '1')")
            elif had:
                _scrub(connection)
                connection.execute("delete from meta where name = 'content'")
        if had and not self._keep_content:
            connection.execute("vacuum")
            connection.execute("pragma wal_checkpoint(truncate)")

    def _read(self) -> list[Pairs]:
        assert self._connection is not None
        rows = self._connection.execute("select seq, span, resource from spans order by seq")
        traces: list[Pairs] = []
        last = None
        for seq, span, resource in rows:
            if seq != last:
                traces.append([])
                last = seq
            traces[-1].append((_decode_span(span), _decode_resource(resource)))
        return traces

    def _put(self, batch: deque[_Kept | str]) -> None:
        assert self._connection is not None
        with self._connection as connection:
            for one in batch:
                if isinstance(one, str):
                    connection.execute(
                        "delete from spans where seq in (select seq from traces where trace_id = ?)", (one,)
                    )
                    connection.execute("delete from traces where trace_id = ?", (one,))
                else:
                    connection.execute("insert or ignore into traces (trace_id) values (?)", (one.trace_id,))
                    connection.execute(
                        "insert or ignore into spans select seq, ?, ?, ? from traces where trace_id = ?",
                        (one.span_id, one.span, one.resource, one.trace_id),
                    )

    def _prune(self) -> None:
        """Make room in a full file: its oldest traces go, as they do in memory."""
        assert self._connection is not None
        try:
            with self._connection as connection:
                (num,) = connection.execute("select count(*) from traces").fetchone()
                connection.execute("create temp table if not exists leaving as select seq from traces where 0")
                connection.execute(
                    "insert into leaving select seq from traces order by seq limit ?", (num // PRUNED + 1,)
                )
                connection.execute("delete from spans where seq in (select seq from leaving)")
                connection.execute("delete from traces where seq in (select seq from leaving)")
                connection.execute("drop table leaving")
        except sqlite3.DatabaseError as error:
            log.warning("no room could be made in %s: %s", self._path, error)

    def _put_aside(self, error: Exception) -> None:
        """Begin a new file; the broken one stays beside it for whoever wants to look."""
        log.warning("traces of earlier are lost, %s cannot be read: %s", self._path, error)
        self._disconnect()
        try:
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._path.replace(self._path.with_name(self._path.name + ".broken"))
            self._connect()
        except (OSError, sqlite3.Error) as again:
            self._failed(again, 0)


def _is_broken(error: sqlite3.DatabaseError) -> bool:
    """Whether the file itself is no good, as opposed to the moment."""
    return not isinstance(error, sqlite3.OperationalError)


def _scrub(connection: sqlite3.Connection) -> None:
    """Take out of every span what people wrote and what models answered."""
    for seq, span_id, raw_span, raw_resource in list(_rows(connection)):
        span, resource = _decode_span(raw_span), _decode_resource(raw_resource)
        clean = msgspec.structs.replace(
            span,
            attributes=bounded(span.attributes, keep_content=False),
            events=tuple(SpanEvent(e.time_ns, e.name, bounded(e.attributes, keep_content=False)) for e in span.events),
        )
        cleaner = Resource(resource.service, bounded(resource.attributes, keep_content=False))
        if clean != span or cleaner != resource:
            connection.execute(
                "update spans set span = ?, resource = ? where seq = ? and span_id = ?",
                (_encode(clean), _encode(cleaner), seq, span_id),
            )


def _rows(connection: sqlite3.Connection) -> Iterator[tuple[int, str, bytes, bytes]]:
    yield from connection.execute("select seq, span_id, span, resource from spans")
