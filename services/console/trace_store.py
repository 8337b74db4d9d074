"""The latest traces: a bounded ring in memory, and a file that survives restarts.

Bounds: traces, bytes of encoded spans, spans per trace, and a quarter of the bytes for any one trace. A thread
writes the file; spans that the disk cannot take are dropped and counted. Each start rewrites the file from the ring."""

import contextlib
import errno
import logging
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from glowplug.services.console.spans import Resource, Span, without_texts
from glowplug.telemetry import semconv

TRACE_OVERHEAD_BYTES: Final = 2048  # one trace without spans, measured with tracemalloc, rounded up
SPAN_OVERHEAD_BYTES: Final = 256
MAX_REQUEST_IDS: Final = 8  # a client may send many requests under its own trace
MAX_REQUEST_ID_CHARS: Final = 128

_encode = msgspec.msgpack.Encoder().encode
_decode_span = msgspec.msgpack.Decoder(Span).decode
_decode_resource = msgspec.msgpack.Decoder(Resource).decode
log = logging.getLogger(__name__)

MAGIC: Final = b"glowplug traces 1\n"  # then per span: the lengths of span and resource, and both encoded
WRITE_EVERY_S: Final = 0.5
RETRY_S: Final = 5.0
MAX_PENDING: Final = 50_000
_LENGTHS: Final = struct.Struct("<II")
Pairs = list[tuple[Span, Resource]]


class TraceSummary(msgspec.Struct):
    """Times are epoch nanoseconds; `revision` grows with each span."""

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
        self.spans: dict[str, tuple[bytes, bytes]] = {}  # span id -> (span, resource), encoded
        self.resources: set[bytes] = set()
        self.num_bytes = TRACE_OVERHEAD_BYTES


class TraceStore:
    """A ring of traces by first arrival."""

    def __init__(self, *, max_traces: int = 2000, max_bytes: int = 32 << 20, max_spans_per_trace: int = 2000) -> None:
        assert max_traces > 0 and max_bytes > 0 and max_spans_per_trace > 0
        self._max_traces = max_traces
        self._max_bytes = max_bytes
        self._max_spans = max_spans_per_trace
        self._traces: OrderedDict[str, _Trace] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self.disk: TraceDisk | None = None
        self.num_bytes = 0
        self.num_spans = 0
        self.num_evicted = 0
        self.num_dropped_spans = 0

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, batch: Iterable[tuple[Span, Resource]]) -> list[TraceSummary]:
        """Keep spans, each once, and return summaries of the changed traces."""
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
        """Take the traces of a disk, and write to it from then on. Blocks."""
        self.add(disk.open())
        self.num_evicted = self.num_dropped_spans = 0
        disk.begin(record for trace in self._traces.values() for record in trace.spans.values())
        self.disk = disk

    def get(self, trace_id: str, *, with_texts: bool = True) -> list[tuple[Span, Resource]] | None:
        """Return spans by start time. Short ids are zero-padded, as in Jaeger. Without `with_texts` prompts and answers
        are left out."""
        trace = self._traces.get(normal_id(trace_id))
        if trace is None:
            return None
        resources = {encoded: _decode_resource(encoded) for encoded in trace.resources}
        pairs = [(_decode_span(span), resources[resource]) for span, resource in trace.spans.values()]
        pairs = pairs if with_texts else [without_texts(*pair) for pair in pairs]
        return sorted(pairs, key=lambda pair: (pair[0].start_ns, -pair[0].end_ns, pair[0].span_id))

    def summary(self, trace_id: str) -> TraceSummary | None:
        trace = self._traces.get(normal_id(trace_id))
        return trace.summary if trace else None

    def trace_of_request(self, request_id: str) -> str | None:
        return self._by_request.get(request_id)

    def newest(self) -> Iterator[TraceSummary]:
        for trace in reversed(self._traces.values()):
            yield trace.summary

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
            self.disk.keep(encoded, resource)
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
            line.model = model  # not that of a model stopped for it
        if request_id and request_id not in line.request_ids and len(line.request_ids) < MAX_REQUEST_IDS:
            line.request_ids = (*line.request_ids, request_id)
            self._by_request[request_id] = line.trace_id

    def _evict(self) -> None:
        while len(self._traces) > self._max_traces or self.num_bytes > self._max_bytes:
            _, trace = self._traces.popitem(last=False)
            self.num_bytes -= trace.num_bytes
            self.num_spans -= len(trace.spans)
            self.num_evicted += 1
            for request_id in trace.summary.request_ids:
                if self._by_request.get(request_id) == trace.summary.trace_id:
                    del self._by_request[request_id]


def normal_id(trace_id: str) -> str:
    return trace_id.strip().lower().rjust(32, "0")


class TraceDisk:
    """A file of appended spans. At `max_bytes` it replaces `<name>.1` and a new one begins: together they hold more
    than the ring.

    `keep` returns at once; `open`, `begin` and `close` block. With `keep_content` False, earlier prompts are not
    read, and `begin` removes them from the disk. `on_failure` gets the number of spans lost, on the writing thread."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        keep_content: bool,
        on_failure: Callable[[int], None] = lambda _: None,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._path, self._older = path, path.with_name(f"{path.name}.1")
        self._max_bytes, self._keep_content, self._on_failure = max_bytes, keep_content, on_failure
        self._pending: list[bytes] = []
        self._max_pending = max_pending
        self._guard, self._writing, self._stopping = threading.Lock(), threading.Lock(), threading.Event()
        self._size = 0  # of the valid part
        self._thread: threading.Thread | None = None
        self.problem = ""
        self.num_bytes = 0  # of both files

    def open(self) -> list[tuple[Span, Resource]]:
        """Return the spans of earlier runs, oldest first. Never raises for disk errors."""
        found: list[tuple[Span, Resource]] = []
        for path in (self._older, self._path):
            try:
                found += self._read(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._failed(error, 0)
        return found

    def begin(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        """Replace the disk's contents. Never raises for disk errors."""
        scratch = self._path.with_name(f"{self._path.name}.new")
        try:
            self._size = _append(scratch, 0, b"".join(_record(*record) for record in records))
            scratch.replace(self._path)
            self._older.unlink(missing_ok=True)
        except OSError as error:
            self._failed(error, 0)
            with contextlib.suppress(OSError):  # earlier contents may be forbidden now
                for path in (scratch, self._path, self._older):
                    path.unlink(missing_ok=True)
        self._measure()
        self._thread = threading.Thread(target=self._write_loop, name="trace-disk", daemon=True)
        self._thread.start()

    def keep(self, span: bytes, resource: bytes) -> None:
        with self._guard:
            if len(self._pending) < self._max_pending:
                self._pending.append(_record(span, resource))
                return
        self._on_failure(1)

    def close(self, patience_s: float = 3.0) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(patience_s)

    def write(self) -> None:
        with self._writing:
            with self._guard:
                batch, self._pending = self._pending, []
            if not batch:
                return
            try:
                if self._size >= self._max_bytes:
                    self._path.replace(self._older)
                    self._size = 0
                self._size = _append(self._path, self._size, b"".join(batch))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._older.unlink(missing_ok=True)  # makes room for the next batch
                self._failed(error, len(batch))
            else:
                if self.problem:
                    log.warning("the console writes traces to %s again", self._path)
                self.problem = ""
            self._measure()

    def _write_loop(self) -> None:
        while not self._stopping.wait(RETRY_S if self.problem else WRITE_EVERY_S):
            self.write()
        self.write()

    def _measure(self) -> None:
        self.num_bytes = self._size + (self._older.stat().st_size if self._older.exists() else 0)

    def _failed(self, error: Exception, num_spans: int) -> None:
        if not self.problem:
            log.warning("the console cannot use %s and keeps traces in memory only: %s", self._path, error)
        self.problem = str(error) or type(error).__name__
        self._on_failure(num_spans)

    def _read(self, path: Path) -> list[tuple[Span, Resource]]:
        """Skip a record cut short by a kill; set a broken file aside. Raises OSError."""
        content, found = path.read_bytes(), []
        try:
            if not content.startswith(MAGIC):
                raise ValueError("it is no file of traces of this version")
            at = len(MAGIC)
            while at + _LENGTHS.size <= len(content):
                span_bytes, resource_bytes = _LENGTHS.unpack_from(content, at)
                middle = at + _LENGTHS.size + span_bytes
                if middle + resource_bytes > len(content):
                    break
                span = _decode_span(content[middle - span_bytes : middle])
                at = middle + resource_bytes
                found.append(self._permitted(span, _decode_resource(content[middle:at])))
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("the console cannot read all traces in %s, which becomes %s.broken: %s", path, path.name, error)
            path.replace(path.with_name(f"{path.name}.broken"))
        return found

    def _permitted(self, span: Span, resource: Resource) -> tuple[Span, Resource]:
        return (span, resource) if self._keep_content else without_texts(span, resource)


def _record(span: bytes, resource: bytes) -> bytes:
    return _LENGTHS.pack(len(span), len(resource)) + span + resource


def _append(path: Path, size: int, content: bytes) -> int:
    """Write after the first `size` bytes, over the remains of a failed write. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
        begin = size if file.seek(0, os.SEEK_END) >= size else 0  # 0: the file was emptied
        file.truncate(begin)
        file.seek(begin)
        file.write(content if begin else MAGIC + content)
        return file.tell()
