"""What changed, sent to every open page: one diff per beat, shared by all, in a bounded queue for each.

A page that reads too slowly loses its oldest messages and is sent how many; it then asks for the whole fleet again.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import takewhile
from typing import Any, Final

from services.console.fleet_view import FleetView, RowTable
from services.console.records import Newest, message
from services.console.trace_store import TraceSummary

HEARTBEAT_S: Final = 10.0

_TABLES: Final = {  # in a patch -> (of the view, the key of its rows)
    "models": ("model_rows", "key"),
    "instances": ("instance_rows", "instance_id"),
    "nodes": ("node_rows", "node_id"),
}
_LOGS: Final = ("decisions", "requests")


class TooManyClients(Exception):
    """Every place at the stream is taken."""


class Differ:
    """Remembers what was sent last; `patch` is what a page needs to get from there to what the view knows."""

    def __init__(self) -> None:
        self._newest: dict[str, object] = {}
        self._sources: object = None

    def patch(self, view: FleetView, now_s: float) -> dict[str, Any] | None:
        """Rows that are new, under `changed` the fields of those that are other, under `removed` the ids of those gone,
        new log lines newest first; None when nothing changed."""
        now_s = view.refresh(now_s)
        patch: dict[str, Any] = {}
        for name, (table, key) in _TABLES.items():
            new, changed, removed = _compared(getattr(view, table), key)
            if new:
                patch[name] = new
            if changed:
                patch.setdefault("changed", {})[name] = changed
            if removed:
                patch.setdefault("removed", {})[name] = removed
        for log in _LOGS:
            if fresh := self._fresh(log, getattr(view, log)):
                patch[log] = fresh
        if view.sources != self._sources:
            patch["sources"] = self._sources = dict(view.sources)
        return {"now": now_s, "seq": view.seq, **patch} if patch else None

    def _fresh(self, log: str, lines: deque[Any]) -> list[Any]:
        newest = self._newest.get(log)
        fresh = list(takewhile(lambda line: line is not newest, reversed(lines)))
        if fresh:
            self._newest[log] = fresh[0]
        return fresh


def _compared(table: RowTable[Any], key: str) -> tuple[list[Any], list[dict[str, Any]], list[str]]:
    """Rows that are new, the fields of those that are other, and the ids of those gone, since it was last asked."""
    new, changed, removed = [], [], []
    for id_, old in table.take_changed().items():
        row = table.rows.get(id_)
        if row is None:
            if old is not None:
                removed.append(id_)
        elif old is None:
            new.append(row)
        elif fields := {f: value for f in row.__struct_fields__ if (value := getattr(row, f)) != getattr(old, f)}:
            changed.append({key: id_, **fields})
    return new, changed, removed


class Client:
    """One open page."""

    def __init__(self, limit: int) -> None:
        self._queue: deque[bytes] = deque()
        self._limit = limit
        self._wake = asyncio.Event()
        self._closed = False
        self.num_dropped = 0  # since the page was last sent that

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

    def __init__(self, *, queue_limit: int = 64, max_clients: int = 64) -> None:
        self.clients: set[Client] = set()
        self.num_dropped = 0
        self._queue_limit = queue_limit
        self._max_clients = max_clients
        self._differ = Differ()
        self._traces: Newest[str, TraceSummary] = Newest(queue_limit)  # changed since the last flush
        self._closed = False

    def join(self, view: FleetView, now_s: float) -> Client:
        """A new page: it gets the whole fleet first. Raises TooManyClients."""
        if self._closed or len(self.clients) >= self._max_clients:
            raise TooManyClients
        self._flush_fleet(view, now_s)  # brings the others to the state the new page starts from
        client = Client(self._queue_limit)
        client.put(message("fleet", view.snapshot(now_s)))
        self.clients.add(client)
        return client

    def leave(self, client: Client) -> None:
        self.clients.discard(client)

    def trace_changed(self, summary: TraceSummary) -> None:
        """Spans came in for this trace; pages are sent it at the next flush, once."""
        if self.clients:
            self._traces.put(summary.trace_id, summary)

    def flush(self, view: FleetView, now_s: float) -> None:
        """Send what changed since the last flush."""
        self._flush_fleet(view, now_s)
        if self._traces:
            self._send(message("traces", {"traces": list(self._traces.values())}))
            self._traces.clear()

    def close(self) -> None:
        """Let every page go, so that the server can stop."""
        self._closed = True
        for client in self.clients:
            client.close()

    def _flush_fleet(self, view: FleetView, now_s: float) -> None:
        patch = self._differ.patch(view, now_s)
        if patch is not None:
            self._send(message("patch", patch))

    def _send(self, raw: bytes) -> None:
        for client in self.clients:
            self.num_dropped += client.put(raw)
