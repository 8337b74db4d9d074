"""The router's shell. It copies the tables to disk, so that a router can start while the store is down."""

import asyncio
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from glowplug.controllers.effects import Effect, Tick
from glowplug.controllers.router.messages import BusRefuses
from glowplug.controllers.router.reads import READS
from glowplug.domain.access import KEYS, TENANTS
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.events.facts import RouterUsageReported
from glowplug.fleet.tables import FleetTables
from glowplug.runtime.service import World
from glowplug.runtime.shell import Shell
from glowplug.services.router.disk_copy import replace_file
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.keys import FACTS, KeyCopy, KeyRing
from glowplug.services.router.request_table import EXECUTORS, RequestTable
from glowplug.services.router.settings import RouterSettings

MAX_COPY_BYTES = 256 << 20  # 10,000 models are 20 MiB
FIRST_RESYNC_S = 0.2
READ_RATIO = 0.005  # most of the time spent on reading keys and tenants
READ_WITHIN_S = 30.0  # longest time between two readings of them
KEYS_EVERY_S = 1.0  # shortest time between two copies of the keys
log = logging.getLogger(__name__)


class RouterShell(Shell):
    """The router's shell: unlike others it has the request table carry out effects at once, ticks before the store's
    first answer, and copies every table to disk."""

    def __init__(self, world: World, settings: RouterSettings, table: RequestTable[Exchange]) -> None:
        self._table, self._fleet = table, table.controller.fleet
        super().__init__(
            "router",
            settings.service_id,
            table.controller,
            world.bus,
            world.store,
            world.metrics,
            reads=READS,
            tick_s=settings.tick_s,
            resync_s=settings.resync_s,
        )
        own_dir = settings.state_dir / settings.service_id
        self._copy, self._keys_copy = TablesCopy(own_dir / "tables.json"), KeysCopy(own_dir / "keys.json")
        self._read_next: dict[str, float] = {}  # table -> its next reading, monotonic
        self.has_synced = False  # every table was read from the store
        self._refusal = ""  # the bus's refusal last told to the controller

    @property
    def keys(self) -> KeyRing:
        return self._table.keys

    def executed(self) -> Iterable[type[Any]]:
        return EXECUTORS

    async def execute(self, effects: list[Effect], event: Event | None = None) -> None:
        self._table.do(effects)
        if effects:
            self._table.changed.set()

    def restore(self, table: str, rows: dict[str, Any]) -> list[Effect]:
        self._table.keys.restore(table, rows, num_unreadable=self._unreadable.num(table))
        return super().restore(table, rows)

    async def _read(self, table: str) -> dict[str, Any] | None:
        """Facts bring the keys and tenants, possibly many: with the bus connected, reading them takes at most
        READ_RATIO of the time. None: not due yet."""
        if table not in (KEYS, TENANTS):
            return await super()._read(table)
        began, has_facts = time.monotonic(), self.bus.connected
        if has_facts and began < self._read_next.get(table, 0.0):
            return None
        rows = await super()._read(table)
        took_s = time.monotonic() - began
        self._read_next[table] = began + min(took_s / READ_RATIO, READ_WITHIN_S) if has_facts else 0.0
        return rows

    async def _handle(self, stimulus: Any) -> None:
        if isinstance(stimulus, Event) and isinstance(stimulus.data, FACTS):
            self._table.keys.take(stimulus)
        elif isinstance(stimulus, Event) and isinstance(stimulus.data, RouterUsageReported):
            self._table.limits.take(stimulus.data)
        elif isinstance(stimulus, Tick):
            self._keys_copy.write(self._table.keys, self._clock())
        if isinstance(stimulus, Tick) and self.bus.refusal != self._refusal:
            self._refusal = self.bus.refusal
            self._table.take(BusRefuses(self._refusal))
        await super()._handle(stimulus)

    def take_copy(self) -> None:
        """Start from the copies on disk. The store's first reading drops rows that it lacks."""
        self._keys_copy.read(self._table.keys)
        copied = self._copy.read(self._clock())
        if copied is None:
            return
        models, instances = copied
        self._table.restore("models", models, is_copy=True)
        self._table.restore("instances", instances, is_copy=True)
        log.info("loaded %d models and %d instances from the copy on disk", len(models), len(instances))

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(loop()) for loop in (self._consume, self._tick, self._resync_from_start)]

    async def _resync_from_start(self) -> None:
        while not await self._resync():
            await asyncio.sleep(FIRST_RESYNC_S)
        await self._resync_loop()

    async def _resync(self) -> bool:
        done = await super()._resync()
        if done:
            self.has_synced = True
            self._table.table_loaded = True
            self._copy.write(self._fleet, self._clock())
        return done


class _Copy(msgspec.Struct):
    written_at: float
    models: list[Model]
    instances: list[Instance]


class TablesCopy:
    """The copy of the tables: one file, replaced whole. Instances older than `max_age_s` are not trusted."""

    def __init__(self, path: Path, max_age_s: float = 600.0) -> None:
        self._path, self._max_age_s = path, max_age_s
        self._last = b""

    def write(self, fleet: FleetTables, now_s: float) -> None:
        """Write changed tables, or the same over a file a quarter of `max_age_s` old."""
        rows = msgspec.json.encode([list(fleet.models.values()), list(fleet.instances.values())])
        if rows == self._last and self._path.exists() and now_s - self._path.stat().st_mtime < self._max_age_s / 4:
            return
        self._last = rows
        copy = _Copy(now_s, list(fleet.models.values()), list(fleet.instances.values()))
        try:
            replace_file(self._path, msgspec.json.encode(copy))
        except OSError as error:
            log.warning("failed to copy the tables to disk: %s", error)

    def read(self, now_s: float) -> tuple[dict[str, Model], dict[str, Instance]] | None:
        """Read (models, instances); no instances beyond `max_age_s`. None without a copy."""
        try:
            copy = from_json(self._path.read_bytes(), _Copy, max_bytes=MAX_COPY_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, MalformedEvent) as error:
            log.warning("failed to read the copy of the tables, starting without it: %s", error)
            return None
        young = now_s - copy.written_at < self._max_age_s
        instances = {i.instance_id: i for i in copy.instances} if young else {}
        return {m.key: m for m in copy.models}, instances


class KeysCopy:
    """The copy of the keys and tenants: one file, replaced whole. It has only the keys' SHA-256."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written, self._written_at = 0, 0.0  # the ring's num_changes, and when

    def write(self, ring: KeyRing, now_s: float) -> None:
        """Write changes, at most once in KEYS_EVERY_S."""
        if ring.num_changes == self._written or abs(now_s - self._written_at) < KEYS_EVERY_S:
            return
        self._written_at = now_s
        try:
            replace_file(self._path, msgspec.json.encode(ring.copied))
        except OSError as error:
            log.warning("failed to copy the keys to disk: %s", error)
        else:
            self._written = ring.num_changes

    def read(self, ring: KeyRing) -> None:
        """Start the ring from the copy; after an unreadable one calls need a key."""
        try:
            copy = from_json(self._path.read_bytes(), KeyCopy, max_bytes=MAX_COPY_BYTES)
        except FileNotFoundError:
            return
        except (OSError, MalformedEvent) as error:
            log.warning("failed to read the copy of the keys; calls need a key until the store is read: %s", error)
            ring.start_from(None)
            return
        ring.start_from(copy)
        self._written = ring.num_changes
        log.info("loaded %d keys and %d tenants from the copy on disk", len(copy.keys), len(copy.tenants))
