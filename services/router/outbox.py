"""What the router tells the fleet, never making a request wait for it: bounded queues, oldest dropped and counted."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from glowplug.bus.port import Bus, BusUnavailable
from glowplug.controllers.effects import Publish
from glowplug.events import Event
from glowplug.events.subjects import is_telemetry
from services.router.metrics import RouterMetrics

log = logging.getLogger(__name__)
Wrap = Callable[[Any, Event | None], Event]


class _Lane:
    """One queue with one task, so that order is kept."""

    def __init__(self, bus: Bus, wrap: Wrap, metrics: RouterMetrics, limit: int) -> None:
        self._bus, self._wrap, self._metrics = bus, wrap, metrics
        self._waiting: deque[Publish] = deque()
        self._limit = limit
        self._filled = asyncio.Event()

    def put(self, effect: Publish) -> None:
        if len(self._waiting) >= self._limit:
            self._waiting.popleft()
            self._metrics.dropped.inc()
        self._waiting.append(effect)
        self._filled.set()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                effect = self._waiting.popleft()
                try:
                    event = self._wrap(effect.payload, effect.cause)
                    await self._bus.publish(event)
                    self._metrics.published(event.type)
                except BusUnavailable as error:
                    self._metrics.dropped.inc()
                    log.debug("not published: %s", error)
                except Exception:  # one event that cannot be sent must not hold up those behind it
                    self._metrics.dropped.inc()
                    log.exception("%s cannot be published", effect.payload.TYPE)


class Outbox:
    """Facts and telemetry have a lane each: a fact waits for the bus to store it, telemetry waits for nothing."""

    def __init__(self, bus: Bus, wrap: Wrap, metrics: RouterMetrics, limit: int) -> None:
        self._facts = _Lane(bus, wrap, metrics, limit)
        self._telemetry = _Lane(bus, wrap, metrics, limit)

    def put(self, effect: Publish) -> None:
        (self._telemetry if is_telemetry(effect.payload.TYPE) else self._facts).put(effect)

    async def run(self) -> None:
        await asyncio.gather(self._facts.run(), self._telemetry.run())
