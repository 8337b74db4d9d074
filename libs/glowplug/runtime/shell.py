"""Connect a pure controller to bus and store: one inbox, one loop, effects in order."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from glowplug.bus.port import Bus, BusUnavailable
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save, Tick
from glowplug.controllers.port import Controller
from glowplug.controllers.reads import Reads
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.errors import StaleEpoch
from glowplug.events import Event
from glowplug.events.envelope import COMMANDS, to_json
from glowplug.events.facts import DecisionMade
from glowplug.fleet.clocks import Clocks, laying
from glowplug.runtime.clock import CLOCK, now_s, published
from glowplug.runtime.tasks import end
from glowplug.runtime.unreadable import Unreadable
from glowplug.state.port import NotATable, Store, StoreUnavailable
from glowplug.state.rows import TableReader
from glowplug.telemetry.logs import labelled
from glowplug.telemetry.metrics import ShellMetrics
from glowplug.telemetry.tracing import is_sampled

log = logging.getLogger(__name__)

DECISIONS_LOG, DECISIONS_KEPT = "decisions", 2000
INBOX_LIMIT = 10_000
Executor = Callable[[Any, Event | None], Awaitable[None]]


class Shell:
    """Runs a controller. `executors` perform a service's own effect types and must not block for long: start a task,
    send its outcome with `put`.

    Ticks come every `tick_s`; while `is_quiet` (no time runs out) after `quiet_tick_s`, or `tick_s` after another
    stimulus. Raises MissingExecutor if an effect of `reads` has none.
    """

    def __init__(
        self,
        service: str,
        service_id: str,
        controller: Controller,
        bus: Bus,
        store: Store,
        metrics: ShellMetrics,
        *,
        epoch: int = 0,
        reads: Reads,
        executors: Mapping[type[Any], Executor] | None = None,
        tick_s: float = 0.5,
        resync_s: float = 2.0,
        quiet_tick_s: float = 0.0,
        is_quiet: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self.service, self.service_id, self.controller = service, service_id, controller
        self.bus, self.store, self.metrics, self.epoch = bus, store, metrics, epoch
        self._clock, self._clocks = clock, Clocks()
        self._tables = {
            table: TableReader(table, cls, laying(cls, self._clocks, clock)) for table, cls in reads.tables.items()
        }
        self._executors = executors or {}
        reads.check_executors(self.executed())
        self._tick_s, self._resync_s = tick_s, resync_s
        self._quiet_tick_s, self._is_quiet, self._stirred = quiet_tick_s, is_quiet, asyncio.Event()
        self._inbox: asyncio.Queue[tuple[Any, asyncio.Future[None] | None]] = asyncio.Queue(INBOX_LIMIT)
        self._tasks: list[asyncio.Task[None]] = []
        self._transaction = asyncio.Lock()  # effects of one stimulus (or table) end before the next is handled
        self._handle_s, self._behind_s = metrics.handle_s.labels(service), 0.0
        self._unreadable = Unreadable(metrics.unreadable_rows)
        self.restored = False

    def executed(self) -> Iterable[type[Any]]:
        return self._executors

    def may_act(self) -> bool:
        """Whether effects are carried out; read before each."""
        return True

    async def start(self) -> None:
        """Read the tables (waiting for the store), then run until `stop`."""
        while not await self._resync():
            await asyncio.sleep(0.2)
        self._tasks = [asyncio.create_task(loop()) for loop in (self._consume, self._tick, self._resync_loop)]

    async def on_event(self, event: Event) -> None:
        """Handle a bus event; return afterwards, so that it is acknowledged then."""
        await self.ask(event)

    async def put(self, stimulus: Any) -> None:
        await self._inbox.put((stimulus, None))

    async def ask(self, stimulus: Any) -> None:
        """Queue a stimulus and wait until it is handled; raises the controller's errors."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._inbox.put((stimulus, done))
        await done

    async def _consume(self) -> None:
        while True:
            stimulus, done = await self._inbox.get()
            try:
                async with self._transaction:
                    await self._handle_named(stimulus)
            except Exception as error:
                if done and not done.done():
                    done.set_exception(error)
                else:
                    log.exception("%s failed on %s", self.service, type(stimulus).__name__)
            else:
                if done and not done.done():
                    done.set_result(None)

    async def _handle_named(self, stimulus: Any) -> None:
        if not isinstance(stimulus, Event):
            await self._handle(stimulus)
            return
        ids = ids_of(stimulus.data)
        with labelled(stimulus.traceparent, event_id=stimulus.event_id, event_type=stimulus.type, **ids):
            await self._handle(stimulus)

    async def _handle(self, stimulus: Any) -> None:
        kind = stimulus.type if isinstance(stimulus, Event) else type(stimulus).__name__
        self.metrics.stimuli.labels(self.service, kind).inc()
        if not isinstance(stimulus, Tick):
            self._stirred.set()
        now_s, given = self._clock(), stimulus
        if isinstance(stimulus, Event):
            given = self._clocks.laid(stimulus, now_s)
        started = time.perf_counter()
        try:
            effects = self.controller.handle(given, now_s)
        except StaleEpoch as error:
            self.metrics.stale.labels(self.service).inc()
            log.warning("a command of a replaced process is refused: %s", error)
            return
        self._handle_s.observe(time.perf_counter() - started)
        await self.execute(effects, stimulus if isinstance(stimulus, Event) else None)

    async def execute(self, effects: list[Effect], event: Event | None = None) -> None:
        """Perform effects in order. Refusals are counted; the next tick decides again."""
        self._behind_s = CLOCK.behind_s  # a row and its fact say the same times
        for effect in effects:
            if not self.may_act():
                return
            self.metrics.saw(effect)
            try:
                await self._execute(effect, event)
            except BusUnavailable as error:
                self.metrics.bus_failures.labels(self.service).inc()
                log.warning("failed to publish %s on the bus: %s", _name(effect), error)
            except StoreUnavailable as error:
                self.metrics.store_failures.labels(self.service).inc()
                log.warning("failed to write %s to the store: %s", _name(effect), error)

    async def _execute(self, effect: Effect, event: Event | None) -> None:
        if isinstance(effect, Record):
            decision = effect.decision
            self.metrics.decisions.labels(decision.kind, decision.policy).inc()
            _say(decision, effect.cause or event)
            await self.store.append(DECISIONS_LOG, to_json(published(decision, self._behind_s)), keep=DECISIONS_KEPT)
            effect = Publish(DecisionMade(decision=decision), effect.cause)
        if isinstance(effect, Publish):
            made = self.event(effect.payload, effect.cause or event)
            await self.bus.publish(made)
            self.metrics.published.labels(self.service, made.type).inc()
        elif isinstance(effect, Save):
            await self.store.put(effect.table, effect.key, to_json(published(effect.value, self._behind_s)))
        elif isinstance(effect, Remove):
            await self.store.delete(effect.table, effect.key)
        else:
            await self._executors[type(effect)](effect, event)

    def event(self, payload: Any, cause: Event | None = None) -> Event:
        """Add id, time, issuer, and the cause with its trace."""
        return Event(
            event_id=uuid.uuid4().hex,
            type=payload.TYPE,
            occurred_at=self._clock() + self._behind_s,
            issuer=self.service_id,
            data=published(payload, self._behind_s),
            cause_id=cause.event_id if cause else "",
            traceparent=cause.traceparent if cause else "",
            epoch=self.epoch if payload.TYPE in COMMANDS else 0,
        )

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._while_quiet()
            due = loop.time() + self._tick_s
            await asyncio.sleep(self._tick_s)
            self.metrics.bus_connected.set(self.bus.connected)
            self.metrics.bus_stores.set(not self.bus.refusal)
            self.metrics.store_writable.set(not self.store.refusal)
            self.metrics.ticked(loop.time() - due, self._inbox.qsize(), self.bus.counts)
            try:
                await self.ask(Tick())  # in turn: a slow world piles up no ticks
            except Exception:
                log.exception("%s failed on Tick", self.service)

    async def _while_quiet(self) -> None:
        """Wait for the end of `tick_s` as long as no tick is needed."""
        if self._is_quiet():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._quiet_tick_s - self._tick_s):
                    await self._stirred.wait()
        self._stirred.clear()

    async def _resync_loop(self) -> None:
        while True:
            await asyncio.sleep(self._resync_s)
            try:
                await self._resync()
            except Exception:  # survive one bad reading
                log.exception("%s failed on reading its tables", self.service)

    async def _resync(self) -> bool:
        """Read the tables again, whatever messages were lost (level-triggered)."""
        try:
            for table in self._tables:
                rows = await self._read(table)
                if rows is None:
                    continue
                async with self._transaction:
                    effects = self.restore(table, rows)
                    if effects:
                        self._stirred.set()
                    await self.execute(effects)
        except StoreUnavailable as error:
            return self._not_synced(error)
        return self._synced()

    def restore(self, table: str, rows: dict[str, Any]) -> list[Effect]:
        return self.controller.restore(table, rows, self._clock())

    async def _read(self, table: str) -> dict[str, Any] | None:
        """Read one table's sound rows. If no table is there: empty at the start, later None, which keeps known rows."""
        try:
            rows, unreadable = self._tables[table].read(await self.store.load(table))
        except NotATable as error:
            self._unreadable.whole(table, str(error))
            return None if self.restored else {}
        self._unreadable.seen(table, unreadable)
        return rows

    def _synced(self) -> bool:
        self.metrics.store_connected.set(1)
        self.metrics.synced_at.set(self._clock() + CLOCK.behind_s)
        self.restored = True
        return True

    def _not_synced(self, error: StoreUnavailable) -> bool:
        self.metrics.store_connected.set(0)
        log.warning("the store did not answer with the tables: %s", error)
        return False

    async def stop(self) -> None:
        await end(self._tasks)


def ids_of(data: Any) -> dict[str, str]:
    about = getattr(data, "instance", data)
    found = {}
    for label, name in (("model", "model_key"), ("instance", "instance_id"), ("request_id", "request_id")):
        if value := getattr(about, name, ""):
            found[label] = value
    return found


def _say(decision: DecisionRecord, cause: Event | None) -> None:
    traceparent = decision.traceparent or (cause.traceparent if cause is not None else "")
    ids = {
        "decision_id": decision.decision_id,
        "model": decision.model_key,
        "instance": decision.instance_id,
        "node": decision.node_id,
        "request_id": decision.request_id,
        "trace_id": traceparent[3:35] if is_sampled(traceparent) else "",
    }
    told = {name: value for name, value in ids.items() if value}
    log.info("decided to %s: %s", decision.kind, decision.reason, extra=told)


def _name(effect: Effect) -> str:
    return effect.payload.TYPE if isinstance(effect, Publish) else type(effect).__name__
