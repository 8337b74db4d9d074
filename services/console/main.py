"""The console process. Bus and store feed the view, the view feeds the open pages; neither is needed to run."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Final

from glowplug.bus.port import Bus
from glowplug.domain.decision import DecisionRecord
from glowplug.events import Event
from glowplug.events.envelope import PAYLOADS, MalformedEvent
from glowplug.events.facts import RouterRequestsFinished, ServiceStarted
from glowplug.events.subjects import COMMANDS_ALL, FACTS, USAGE, filters, is_telemetry
from glowplug.fleet.clocks import laying
from glowplug.runtime.identity import PROCESSES, ServiceHolder
from glowplug.runtime.key_reader import KeyReader
from glowplug.runtime.service import World, run, serve_rest
from glowplug.runtime.tasks import end, essential
from glowplug.runtime.unreadable import Unreadable
from glowplug.services.console.app import Console, build_app
from glowplug.services.console.fleet_view import TABLES
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.settings import ConsoleSettings
from glowplug.state.port import NotATable, Store, StoreUnavailable
from glowplug.state.rows import read_row
from glowplug.telemetry.metrics import ShellMetrics

log = logging.getLogger(__name__)

DECISIONS_LOG: Final = "decisions"
DECISIONS_READ: Final = 100
_TELEMETRY = [cls for kind, cls in PAYLOADS.items() if is_telemetry(kind) and kind != "request.finished"]
WATCHED: Final = (FACTS, USAGE, *filters(_TELEMETRY), COMMANDS_ALL)  # ends of requests arrive in reports
ENDS_LISTED: Final = 32  # of one report, the newest; history and request log count all
UNSEEN_BEATS: Final = 5


class Feed:
    """Keep a console's view fresh. `connect` waits for the bus; the store is read every `resync_s`."""

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
        self._read: dict[str, dict[str, tuple[bytes, Any]]] = {}

    def start(self, stopping: asyncio.Event | None = None) -> None:
        """Start. A failed loop sets `stopping`: a page must not present an old fleet as the current one."""
        console = self._console
        loops = [self._listen, self._resync_loop, self._beat_loop, console.usage.forget, console.history.keep]
        if console.spans is not None:
            loops.append(console.spans.run)
        if console.disk is not None:
            loops.append(console.disk.run)
        self._tasks = [asyncio.create_task(loop()) for loop in loops]
        for task in self._tasks:
            if stopping is not None:
                essential(task, stopping)

    async def stop(self) -> None:
        self._console.hub.close()
        self._console.events.close()
        await end(self._tasks)

    async def _listen(self) -> None:
        """Core subscriptions suffice for the present. Usage is read durably: the ledger needs all of it."""
        await self._connect()
        for subject in WATCHED:
            await self._bus.subscribe([subject], self._on_event)
        await self._console.usage.listen(self._bus)

    async def _on_event(self, event: Event) -> None:
        console = self._console
        take(console, event, console.clock())
        if isinstance(event.data, ServiceStarted):
            console.upstream.addresses.learn(event.data.service, event.data.data_url or event.data.url)

    async def _resync_loop(self) -> None:
        while True:
            await self.resync()
            await asyncio.sleep(self._console.settings.resync_s)

    async def resync(self) -> None:
        """An unreadable row is skipped, named and counted; an unreadable table leaves the page unchanged."""
        view, clock = self._console.view, self._console.clock
        try:
            for table, cls in TABLES.items():
                try:
                    raw_rows = await self._store.load(table)
                except NotATable as error:
                    self._unreadable.whole(table, str(error))
                    continue
                view.restore(table, self._readable(table, raw_rows, cls), clock())
            view.decisions.restore(await self._decisions())
        except StoreUnavailable as error:
            if view.sources["store"].is_up:
                log.warning("the console cannot read the store: %s", error)
            view.source("store", False, clock())
            return
        view.source("store", True, clock())
        await self._read_processes()
        if self._health:
            self._health.synced_at.set(clock())

    async def _read_processes(self) -> None:
        """If the store refuses this table, only logs of services are missing."""
        try:
            raw_rows = await self._store.load(PROCESSES)
            self._console.log_sources.processes = self._readable(PROCESSES, raw_rows, ServiceHolder)
        except (NotATable, StoreUnavailable) as error:
            log.warning("the console cannot read the addresses of services and shows logs of nodes alone: %s", error)

    async def _decisions(self) -> list[DecisionRecord]:
        wanted = DECISIONS_READ if len(self._console.view.decisions) else self._console.settings.decisions_kept
        try:
            tail = await self._store.tail(DECISIONS_LOG, wanted)
        except NotATable as error:
            self._unreadable.whole(DECISIONS_LOG, str(error))
            return []
        named = {blake2b(raw, digest_size=8).hexdigest(): raw for raw in tail}
        return list(self._readable(DECISIONS_LOG, named, DecisionRecord).values())

    def _readable(self, table: str, raw_rows: Mapping[str, bytes], cls: type[Any]) -> dict[str, Any]:
        rows, unreadable = {}, {}
        before, self._read[table] = self._read.get(table, {}), (now := {})
        lay = laying(cls, self._console.clocks, self._console.clock) or (lambda row: row)
        for key, raw in raw_rows.items():
            read, row = before.get(key, (b"", None))
            try:
                if read != raw or row is None:
                    row = lay(read_row(table, key, raw, cls))
            except MalformedEvent as error:
                unreadable[key] = str(error)
            else:
                now[key], rows[key] = (raw, row), row
        self._unreadable.seen(table, unreadable)
        return rows

    async def _beat_loop(self) -> None:
        """Slower while no page is open: a new page gets the whole fleet at once."""
        loop = asyncio.get_running_loop()
        while True:
            beat_s = self._console.settings.stream_beat_s
            beat_s *= 1 if self._console.hub.clients else UNSEEN_BEATS
            due = loop.time() + beat_s
            await asyncio.sleep(beat_s)
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
        console.metrics.traces.set(len(console.stories))
        console.metrics.stream_clients.set(len(console.hub.clients))
        if console.hub.clients:
            console.hub.flush(console.view, now_s, console.stories.take_changed())
        console.metrics.stream_dropped.inc(console.hub.num_dropped - self._dropped_counted)
        self._dropped_counted = console.hub.num_dropped


def take(console: Console, event: Event, now_s: float) -> None:
    event = console.clocks.laid(event, now_s, dated=True)
    for one in as_listed(event):
        console.events.take(one)
    console.view.take(event, now_s)
    console.requests.take(event, now_s)
    if console.stories.take(event) and console.disk is not None:
        console.disk.keep(event)
    console.history.take(event, now_s)


def as_listed(event: Event) -> Iterator[Event]:
    """Yield events for the log: the newest `request.finished` of a router's report, or the event itself."""
    if not isinstance(event.data, RouterRequestsFinished):
        yield event
        return
    for number, (request, traceparent) in list(enumerate(event.data.traced()))[-ENDS_LISTED:]:
        yield replace(
            event,
            event_id=f"{event.event_id}-{number}",
            type=request.TYPE,
            occurred_at=request.finished_at,
            data=request,
            cause_id=request.request_id,
            traceparent=traceparent,
        )


async def serve(stopping: asyncio.Event) -> None:
    settings = ConsoleSettings.read()
    world = World.open("console", settings)
    console = Console(settings, ConsoleMetrics(), keys=KeyReader(world.store))
    await asyncio.to_thread(console.open_disk)
    feed = Feed(console, world.bus, world.store, world.bus.connect, world.metrics)
    server, _ = await serve_rest(build_app(console), settings)
    feed.start(stopping)
    waiter = asyncio.create_task(stopping.wait())
    await asyncio.wait({waiter, server}, return_when=asyncio.FIRST_COMPLETED)
    await feed.stop()
    await console.history.close()
    await console.upstream.close()
    if console.spans is not None:
        await console.spans.close()
    if console.disk is not None:
        await asyncio.to_thread(console.disk.write)
    await world.close(waiter, server)
    console.ledger.close()


def main() -> None:
    run(serve)


if __name__ == "__main__":
    main()
