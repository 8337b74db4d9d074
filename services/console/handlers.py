"""Wiring: the bus and the store feed the view, the view feeds the open pages. Neither is needed to live."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final

from glowplug.bus.port import Bus
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.envelope import MalformedEvent
from glowplug.events.facts import InstanceChange, ServiceStarted
from glowplug.events.subjects import COMMANDS_ALL, FACTS, TELEMETRY
from glowplug.runtime.tasks import end, essential
from glowplug.runtime.unreadable import Unreadable
from glowplug.state.port import NotATable, Store, StoreUnavailable
from glowplug.state.rows import read_row
from glowplug.telemetry.metrics import ShellMetrics
from services.console.app import Console
from services.console.fleet_view import TABLES

log = logging.getLogger(__name__)

DECISIONS_LOG: Final = "decisions"
DECISIONS_READ: Final = 100
WATCHED: Final = (FACTS, TELEMETRY, COMMANDS_ALL)


class Feed:
    """Keeps a console's view fresh. `connect` waits for the bus; the store is asked again every `resync_s`."""

    def __init__(
        self,
        console: Console,
        bus: Bus,
        store: Store,
        connect: Callable[[], Awaitable[None]],
        health: ShellMetrics | None = None,
    ) -> None:
        self._console, self._bus, self._store, self._connect = console, bus, store, connect
        self._health = health
        self._tasks: list[asyncio.Task[None]] = []
        self._dropped_counted = 0
        self._unreadable = Unreadable(health.unreadable_rows if health else None)
        self._read: dict[str, dict[str, tuple[bytes, Any]]] = {}  # table -> key -> row as last read, what it says

    def start(self, stopping: asyncio.Event | None = None) -> None:
        """Begin; a loop that fails sets `stopping`, since a page that shows an old fleet as the present one lies."""
        self._tasks = [asyncio.create_task(loop()) for loop in (self._listen, self._resync_loop, self._beat_loop)]
        if stopping is not None:
            for task in self._tasks:
                essential(task, stopping)

    async def stop(self) -> None:
        """Let every page go, then end the loops."""
        self._console.hub.close()
        self._console.events.close()
        await end(self._tasks)

    async def _listen(self) -> None:
        """Core subscriptions: a reader that shows the present has no use for yesterday's facts."""
        await self._connect()
        for subject in WATCHED:
            await self._bus.subscribe([subject], self._on_event)

    async def _on_event(self, event: Event) -> None:
        console, now_s = self._console, self._console.clock()
        console.events.take(event)
        console.decisions.take(event)
        console.view.take(event, now_s)
        console.requests.take(event, now_s)
        match event.data:
            case ServiceStarted() as started:
                console.upstream.addresses.learn(started.service, started.data_url or started.url)
            case data if isinstance(data, InstanceChange):
                console.starts.put(data.instance)

    async def _resync_loop(self) -> None:
        while True:
            await self.resync()
            await asyncio.sleep(self._console.settings.resync_s)

    async def resync(self) -> None:
        """Read the tables and the tail of the decisions once. An unreadable row is left out, named and counted; what is
        no table or log at all leaves the page as it was."""
        view, clock = self._console.view, self._console.clock
        try:
            for table, cls in TABLES.items():
                try:
                    raw_rows = await self._store.load(table)
                except NotATable as error:
                    self._unreadable.whole(table, str(error))
                    continue
                table_rows = self._readable(table, raw_rows, cls)
                view.restore(table, table_rows, clock())
                if cls is Model:
                    for model in table_rows.values():
                        self._console.decisions.put_model(model)
                if cls is Instance:
                    self._restore_starts(table_rows.values())
            records = await self._decisions()
        except StoreUnavailable as error:
            if view.sources["store"].is_up:
                log.warning("store: %s", error)
            view.source("store", False, clock())
            return
        view.restore_decisions(records[:DECISIONS_READ])
        self._console.decisions.restore(records)
        view.source("store", True, clock())
        if self._health:
            self._health.synced_at.set(clock())

    def _restore_starts(self, instances: Iterable[Instance]) -> None:
        for instance in sorted(instances, key=lambda i: i.changed_at):
            self._console.starts.put(instance)
            self._console.decisions.put_instance(instance)

    async def _decisions(self) -> list[DecisionRecord]:
        """The newest decisions of the log, newest first. Raises StoreUnavailable."""
        wanted = DECISIONS_READ if len(self._console.decisions) else self._console.settings.decisions_kept
        try:
            tail = await self._store.tail(DECISIONS_LOG, wanted)
        except NotATable as error:
            self._unreadable.whole(DECISIONS_LOG, str(error))
            return []
        # A row is named by its bytes: its place in the log changes with each new one.
        named = {blake2b(raw, digest_size=8).hexdigest(): raw for raw in tail}
        return list(self._readable(DECISIONS_LOG, named, DecisionRecord).values())

    def _readable(self, table: str, raw_rows: Mapping[str, bytes], cls: type[Any]) -> dict[str, Any]:
        """The rows that can be read. A row that is as it was is not decoded anew."""
        rows, unreadable = {}, {}
        before, self._read[table] = self._read.get(table, {}), (now := {})
        for key, raw in raw_rows.items():
            known = before.get(key)
            try:
                now[key] = known if known and known[0] == raw else (raw, read_row(table, key, raw, cls))
                rows[key] = now[key][1]
            except MalformedEvent as error:
                unreadable[key] = str(error)
        self._unreadable.seen(table, unreadable)
        return rows

    async def _beat_loop(self) -> None:
        """The pulse of every page: what changed since the last one."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._console.settings.stream_beat_s
            await asyncio.sleep(self._console.settings.stream_beat_s)
            if self._health:
                self._health.ticked(loop.time() - due, 0, self._bus.counts)
            self.beat()

    def beat(self) -> None:
        console = self._console
        now_s = console.clock()
        console.view.source("bus", self._bus.connected, now_s)
        if self._health:
            self._health.bus_connected.set(self._bus.connected)
            self._health.store_connected.set(console.view.sources["store"].is_up)
        if (disk := console.traces.disk) is not None:
            console.metrics.disk_bytes.set(disk.num_bytes)
        console.metrics.stream_clients.set(len(console.hub.clients))
        if console.hub.clients:
            console.hub.flush(console.view, now_s)
        console.metrics.stream_dropped.inc(console.hub.num_dropped - self._dropped_counted)
        self._dropped_counted = console.hub.num_dropped
