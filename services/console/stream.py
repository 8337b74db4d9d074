"""What changed, sent to every open page: one diff per beat, shared by all, in a bounded queue for each.

A page that reads too slowly loses its oldest messages and is told how many; it then asks for the whole fleet again.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

from services.console.fleet_view import Snapshot
from services.console.trace_store import TraceSummary

QUEUE_LIMIT: Final = 64
MAX_CLIENTS: Final = 64
HEARTBEAT_S: Final = 10.0

_encode = msgspec.json.Encoder().encode
_KEYED: Final = {"models": "key", "instances": "instance_id", "nodes": "node_id"}
_LOGS: Final = {"decisions": "decision_id", "requests": "request_id"}


class TooManyClients(Exception):
    """Every place at the stream is taken."""


def message(name: str, data: object) -> bytes:
    """One server-sent event. JSON has no raw line break, so one data line is enough."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(data) + b"\n\n"


class Differ:
    """Remembers what was sent last; `patch` is what a page needs to get from there to `snapshot`."""

    def __init__(self) -> None:
        self._sent: dict[str, dict[str, Any]] = {name: {} for name in _KEYED}
        self._newest: dict[str, object] = {}
        self._sources: object = None

    def patch(self, snapshot: Snapshot) -> dict[str, Any] | None:
        """Rows that are new or changed, ids that are gone, new log lines newest first; None when nothing changed."""
        patch: dict[str, Any] = {}
        removed: dict[str, list[str]] = {}
        for table, key in _KEYED.items():
            rows = {getattr(row, key): row for row in getattr(snapshot, table)}
            old = self._sent[table]
            if changed := [row for id_, row in rows.items() if old.get(id_) != row]:
                patch[table] = changed
            if gone := [id_ for id_ in old if id_ not in rows]:
                removed[table] = gone
            self._sent[table] = rows
        for log in _LOGS:
            if fresh := self._fresh(log, getattr(snapshot, log)):
                patch[log] = fresh
        if snapshot.sources != self._sources:
            patch["sources"] = self._sources = snapshot.sources
        if removed:
            patch["removed"] = removed
        return {"now": snapshot.now, "seq": snapshot.seq, **patch} if patch else None

    def _fresh(self, log: str, lines: list[Any]) -> list[Any]:
        newest = self._newest.get(log)
        fresh = []
        for line in lines:
            if line == newest:
                break
            fresh.append(line)
        if lines:
            self._newest[log] = lines[0]
        return fresh


class Client:
    """One open page."""

    def __init__(self, limit: int) -> None:
        self._queue: deque[bytes] = deque()
        self._limit = limit
        self._wake = asyncio.Event()
        self._closed = False
        self.num_dropped = 0  # since the page was last told

    def put(self, raw: bytes) -> int:
        """Queue one message; returns how many old ones had to go."""
        dropped = 0
        while len(self._queue) >= self._limit:
            self._queue.popleft()
            dropped += 1
        self.num_dropped += dropped
        self._queue.append(raw)
        self._wake.set()
        return dropped

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    async def messages(self, heartbeat_s: float = HEARTBEAT_S) -> AsyncIterator[bytes]:
        """Messages as they come, a comment when there is none for a while; ends when closed."""
        while not self._closed:
            try:
                await asyncio.wait_for(self._wake.wait(), heartbeat_s)
            except TimeoutError:
                yield b": beat\n\n"
                continue
            self._wake.clear()
            if self.num_dropped:
                num_dropped, self.num_dropped = self.num_dropped, 0
                yield message("dropped", {"num": num_dropped})
            while self._queue:
                yield self._queue.popleft()


class Hub:
    """All open pages. `flush` is called at a steady beat and does nothing while no page is open."""

    def __init__(self, *, queue_limit: int = QUEUE_LIMIT, max_clients: int = MAX_CLIENTS) -> None:
        self.clients: set[Client] = set()
        self.num_dropped = 0
        self._queue_limit = queue_limit
        self._max_clients = max_clients
        self._differ = Differ()
        self._traces: dict[str, TraceSummary] = {}  # changed since the last flush
        self._closed = False

    def join(self, snapshot: Snapshot) -> Client:
        """A new page: it gets the whole fleet first. Raises TooManyClients."""
        if self._closed or len(self.clients) >= self._max_clients:
            raise TooManyClients
        self._flush_fleet(snapshot)  # brings the others to the state the new page starts from
        client = Client(self._queue_limit)
        client.put(message("fleet", snapshot))
        self.clients.add(client)
        return client

    def leave(self, client: Client) -> None:
        self.clients.discard(client)

    def trace_changed(self, summary: TraceSummary) -> None:
        """Spans came in for this trace; pages hear of it at the next flush, once."""
        if self.clients:
            self._traces.pop(summary.trace_id, None)
            self._traces[summary.trace_id] = summary
            if len(self._traces) > self._queue_limit:
                del self._traces[next(iter(self._traces))]

    def flush(self, snapshot: Snapshot) -> None:
        """Send what changed since the last flush."""
        self._flush_fleet(snapshot)
        if self._traces:
            self._send(message("traces", {"traces": list(self._traces.values())}))
            self._traces = {}

    def close(self) -> None:
        """Let every page go, so that the server can stop."""
        self._closed = True
        for client in self.clients:
            client.close()

    def _flush_fleet(self, snapshot: Snapshot) -> None:
        patch = self._differ.patch(snapshot)
        if patch is not None:
            self._send(message("patch", patch))

    def _send(self, raw: bytes) -> None:
        for client in self.clients:
            self.num_dropped += client.put(raw)
