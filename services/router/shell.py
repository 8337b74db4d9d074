"""The router's shell: facts and tables reach the controller beside the requests, and no request waits for them.

The tables are copied to disk, so that a router that starts while the store is down still serves.
"""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from glowplug.controllers.effects import Effect, Tick
from glowplug.controllers.router.messages import BusRefuses
from glowplug.controllers.router.reads import READS
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.fleet.tables import Fleet
from glowplug.runtime.service import World
from glowplug.runtime.shell import Shell
from services.router.exchange import Exchange
from services.router.request_table import EXECUTORS, RequestTable
from services.router.settings import RouterSettings

MAX_COPY_BYTES = 256 << 20  # every model and instance of a fleet: 10,000 models are 20 MiB
FIRST_RESYNC_S = 0.2
log = logging.getLogger(__name__)


class RouterShell(Shell):
    """The common shell, but effects are carried out at once by the request table, time passes before the store has ever
    answered, and every table that is read is copied to disk."""

    def __init__(self, world: World, settings: RouterSettings, table: RequestTable[Exchange]) -> None:
        self._table, self._fleet = table, table.controller.fleet
        super().__init__(
            "router",
            settings.service_id,
            table.controller,
            world.bus,
            world.store,
            world.tracing,
            world.metrics,
            reads=READS,
            tick_s=settings.tick_s,
            resync_s=settings.resync_s,
        )
        self._copy = TablesCopy(settings.state_dir / settings.service_id / "tables.json")
        self._refusal = ""  # of the bus, as the controller was notified last

    def executed(self) -> Iterable[type[Any]]:
        return EXECUTORS

    async def execute(self, effects: list[Effect], event: Event | None = None, at: float | None = None) -> None:
        self._table.do(effects)
        if effects:
            self._table.changed.set()

    async def _handle(self, stimulus: Any) -> None:
        if isinstance(stimulus, Tick) and self.bus.refusal != self._refusal:
            self._refusal = self.bus.refusal
            self._table.take(BusRefuses(self._refusal))
        await super()._handle(stimulus)

    def take_copy(self) -> None:
        """Start from the tables as this router last saw them. What the store lacks of them is dropped when it is first
        read: the copy is of the past."""
        copied = self._copy.read(self._clock())
        if copied is None:
            return
        models, instances = copied
        self._table.restore("models", models, is_copy=True)
        self._table.restore("instances", instances, is_copy=True)
        log.info("%d models and %d instances from the copy on disk", len(models), len(instances))

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(loop()) for loop in (self._consume, self._tick, self._resync_from_start)]

    async def _resync_from_start(self) -> None:
        while not await self._resync():
            await asyncio.sleep(FIRST_RESYNC_S)
        await self._resync_loop()

    async def _resync(self) -> bool:
        done = await super()._resync()
        if done:
            self._table.table_loaded = True
            self._copy.write(self._fleet, self._clock())
        return done


class _Copy(msgspec.Struct):
    written_at: float
    models: list[Model]
    instances: list[Instance]


class TablesCopy:
    """One file, replaced whole. `max_age_s` bounds how old an instance's address may be trusted."""

    def __init__(self, path: Path, max_age_s: float = 600.0) -> None:
        self._path, self._max_age_s = path, max_age_s
        self._last = b""

    def write(self, fleet: Fleet, now_s: float) -> None:
        """Write when something has changed, or when the copy would grow old."""
        rows = msgspec.json.encode([list(fleet.models.values()), list(fleet.instances.values())])
        if rows == self._last and self._path.exists() and now_s - self._path.stat().st_mtime < self._max_age_s / 4:
            return
        self._last = rows
        copy = _Copy(now_s, list(fleet.models.values()), list(fleet.instances.values()))
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(copy))
            part.replace(self._path)
        except OSError as error:
            log.warning("the tables could not be copied to disk: %s", error)

    def read(self, now_s: float) -> tuple[dict[str, Model], dict[str, Instance]] | None:
        """(models, instances) as they were last; instances only while the copy is young. None when there is none."""
        try:
            copy = from_json(self._path.read_bytes(), _Copy, max_bytes=MAX_COPY_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, MalformedEvent) as error:
            log.warning("the copy of the tables cannot be read: %s", error)
            return None
        young = now_s - copy.written_at < self._max_age_s
        instances = {i.instance_id: i for i in copy.instances} if young else {}
        return {m.key: m for m in copy.models}, instances
