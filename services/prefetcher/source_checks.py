"""Has the source of cached weights changed? Asked for weights that no checksum pins, beside everything else."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from glowplug.controllers.prefetcher.messages import RegionChanged
from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.region import Region
from glowplug.weights.source import SourceInterrupted, SourceOptions
from glowplug.weights.sources import open_source
from glowplug.weights.writer import is_unchanged

log = logging.getLogger(__name__)


class SourceChecks:
    """At most one check per region at a time. A source that cannot be asked keeps its copy: the bytes were good."""

    def __init__(self, put: Callable[[Any], Awaitable[None]], options: SourceOptions) -> None:
        self._put, self._options = put, options
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._running.values())

    def spawn(self, region: Region, uri: str) -> None:
        if region.digest not in self._running:
            task = asyncio.create_task(self._check(region, uri))
            self._running[region.digest] = task
            task.add_done_callback(lambda _: self._running.pop(region.digest, None))

    async def _check(self, region: Region, uri: str) -> None:
        try:
            source = open_source(uri, self._options)
        except WeightsUnavailable as error:
            log.warning("cannot check %s: %s", region.digest[:12], error)
            return
        try:
            info = await source.probe()
        except (WeightsUnavailable, SourceInterrupted) as error:
            log.debug("cannot check %s: %s", region.digest[:12], error)
            return
        finally:
            await source.close()
        if not is_unchanged(region.read_meta(), info):
            await self._put(RegionChanged(region.digest))
