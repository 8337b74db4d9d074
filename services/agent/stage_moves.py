"""A stage that has become whole in another process: what runs goes over, and what cannot ends in the stages.

The KV cache is read out while all stages live. Then routers learn of the new process and continue their streams there
(docs/adr/0024-stages-of-real-engines.md); what they leave, and what has not begun, ends in the stages.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from glowplug.controllers.agent import messages as msg
from glowplug.domain.errors import EngineFailed
from glowplug.engines.port import EngineDriver, EngineHandle, Moved, Mover
from glowplug.services.agent.state_file import StateFile
from glowplug.services.agent.weights_watch import WeightsWatch

log = logging.getLogger(__name__)
STREAMS_MOVE_S = 1.0  # how long routers have to take their streams away from a stage that has become whole ...
STAGE_POLL_S = 0.2  # ... which is then asked so often whether it still runs something
KV_MOVES_S = 10.0  # how long the KV cache of what runs may take to come over
KV_KEPT_S = 30.0  # how long the KV cache that was moved is kept for what routers ask of the whole engine


class StageMoves:
    """`driver_of`: a handle's driver; `report`: where outcomes go."""

    def __init__(
        self,
        state: StateFile,
        weights_watch: WeightsWatch,
        driver_of: Callable[[EngineHandle], EngineDriver],
        report: Callable[[Any], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._state, self._weights_watch, self._driver_of = state, weights_watch, driver_of
        self._report, self._clock = report, clock

    async def finish(self, effect: msg.FinishStages) -> None:
        """Routers take their streams away first; what they leave, and what has not begun, ends in the stages. The
        placer ends the later ones once that is published, and then the first one's process ends."""
        handle = self._state.handles.get(effect.instance_id)
        driver = self._driver_of(handle) if handle is not None else None
        if handle is None or not isinstance(driver, Mover):
            await self._report(msg.StagesFinished(effect.instance_id))
            return
        kept_until = self._clock() + KV_KEPT_S
        await asyncio.sleep(STREAMS_MOVE_S)
        while not (is_over := await self._is_over(handle, driver)):
            if effect.deadline_at and self._clock() >= effect.deadline_at:
                log.warning(
                    "the agent ends the stages of %s and the requests that still run in them", effect.instance_id
                )
                break
            if self._clock() >= kept_until:
                driver.forget_moved(handle)
            await asyncio.sleep(STAGE_POLL_S)
        await self._report(msg.StagesFinished(effect.instance_id, cut=not is_over))
        await asyncio.sleep(STREAMS_MOVE_S)
        await self._leave(driver, handle, kept_until)

    async def kv_moved(self, driver: Mover, handle: EngineHandle) -> Moved | str:
        """What came over of the KV cache, or why nothing does."""
        if not self._weights_watch.is_as_read(handle.instance_id):
            return "its weights were fetched anew, and what was computed with those before is computed again"
        try:
            async with asyncio.timeout(KV_MOVES_S):
                return await driver.move_requests(handle)
        except EngineFailed as error:
            return error.message
        except TimeoutError:
            return f"its KV cache did not come within {KV_MOVES_S:g} s"

    async def _leave(self, driver: Mover, handle: EngineHandle, kept_until: float) -> None:
        """End the stage that a whole engine was, and in time what was moved. Of an engine that was none, nothing."""
        await driver.end_stage(handle)
        await asyncio.sleep(max(kept_until - self._clock(), 0.0))
        driver.forget_moved(handle)

    async def leave_again(self, driver: Mover, handle: EngineHandle) -> None:
        """End what an agent that was killed has left of a consolidation that was over."""
        await self._leave(driver, handle, self._clock() + KV_KEPT_S)

    async def _is_over(self, handle: EngineHandle, driver: Mover) -> bool:
        """A stage that does not answer may still run something: it is asked again."""
        try:
            return await driver.is_stage_over(handle)
        except EngineFailed as error:
            log.warning("%s", error.message)
            return False
