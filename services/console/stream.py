"""Send changes to every open page: one diff per beat for all, in a bounded queue for each.

A slow page loses its oldest messages and gets their number; it then asks for the whole fleet again."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from glowplug.services.console.fleet_rows import FleetRow, changes, shown
from glowplug.services.console.fleet_view import DECISIONS_SHOWN, RowTable, ShownFleet
from glowplug.services.console.records import HEARTBEAT_S, Mailbox, message
from glowplug.services.console.stories import TraceSummary

_TABLES: Final = {  # in a patch -> (attribute of the view, key)
    "models": ("model_rows", "key"),
    "instances": ("instance_rows", "instance_id"),
    "nodes": ("node_rows", "node_id"),
}


class TooManyClients(Exception):
    """The stream is full."""


class Differ:
    def __init__(self) -> None:
        self._decisions: frozenset[str] = frozenset()
        self._sources: object = None

    def patch(self, view: ShownFleet, now_s: float) -> dict[str, Any] | None:
        """Return new rows, changed fields of values and of joined facts under `changed`, ids under `removed`, and new
        decisions, newest first; None without a change."""
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
        latest = view.decisions.latest(DECISIONS_SHOWN)
        if fresh := [record for record in latest if record.decision_id not in self._decisions]:
            patch["decisions"] = [shown(view.decisions.row(record)) for record in fresh]
            self._decisions = frozenset(record.decision_id for record in latest)
        if view.sources != self._sources:
            patch["sources"] = self._sources = dict(view.sources)
        return {"now": now_s, **patch} if patch else None


def _compared(table: RowTable[FleetRow[Any, Any]], key: str) -> tuple[list[Any], list[dict[str, Any]], list[str]]:
    new, changed, removed = [], [], []
    for id_, old in table.take_changed().items():
        row = table.rows.get(id_)
        if row is None:
            if old is not None:
                removed.append(id_)
        elif old is None:
            new.append(shown(row))
        elif parts := changes(old, row):
            changed.append({key: id_, **parts})
    return new, changed, removed


class OpenPage(Mailbox[bytes]):
    async def messages(self, heartbeat_s: float = HEARTBEAT_S) -> AsyncIterator[bytes]:
        async for waiting, num_dropped in self.arrivals(heartbeat_s):
            if num_dropped:
                yield message("dropped", {"num": num_dropped})
            for raw in waiting or [b": beat\n\n"]:
                yield raw


class Hub:
    """All open pages. `flush` does nothing without any."""

    def __init__(self, *, queue_limit: int = 64, max_clients: int = 64) -> None:
        self.clients: set[OpenPage] = set()
        self.num_dropped = 0
        self._queue_limit = queue_limit
        self._max_clients = max_clients
        self._differ = Differ()
        self._closed = False

    def join(self, view: ShownFleet, now_s: float) -> OpenPage:
        """Add a page, which gets the whole fleet first. Raises TooManyClients."""
        if self._closed or len(self.clients) >= self._max_clients:
            raise TooManyClients
        self._flush_fleet(view, now_s)  # brings the others to the new page's first state
        client = OpenPage(self._queue_limit)
        fleet = view.snapshot(now_s)
        tables = {name: list(map(shown, getattr(fleet, name))) for name in (*_TABLES, "decisions")}
        client.put(message("fleet", {"now": fleet.now, "sources": fleet.sources, **tables}))
        self.clients.add(client)
        return client

    def leave(self, client: OpenPage) -> None:
        self.clients.discard(client)

    def flush(self, view: ShownFleet, now_s: float, traces: Sequence[TraceSummary] = ()) -> None:
        """Send changes, and the traces that have changed."""
        self._flush_fleet(view, now_s)
        if traces:
            self._send(message("traces", {"traces": traces}))

    def close(self) -> None:
        """Close every page, so that the server can stop."""
        self._closed = True
        for client in self.clients:
            client.close()

    def _flush_fleet(self, view: ShownFleet, now_s: float) -> None:
        patch = self._differ.patch(view, now_s)
        if patch is not None:
            self._send(message("patch", patch))

    def _send(self, raw: bytes) -> None:
        for client in self.clients:
            self.num_dropped += client.put(raw)
