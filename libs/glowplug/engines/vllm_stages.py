"""vLLM as the stages of a pipeline, each in an engine process on a node of its own (HydraServe sections 4 and 6).

Each stage is launched and loaded like an engine. vLLM's processes meet at `LaunchRequest.rendezvous`, so none of them
loads before all have been given their weights. A later stage has no server: it is READY with its weights loaded, and
has no url. The first one is asked by `serve_stages` for the server that answers for all.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineFailed
from glowplug.engines import process, rendezvous
from glowplug.engines.hosted import HostedDriver, phases_of
from glowplug.engines.port import EngineHandle, Health, LaunchRequest, LoadReport, Stager

STAGE, NUM_STAGES, NUM_WORKERS = "stage", "num_stages", "num_workers"  # in a handle's data, of a stage


def handle_data(request: LaunchRequest) -> dict[str, str]:
    """What a stage's handle has in its data; nothing of an engine that is whole."""
    if request.num_stages == 1:
        return {}
    numbers = {STAGE: request.stage, NUM_STAGES: request.num_stages, NUM_WORKERS: request.num_gpus}
    return {name: str(number) for name, number in numbers.items()}


def is_stage(handle: EngineHandle) -> bool:
    return STAGE in handle.data


def is_later(handle: EngineHandle) -> bool:
    """Whether it is a stage without a server of its own."""
    return handle.data.get(STAGE, "0") != "0"


class StagedVllm(HostedDriver, Stager):
    """What VllmDriver does with stages."""

    async def load_stage(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        """As `load`, of a stage: returns when its own part of the weights is loaded."""
        run_dir = Path(handle.run_dir)
        rendezvous.write(run_dir, rendezvous.GO, {"path": str(weights_path)})
        loaded: dict[str, Any] = {}
        try:
            for number in range(int(handle.data[NUM_WORKERS])):
                loaded = await self._wait_ready(handle, run_dir, rendezvous.loaded(number))
        except EngineFailed:
            await process.stop_group(handle.pid, handle.pid_started_at, grace_s=0.0)
            raise
        return LoadReport(handle=handle, phases=phases_of(loaded))

    async def serve_stages(self, handle: EngineHandle, later: Sequence[Any] = ()) -> LoadReport:
        """As the port says. vLLM's processes have found the later stages by themselves."""
        if is_later(handle) or not is_stage(handle):
            raise EngineFailed(f"{self.name} {handle.instance_id} is not the first stage of a pipeline")
        return self._report(handle, await self._wait_ready(handle, Path(handle.run_dir)))

    def health_of_later(self, handle: EngineHandle, hung_after_s: float) -> Health:
        """Of a stage without a server: its worker renews a file, at the latest after `hung_after_s`."""
        try:
            renewed_at = (Path(handle.run_dir) / rendezvous.loaded(0)).stat().st_mtime
        except OSError:
            return Health(ok=False, reason="not loaded yet")
        silent_s = time.time() - renewed_at
        if silent_s > hung_after_s:
            return Health(ok=False, reason=f"the stage has given no sign for {silent_s:.0f} s")
        return Health(ok=True)
