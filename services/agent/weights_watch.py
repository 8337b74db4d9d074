"""Watch the weights that the node's prefetcher brings into host memory."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from glowplug.controllers.agent import messages as msg
from glowplug.domain.errors import ChecksumMismatch, WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.fleet.start_times import StartKind
from glowplug.services.agent.settings import AgentSettings
from glowplug.weights.disk import DISK
from glowplug.weights.region import Region, RegionInfo, RegionState, region_digest
from glowplug.weights.source import redacted

POLL_S = 0.01
REGION_GRACE_S = 5.0
SLOW_POLLS = 10


class WeightsWatch:
    def __init__(
        self, settings: AgentSettings, clock: Callable[[], float], report: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._settings, self._clock, self._report = settings, clock, report
        self._read: dict[str, tuple[WeightsRef, str]] = {}  # stage -> its weights and their generation

    def _region(self, weights: WeightsRef) -> Region:
        return Region.at(self._settings.shm_dir.absolute(), self._settings.node, region_digest(weights))

    async def until_there(self, effect: msg.AwaitWeights) -> None:
        """Poll until the region is complete or failed; past the deadline the controller has given up.

        A streaming engine may begin once the region has a layout, in vain if the generation changes later."""
        weights, stage, num_stages = effect.command.model.weights, effect.command.stage, effect.command.num_stages
        if not weights.uri:
            await self._report(msg.WeightsComplete(effect.instance_id, "", StartKind.CACHED))
            return
        region = self._region(weights)
        began = self._clock()
        is_first, generation = True, ""
        while self._clock() < effect.deadline_at:
            status = region.read_state(effect.instance_id, stage=stage, num_stages=num_stages)
            if generation and status.state is not RegionState.FAILED and status.generation != generation:
                why = "they were dropped and are fetched again from the start"
                await self._report(msg.WeightsReplaced(effect.instance_id, why))
                generation = ""
            if effect.streams and not generation and status.state is RegionState.FETCHING and status.path:
                generation = status.generation
                await self._report(msg.WeightsArriving(effect.instance_id, status.path))
            if status.state is RegionState.COMPLETE and status.info is not None:
                is_part = num_stages > 1
                path = status.info.path if is_part else _path_of(status.info, weights)
                region.touch(self._clock())
                if is_part:
                    self._read[effect.instance_id] = weights, status.generation
                fetched = StartKind.DISK if status.info.source == DISK else StartKind.COLD
                found = StartKind.CACHED if is_first else fetched
                await self._report(msg.WeightsComplete(effect.instance_id, path, found))
                return
            if status.state is RegionState.FAILED and status.failure is not None:
                await self._report(msg.WeightsFailed(effect.instance_id, status.failure.code, status.failure.message))
                return
            is_first = False
            await self._until_next_look(began)

    async def _until_next_look(self, began: float) -> None:
        is_slow = self._clock() - began > REGION_GRACE_S
        await asyncio.sleep(POLL_S * (SLOW_POLLS if is_slow else 1))

    async def until_whole(self, instance_id: str, weights: WeightsRef) -> str:
        """Return the path of all weights. Raises WeightsUnavailable or ChecksumMismatch; the controller ends the wait.
        Earlier failures do not count: the rest is requested anew."""
        if not weights.uri:
            return ""
        region = self._region(weights)
        began, earlier = self._clock(), region.read_state(instance_id).failure
        while True:
            status = region.read_state(instance_id)
            if status.state is RegionState.COMPLETE and status.info is not None:
                region.touch(self._clock())
                return _path_of(status.info, weights)
            failure = status.failure
            if status.state is RegionState.FAILED and failure is not None and failure != earlier:
                error = ChecksumMismatch if failure.code == ChecksumMismatch.code else WeightsUnavailable
                raise error(f"the rest of its weights did not arrive: {failure.message}")
            await self._until_next_look(began)

    def is_as_read(self, instance_id: str) -> bool:
        """Whether a stage's loaded bytes are those present now; True if an earlier agent loaded them."""
        weights, generation = self._read.get(instance_id, (None, ""))
        return weights is None or not generation or self._region(weights).read_state().generation == generation

    def forget(self, instance_id: str) -> None:
        self._read.pop(instance_id, None)


def _path_of(info: RegionInfo, weights: WeightsRef) -> str:
    """Raises ChecksumMismatch if the size differs from the declared one."""
    declared, found = weights.num_bytes, info.num_bytes
    if declared and found and declared != found:  # kept for another model with another size or none
        raise ChecksumMismatch(f"{redacted(weights.uri)}: {found} bytes, expected {declared}")
    return info.path
