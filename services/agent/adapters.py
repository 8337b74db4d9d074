"""LoRA adapters that the engines of this node take and give up, for instances whose engine is another instance's."""

from collections.abc import Callable
from pathlib import Path

from glowplug.controllers.agent import messages as msg
from glowplug.domain.errors import EngineFailed, EngineUnable
from glowplug.engines.port import AdapterHost, EngineDriver, EngineHandle
from glowplug.services.agent.state_file import StateFile


class AdapterMoves:
    """Carries out LoadAdapter and UnloadAdapter, and reports nothing: its caller does."""

    def __init__(
        self,
        state: StateFile,
        driver_of: Callable[[EngineHandle], EngineDriver],
        is_alive: Callable[[EngineHandle], bool],
    ) -> None:
        self._state, self._driver_of, self._is_alive = state, driver_of, is_alive

    async def load(self, effect: msg.LoadAdapter) -> EngineHandle:
        """Returns the handle of the host, whose engine answers for the adapter now. Raises EngineFailed with the reason
        of the engine, EngineUnable for one of a kind that takes no adapters."""
        handle = self._state.handles.get(effect.host_id)
        if handle is None or not self._is_alive(handle):
            raise EngineFailed(f"the engine of {effect.host_id}, which was to take the adapter, is gone")
        await self._host(handle).load_adapter(handle, effect.model, Path(effect.path))
        return handle

    async def unload(self, effect: msg.UnloadAdapter) -> bool:
        """Whether no engine holds the adapter any more: asked again later, where one does not say so."""
        handle = self._state.handles.get(effect.host_id)
        if handle is None or not self._is_alive(handle):
            return True
        try:
            await self._host(handle).unload_adapter(handle, effect.model)
        except EngineFailed:
            if self._is_alive(handle):
                raise
        return True

    def _host(self, handle: EngineHandle) -> AdapterHost:
        driver = self._driver_of(handle)
        if not isinstance(driver, AdapterHost):
            raise EngineUnable(f"{handle.engine} takes no adapters")
        return driver
