"""One control service, whole: REST first, then bus, store and epoch, then its controller's shell, until stopped."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI

from glowplug.controllers.port import Controller
from glowplug.domain.errors import NoCapacity
from glowplug.runtime.service import World, announce, serve_rest
from glowplug.runtime.shell import Executor, Shell
from glowplug.runtime.tasks import essential

log = logging.getLogger(__name__)
C = TypeVar("C")


@dataclass
class Wiring:
    """What one service listens to. `facts` and `commands` are durable; `telemetry` is core."""

    tables: dict[str, type[Any]]
    facts: Sequence[str] = ()
    telemetry: Sequence[str] = ()
    commands: Sequence[str] = ()
    executors: dict[type[Any], Executor] = field(default_factory=dict)


class ControlService:
    """Holds the shell once there is one, so that REST can answer (503) while the service is still connecting."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shell: Shell | None = None

    def not_ready(self) -> str:
        """ "" or why this service cannot do its work."""
        if self.shell is None or not self.shell.restored:
            return "connecting to the bus and the store"
        if not self.world.bus.connected:
            return "the bus does not answer"
        return ""

    def controller(self, kind: type[C]) -> C:
        """The controller, for REST. Raises NoCapacity (503) while the service connects."""
        if self.shell is None:
            raise NoCapacity(f"the {self.world.service} is still connecting", retry_after_s=1)
        assert isinstance(self.shell.controller, kind)
        return self.shell.controller

    async def run(
        self,
        stopping: asyncio.Event,
        app: FastAPI,
        make_controller: Callable[[int], Controller],
        wiring: Wiring,
        background: Callable[[Shell], Any] | None = None,
    ) -> None:
        """Serve until `stopping`. `background(shell)` is a coroutine run beside it, whose error ends the service."""
        world, settings = self.world, self.world.settings
        server, url = await serve_rest(app, settings)
        essential(server, stopping)
        connecting = asyncio.create_task(self._connect(make_controller, wiring))
        stop_asked = asyncio.create_task(stopping.wait())
        await asyncio.wait([connecting, stop_asked], return_when=asyncio.FIRST_COMPLETED)
        beside: asyncio.Task[Any] | None = None
        if connecting.done():
            shell = connecting.result()
            await announce(shell, url)
            log.info("ready at %s", url)
            if background is not None:
                beside = essential(asyncio.create_task(background(shell), name=f"{world.service} background"), stopping)
            await stopping.wait()
            await shell.stop()
        await world.close(connecting, beside, server, stop_asked)

    async def _connect(self, make_controller: Callable[[int], Controller], wiring: Wiring) -> Shell:
        world, settings = self.world, self.world.settings
        await world.bus.connect()
        epoch = await world.epoch()
        shell = Shell(
            world.service,
            settings.service_id,
            make_controller(epoch),
            world.bus,
            world.store,
            world.tracing,
            world.metrics,
            epoch=epoch,
            tables=wiring.tables,
            executors=wiring.executors,
            tick_s=settings.tick_s,
            resync_s=settings.resync_s,
        )
        await shell.start()
        name = settings.service_id
        if wiring.telemetry:
            await world.bus.subscribe(wiring.telemetry, shell.on_event)
        if wiring.facts:
            await world.bus.subscribe(wiring.facts, shell.on_event, durable=f"{name}-facts")
        if wiring.commands:
            await world.bus.subscribe(wiring.commands, shell.on_event, durable=f"{name}-commands")
        self.shell = shell
        return shell
