"""The router's shell: facts and tables reach the controller here, beside the requests, and nothing waits for them."""

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from glowplug.controllers.effects import Effect, Tick
from glowplug.controllers.router.messages import BusRefuses
from glowplug.controllers.router.reads import READS
from glowplug.events import Event
from glowplug.runtime.service import World
from glowplug.runtime.shell import Shell
from services.router.desk import Desk
from services.router.settings import RouterSettings
from services.router.tables_copy import TablesCopy

log = logging.getLogger(__name__)
FIRST_RESYNC_S = 0.2


class RouterShell(Shell):
    """The common shell, but effects are done at once at the desk, time passes before the store has ever answered, and
    every table read is copied to disk."""

    def __init__(self, world: World, settings: RouterSettings, desk: Desk) -> None:
        super().__init__(
            "router",
            settings.service_id,
            desk.controller,
            world.bus,
            world.store,
            world.tracing,
            world.metrics,
            reads=READS,
            tick_s=settings.tick_s,
            resync_s=settings.resync_s,
        )
        self._desk = desk
        self._copy = TablesCopy(settings.state_dir / settings.service_id / "tables.json")
        self._refusal = ""  # of the bus, as the controller was told last

    def executed(self) -> Iterable[type[Any]]:
        return Desk.EXECUTES

    async def execute(self, effects: list[Effect], event: Event | None = None, at: float | None = None) -> None:
        self._desk.do(effects)
        if effects:
            self._desk.changed()

    async def _handle(self, stimulus: Any) -> None:
        if isinstance(stimulus, Tick) and self.bus.refusal != self._refusal:
            self._refusal = self.bus.refusal
            self._desk.take(BusRefuses(self._refusal))
        await super()._handle(stimulus)

    def take_copy(self) -> None:
        """Start from the tables as this router last saw them."""
        copied = self._copy.read(self._clock())
        if copied is not None:
            self._desk.restore("models", copied[0], is_copy=True)
            self._desk.restore("instances", copied[1], is_copy=True)
            log.info("%d models and %d instances from the copy on disk", len(copied[0]), len(copied[1]))

    def bus_reached(self) -> None:
        """Facts come in from now on, and go out."""
        self._desk.bus_awaited_until = 0.0

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(loop()) for loop in (self._consume, self._tick, self._resync_from_start)]

    async def _resync_from_start(self) -> None:
        while not await self._resync():
            await asyncio.sleep(FIRST_RESYNC_S)
        await self._resync_loop()

    async def _resync(self) -> bool:
        done = await super()._resync()
        if done:
            self._desk.table_loaded = True
            self._copy.write(self._desk.controller.fleet, self._clock())
        return done


async def listen_to_facts(world: World, shell: RouterShell) -> None:
    """Connect to the bus, however long that takes, and follow the fleet."""
    await world.bus.connect()
    await world.bus.subscribe(READS.telemetry_filters(), shell.on_event)
    await world.bus.subscribe(READS.fact_filters(), shell.on_event, durable=f"{world.settings.service_id}-facts")
