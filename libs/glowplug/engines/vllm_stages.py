"""vLLM as the stages of a pipeline, each in an engine process on a node of its own (HydraServe sections 4 and 6).

Each stage is launched and loaded like an engine. vLLM's processes meet at `LaunchRequest.rendezvous`, so none of them
loads before all have been given their weights. A later stage has no server: it is READY with its weights loaded, and
has no url. The first one is asked by `serve_stages` for the server that answers for all.

A stage becomes whole in a process beside its own: vLLM fixes at its start which layers a process has. The whole engine
is started from the node's weights while the pipeline serves on; then `move_requests` pauses the pipeline and brings it
the KV cache of what runs (glowplug_vllm/moving.py). The pipeline goes on with what nobody takes away from it, until
`is_stage_over`, and `end_stage` ends the stage's process.
"""

import hashlib
import json
import shutil
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from glowplug.domain.errors import EngineFailed
from glowplug.domain.model import Model
from glowplug.engines import process, rendezvous, vllm_args
from glowplug.engines.hosted import HostedDriver, phases_of
from glowplug.engines.port import EngineHandle, Health, LaunchRequest, LoadReport, Moved, Stager

STAGE, NUM_WORKERS, DEVICES = "stage", "num_workers", "devices"  # in a handle's data, of a stage
OF_STAGE = "of_stage"  # ... of a whole engine: the handle of the stage that it was
WHOLE, HANDLE = "whole", "handle.json"  # in a stage's run directory: the whole engine's own, and its handle there
RECOMPUTE_BELOW = 128  # tokens, one of vLLM's blocks on a CPU: a shorter KV cache is computed anew
_SHARED_MEMORY = Path("/dev/shm")

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _ExportedRequest(msgspec.Struct):
    num_bytes: _Count
    num_computed: _Count = 0


class _Exported(msgspec.Struct):
    """The answer of /glowplug/export, as far as it is read (glowplug_vllm/sleeping.py)."""

    requests: list[_ExportedRequest]
    pause_s: float
    export_s: float


def handle_data(request: LaunchRequest) -> dict[str, str]:
    """What a stage's handle has in its data; nothing of an engine that is whole."""
    if request.num_stages == 1:
        return {}
    devices = {"gpu_kind": request.gpu_kind, "gpu_index": request.gpu_index, "gpu_indices": request.gpu_indices}
    return {STAGE: str(request.stage), NUM_WORKERS: str(request.num_gpus), DEVICES: json.dumps(devices)}


def is_stage(handle: EngineHandle) -> bool:
    return STAGE in handle.data


def is_later(handle: EngineHandle) -> bool:
    """Whether it is a stage without a server of its own."""
    return handle.data.get(STAGE, "0") != "0"


def kv_directory(stage_run_dir: str) -> Path:
    """Where requests that leave a stage lie until the whole engine has them."""
    if not _SHARED_MEMORY.is_dir():
        return Path(stage_run_dir) / "kv"
    return _SHARED_MEMORY / f"glowplug-kv-{hashlib.sha256(stage_run_dir.encode()).hexdigest()[:16]}"


def stage_of(handle: EngineHandle) -> EngineHandle | None:
    """The stage whose process a whole engine came up beside."""
    return EngineHandle.from_json(handle.data[OF_STAGE].encode()) if OF_STAGE in handle.data else None


class StagedVllm(HostedDriver, Stager):
    """What VllmDriver does with stages."""

    @abstractmethod
    async def start(self, request: LaunchRequest, more_argv: Sequence[str] = ()) -> EngineHandle:
        """As `launch`, with more flags."""

    async def load_stage(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        """As `load`, of a stage: returns when its own part of the weights is loaded."""
        run_dir = Path(handle.run_dir)
        loaded: dict[str, Any] = {}
        async with self._loading(handle, weights_path):
            rendezvous.write(run_dir, rendezvous.GO, {"path": str(weights_path)})
            for number in range(int(handle.data[NUM_WORKERS])):
                loaded = await self._wait_ready(handle, run_dir, weights_path, rendezvous.loaded(number))
        return LoadReport(handle=handle, phases=phases_of(loaded))

    async def serve_stages(self, handle: EngineHandle, later: Sequence[Any] = ()) -> LoadReport:
        """As the port says. vLLM's processes have found the later stages by themselves."""
        if is_later(handle) or not is_stage(handle):
            raise EngineFailed(f"{self.name} {handle.instance_id} is not the first stage of a pipeline")
        return self._report(handle, await self._wait_ready(handle, Path(handle.run_dir), None))

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

    async def consolidate(self, handle: EngineHandle, model: Model, weights_path: Path) -> int:
        return await self.consolidate_at(handle, model, weights_path, 0)

    async def consolidate_at(self, handle: EngineHandle, model: Model, weights_path: Path, port: int) -> int:
        """As the port says. What serves then, see `whole`."""
        if OF_STAGE in handle.data and (already := self.whole(handle)) is not None:
            return already.kv_tokens
        if not is_stage(handle):
            raise EngineFailed(f"{self.name} {handle.instance_id} is not a stage of a pipeline")
        beside = self._beside(handle)
        if beside is None or not self.adopt(beside):
            beside = await self._launch_whole(handle, model, port)
        report = await self.load(beside, weights_path)
        await self._first_tokens(report.handle, model)
        return report.kv_tokens

    async def _first_tokens(self, handle: EngineHandle, model: Model) -> None:
        """An engine takes longer over its first tokens than over those that follow; no stream is to wait for that. An
        engine that generates none (a pooling model) refuses, and has nothing to take over."""
        question = {"model": model.name, "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        body = json.dumps(question).encode()
        await self._ask(handle, "/v1/completions", self._settings.load_timeout_s, method="POST", body=body)

    async def _launch_whole(self, handle: EngineHandle, model: Model, port: int) -> EngineHandle:
        run_dir = Path(handle.run_dir) / WHOLE
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(mode=0o700)
        directory = kv_directory(handle.run_dir)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700)
        devices = json.loads(handle.data[DEVICES])
        request = LaunchRequest(
            instance_id=handle.instance_id,
            model=model,
            num_bytes=model.memory_bytes,
            run_dir=run_dir,
            log_path=Path(handle.log_path),
            host=handle.host,
            port=port,
            api_key=handle.api_key,
            **{**devices, "gpu_indices": tuple(devices["gpu_indices"])},
        )
        beside = await self.start(request, vllm_args.pulling_argv(model, directory))
        (run_dir / HANDLE).write_bytes(beside.to_json())
        return beside

    def _beside(self, handle: EngineHandle) -> EngineHandle | None:
        """The process of the whole engine beside a stage, as far as one was launched."""
        try:
            return EngineHandle.from_json((Path(handle.run_dir) / WHOLE / HANDLE).read_bytes())
        except (OSError, msgspec.MsgspecError):  # killed in the middle of it: it is launched anew
            return None

    def whole(self, handle: EngineHandle) -> LoadReport | None:
        """As the port says."""
        if OF_STAGE in handle.data:
            ready = rendezvous.read(Path(handle.run_dir), rendezvous.READY)
            return self._report(handle, ready) if ready is not None else None
        beside = self._beside(handle) if is_stage(handle) else None
        ready = rendezvous.read(Path(beside.run_dir), rendezvous.READY) if beside is not None else None
        if beside is None or ready is None or not self.adopt(beside):
            return None
        kept = {name: value for name, value in handle.data.items() if name not in (STAGE, NUM_WORKERS, DEVICES)}
        data = {**kept, **beside.data, OF_STAGE: handle.to_json().decode()}
        return self._report(replace(beside, data=data), ready)

    def processes(self, handle: EngineHandle) -> tuple[int, ...]:
        """As the port says."""
        others = (stage_of(handle), self._beside(handle))
        return tuple(other.pid for other in others if other is not None and self.adopt(other))

    async def move_requests(self, handle: EngineHandle) -> Moved:
        """As the port says. A later stage has no requests of its own."""
        stage = stage_of(handle)
        if stage is None or is_later(stage) or not self.adopt(stage):
            return Moved()
        below = int(self._settings.extra.get("vllm_recompute_below", RECOMPUTE_BELOW))
        message = json.dumps({"directory": str(kv_directory(stage.run_dir)), "recompute_below": below}).encode()
        status, text = await self._ask(
            stage, "/glowplug/export", self._settings.load_timeout_s, method="POST", body=message
        )
        if status != 200:
            raise EngineFailed(f"{self.name} {handle.instance_id}: its KV cache is lost: {text[:300]!r}")
        try:
            answer = msgspec.json.decode(text, type=_Exported)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = f"{self.name} {handle.instance_id}: its stage does not say what it has written: {error}"
            raise EngineFailed(why) from error
        moved = [request for request in answer.requests if request.num_bytes]
        return Moved(
            num_requests=len(answer.requests),
            num_pulled=len(moved),
            num_tokens=sum(request.num_computed for request in moved),
            num_bytes=sum(request.num_bytes for request in moved),
            pause_s=answer.pause_s,
            export_s=answer.export_s,
        )

    async def is_stage_over(self, handle: EngineHandle) -> bool:
        """As the port says."""
        stage = stage_of(handle)
        if stage is None or not self.adopt(stage):
            return True
        return not is_later(stage) and await self._num_in_stage(stage) == 0

    async def num_in_stages(self, handle: EngineHandle) -> int:
        """Requests that run in the stages which a whole engine came up beside. Raises EngineFailed."""
        stage = stage_of(handle)
        if stage is None or is_later(stage) or not self.adopt(stage):
            return 0
        return await self._num_in_stage(stage)

    async def _num_in_stage(self, stage: EngineHandle) -> int:
        """Of a first stage. vLLM's own samples stand still once it runs nothing more."""
        status, text = await self._ask(stage, "/glowplug/requests", self._settings.health_timeout_s)
        why = f"{self.name} {stage.instance_id}: its stage does not say what runs: {text[:300]!r}"
        if status != 200:
            raise EngineFailed(why)
        try:
            return int(json.loads(text)["num_requests"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineFailed(why) from error

    async def end_stage(self, handle: EngineHandle) -> None:
        """As the port says. Said twice, it does nothing."""
        if (stage := stage_of(handle)) is not None:
            await process.stop_group(stage.pid, stage.pid_started_at, grace_s=0.0)

    def forget_moved(self, handle: EngineHandle) -> None:
        """As the port says."""
        if (stage := stage_of(handle)) is not None:
            shutil.rmtree(kv_directory(stage.run_dir), ignore_errors=True)

    async def abandon_consolidation(self, handle: EngineHandle) -> int | None:
        """As the port says."""
        if not is_stage(handle):
            ready = rendezvous.read(Path(handle.run_dir), rendezvous.READY)
            return int(ready["kv_tokens"]) if ready is not None else 0
        if (whole := self.whole(handle)) is not None:  # what runs may have left the stages already
            return whole.kv_tokens
        await self._end_beside(handle)
        return None

    async def _end_beside(self, handle: EngineHandle) -> None:
        """End what came up beside a stage."""
        beside = self._beside(handle)
        if beside is not None:
            await process.stop_group(beside.pid, beside.pid_started_at, grace_s=0.0)
        shutil.rmtree(Path(handle.run_dir) / WHOLE, ignore_errors=True)
        shutil.rmtree(kv_directory(handle.run_dir), ignore_errors=True)

    async def stop(self, handle: EngineHandle, grace_s: float) -> None:
        """As the port says. The whole group gets the grace: its last member frees what is in shared memory."""
        await process.stop_group(handle.pid, handle.pid_started_at, grace_s, waits_for_group=True)
        if is_stage(handle):
            await self._end_beside(handle)
        elif stage_of(handle) is not None:
            await self.end_stage(handle)
            self.forget_moved(handle)
