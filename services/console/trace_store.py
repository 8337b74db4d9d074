"""The latest traces: a bounded ring in memory, and one SQLite file behind it that outlives a restart.

Spans are kept encoded (msgpack), so that `num_bytes` is what they really cost and memory stays flat however long the
fleet runs. Bounds: traces, bytes, spans per trace, and a quarter of the bytes for any one trace.

The file is written by a thread of its own and never stops the intake: what a slow, full or broken disk cannot take is
dropped and counted, and the console goes on from memory. The file follows the ring (what leaves one leaves the other)
and has a hard bound besides. A file that cannot be read is put aside and a new one begun."""

import logging
import sqlite3
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from glowplug.telemetry import semconv
from services.console.spans import Resource, Span, SpanEvent, bounded

TRACE_OVERHEAD_BYTES: Final = 2048  # dict, summary and ids of one trace, measured with tracemalloc and rounded up
SPAN_OVERHEAD_BYTES: Final = 256  # dict slot, key and bytes header of one span
MAX_REQUEST_IDS: Final = 8  # of one trace: a client may send many requests under its own trace
MAX_REQUEST_ID_CHARS: Final = 128

_encode = msgspec.msgpack.Encoder().encode
_decode_span = msgspec.msgpack.Decoder(Span).decode
_decode_resource = msgspec.msgpack.Decoder(Resource).decode
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
_SPANS: Final = "select seq, span_id, span, resource from spans order by seq"
Pairs = list[tuple[Span, Resource]]


class TraceSummary(msgspec.Struct):
    """One line about a trace. Times are epoch nanoseconds; `revision` grows with each span that arrives."""

    trace_id: str
    start_ns: int
    end_ns: int
    name: str = ""
    service: str = ""
    model: str = ""
    request_ids: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    num_spans: int = 0
    num_errors: int = 0
    num_dropped: int = 0
    is_cold: bool = False
    is_emulated: bool = False
    has_root: bool = False
    revision: int = 0

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class _Trace:
    __slots__ = ("num_bytes", "resources", "spans", "summary")

    def __init__(self, trace_id: str, span: Span) -> None:
        self.summary = TraceSummary(trace_id, span.start_ns, span.end_ns)
        self.spans: dict[str, tuple[bytes, bytes]] = {}  # span id -> (span, its resource), both encoded
        self.resources: set[bytes] = set()
        self.num_bytes = TRACE_OVERHEAD_BYTES


class TraceStore:
    """A ring of traces by first arrival. All lookups are by exact id; `newest` walks from the latest back. `disk`, when
    there is one, is given every span kept and the id of every trace that left."""

    def __init__(self, *, max_traces: int = 2000, max_bytes: int = 32 << 20, max_spans_per_trace: int = 2000) -> None:
        assert max_traces > 0 and max_bytes > 0 and max_spans_per_trace > 0
        self._max_traces = max_traces
        self._max_bytes = max_bytes
        self._max_spans = max_spans_per_trace
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._by_request: dict[str, str] = {}  # request id -> trace id
        self.disk: TraceDisk | None = None
        self.num_bytes = 0
        self.num_spans = 0
        self.num_evicted = 0
        self.num_dropped_spans = 0

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, batch: Iterable[tuple[Span, Resource]]) -> list[TraceSummary]:
        """Keep these spans; summaries of the traces they changed. A span that is sent again is kept once."""
        touched: dict[str, TraceSummary] = {}
        for span, resource in batch:
            trace = self._traces.get(span.trace_id)
            if trace is None:
                trace = self._traces[span.trace_id] = _Trace(span.trace_id, span)
                self.num_bytes += trace.num_bytes
            if self._insert(trace, span, _encode(resource)):
                self._summarise(trace, span, resource.service)
            touched[span.trace_id] = trace.summary
        self._evict()
        return [summary for trace_id, summary in touched.items() if trace_id in self._traces]

    def restore(self, disk: "TraceDisk") -> None:
        """Open a disk, take the traces that an earlier run left there, and write to it from then on. Traces that do not
        fit leave it too. Blocks."""
        traces = disk.open()
        for spans in traces:
            self.add(spans)
        self.num_evicted = self.num_dropped_spans = 0  # the earlier run counted what the bounds took
        self.disk = disk
        for spans in traces:
            if (trace_id := spans[0][0].trace_id) not in self._traces:
                disk.forget(trace_id)

    def get(self, trace_id: str) -> list[tuple[Span, Resource]] | None:
        """Spans of one trace by start time, or None. Short ids are taken as zero-padded, like Jaeger does."""
        trace = self._traces.get(normal_id(trace_id))
        if trace is None:
            return None
        resources = {encoded: _decode_resource(encoded) for encoded in trace.resources}
        pairs = [(_decode_span(span), resources[resource]) for span, resource in trace.spans.values()]
        return sorted(pairs, key=lambda pair: (pair[0].start_ns, -pair[0].end_ns, pair[0].span_id))

    def summary(self, trace_id: str) -> TraceSummary | None:
        trace = self._traces.get(normal_id(trace_id))
        return trace.summary if trace else None

    def trace_of_request(self, request_id: str) -> str | None:
        """The trace whose spans carry this request id."""
        return self._by_request.get(request_id)

    def newest(self) -> Iterator[TraceSummary]:
        """Summaries, latest arrival first."""
        for trace in reversed(self._traces.values()):
            yield trace.summary

    def services(self) -> list[str]:
        """Every service seen in the traces kept, sorted."""
        return sorted({name for trace in self._traces.values() for name in trace.summary.services})

    def _insert(self, trace: _Trace, span: Span, resource: bytes) -> bool:
        if span.span_id in trace.spans:
            return False
        encoded = _encode(span)
        grown = len(encoded) + SPAN_OVERHEAD_BYTES
        if resource not in trace.resources:
            grown += len(resource) + SPAN_OVERHEAD_BYTES
        if len(trace.spans) >= self._max_spans or trace.num_bytes + grown > self._max_bytes // 4:
            trace.summary.num_dropped += 1
            self.num_dropped_spans += 1
            return False
        trace.resources.add(resource)
        trace.spans[span.span_id] = (encoded, resource)
        trace.num_bytes += grown
        self.num_bytes += grown
        self.num_spans += 1
        if self.disk is not None:
            self.disk.keep(trace.summary.trace_id, span.span_id, encoded, resource)
        return True

    def _summarise(self, trace: _Trace, span: Span, service: str) -> None:
        line = trace.summary
        starts_earlier = span.start_ns < line.start_ns
        line.start_ns = min(line.start_ns, span.start_ns)
        line.end_ns = max(line.end_ns, span.end_ns)
        if not span.parent_id or not line.name or (starts_earlier and not line.has_root):
            line.name, line.service = span.name, service
            line.has_root = line.has_root or not span.parent_id
        line.num_spans = len(trace.spans)
        line.num_errors += span.is_error
        line.revision += 1
        if service not in line.services:
            line.services = tuple(sorted((*line.services, service)))
        line.is_cold = line.is_cold or span.attribute(semconv.ATTR_PHASE) is not None
        line.is_emulated = line.is_emulated or span.attribute(semconv.ATTR_EMULATED) is True
        request_id = str(span.attribute(semconv.ATTR_REQUEST_ID) or "")[:MAX_REQUEST_ID_CHARS]
        model = str(span.attribute(semconv.ATTR_MODEL) or "")
        if model and (not line.model or (request_id and not line.request_ids)):
            line.model = model  # a request's own model before those that were stopped for it
        if request_id and request_id not in line.request_ids and len(line.request_ids) < MAX_REQUEST_IDS:
            line.request_ids = (*line.request_ids, request_id)
            self._by_request[request_id] = line.trace_id

    def _evict(self) -> None:
        while len(self._traces) > self._max_traces or self.num_bytes > self._max_bytes:
            _, trace = self._traces.popitem(last=False)
            self.num_bytes -= trace.num_bytes
            self.num_spans -= len(trace.spans)
            self.num_evicted += 1
            if self.disk is not None:
                self.disk.forget(trace.summary.trace_id)
            for request_id in trace.summary.request_ids:
                if self._by_request.get(request_id) == trace.summary.trace_id:
                    del self._by_request[request_id]


def normal_id(trace_id: str) -> str:
    """A trace id in lower case, padded to 32 characters."""
    return trace_id.strip().lower().rjust(32, "0")


class _Kept(NamedTuple):
    trace_id: str
    span_id: str
    span: bytes
    resource: bytes


class TraceDisk:
    """`keep` and `forget` are called by the event loop and return at once; `open` and `close` block.

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
        except sqlite3.OperationalError as error:
            self._failed(error, 0)
        except (OSError, sqlite3.DatabaseError, msgspec.MsgspecError) as error:
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
        except (OSError, sqlite3.OperationalError) as error:  # it is not the file that is no good, but the moment
            if "full" in str(error) and self._connection is not None:
                self._prune()
            else:
                self._disconnect()
            self._failed(error, num_spans)
        except (sqlite3.DatabaseError, msgspec.MsgspecError) as error:
            self._put_aside(error)
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
        traces: dict[int, Pairs] = {}
        for seq, _, span, resource in self._connection.execute(_SPANS):
            traces.setdefault(seq, []).append((_decode_span(span), _decode_resource(resource)))
        return list(traces.values())

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
        """Free space in a full file: its oldest traces go, as they do in memory."""
        assert self._connection is not None
        try:
            with self._connection as connection:
                (num,) = connection.execute("select count(*) from traces").fetchone()
                oldest = "select seq from traces order by seq limit ?"
                (last,) = connection.execute(f"select max(seq) from ({oldest})", (num // PRUNED + 1,)).fetchone()
                for table in ("spans", "traces"):
                    connection.execute(f"delete from {table} where seq <= ?", (last,))
        except sqlite3.DatabaseError as error:
            log.warning("no space could be freed in %s: %s", self._path, error)

    def _put_aside(self, error: Exception) -> None:
        """Begin a new file; the broken one stays beside it for inspection."""
        log.warning("traces of earlier are lost, %s cannot be read: %s", self._path, error)
        self._disconnect()
        try:
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._path.replace(self._path.with_name(self._path.name + ".broken"))
            self._connect()
        except (OSError, sqlite3.Error) as again:
            self._failed(again, 0)


def _scrub(connection: sqlite3.Connection) -> None:
    """Take out of every span what people wrote and what models answered."""
    for seq, span_id, raw_span, raw_resource in connection.execute(_SPANS).fetchall():
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
