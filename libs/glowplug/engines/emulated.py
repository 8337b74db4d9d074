"""The emulated engine: a real process with vLLM's HTTP subset over modelled time. Never to be taken for a real one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineFailed
from glowplug.domain.model import Model
from glowplug.engines import apis, emulated_args
from glowplug.engines.apis import EngineApi
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import (
    Ability,
    EngineCapabilities,
    EngineHandle,
    LaunchRequest,
    LoadReport,
    StageEndpoint,
    Stager,
)


class EmulatedDriver(HostedDriver, Stager):
    """Runs `emulated_host` for one model. `engine_args`: see emulated_args.py."""

    name = "emulated"
    arguments = emulated_args.ARGUMENTS
    weights = emulated_args.WEIGHTS
    capabilities = EngineCapabilities(emulated=True, metrics=True, groups=True, overhead_bytes=1 << 30)
    module = "glowplug.engines.emulated_host"
    in_flight_samples = ("vllm:num_requests_running", "vllm:num_requests_waiting", "emulated:num_requests_carried")

    def abilities(self, gpu_kind: str) -> frozenset[Ability]:
        streams = {Ability.STREAM} if self._settings.emulated_streams else set[Ability]()
        stages = {Ability.STAGES} if gpu_kind == "emulated" else set[Ability]()
        return frozenset({Ability.PREWARM, Ability.SWAP, Ability.FIRST_LAYERS} | streams | stages)

    @staticmethod
    def api(model: Model) -> EngineApi:
        why = "runs on the emulated engine, which has no such API"
        lacks = dict.fromkeys((apis.RESPONSES, apis.MESSAGES, apis.COUNT_TOKENS, apis.RERANK), why)
        return EngineApi(lacks=lacks, tool_choices=frozenset(), continues=frozenset((apis.CHAT, apis.COMPLETIONS)))

    def spec(self, request: LaunchRequest) -> dict[str, Any]:
        spec = super().spec(request)
        model, num_stages = request.model, request.num_stages
        spec["first_bytes"] = request.first_bytes
        spec |= {"stage": request.stage, "num_stages": num_stages}
        if num_stages > 1:
            spec["kv_bytes"] = max(0, request.num_bytes - -(-model.weights_bytes // num_stages))
            if not request.stage:  # it runs the requests of all of them (HydraServe section 6.1)
                spec["max_concurrency"] = model.max_concurrency * num_stages
        spec["time_scale"] = request.model.engine_args.get("time_scale", self._settings.emulated_time_scale)
        return spec

    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        """Prewarmed, it is paused with its weights where they are; swapped out, they go to host memory, which takes its
        modelled time."""
        await self._tell(handle, "/pause?mode=abort", self._settings.health_timeout_s)
        if becomes == "swapped_out":
            await self._tell(handle, "/sleep?level=1", self._settings.load_timeout_s)

    async def sleep_if_idle(self, handle: EngineHandle, becomes: str) -> int:
        paused = json.loads(await self._tell(handle, "/pause?mode=idle", self._settings.health_timeout_s))
        if paused["num_in_flight"]:
            return int(paused["num_in_flight"])
        if becomes == "swapped_out":
            await self._tell(handle, "/sleep?level=1", self._settings.load_timeout_s)
        return 0

    async def wake(self, handle: EngineHandle) -> None:
        await self._tell(handle, "/wake_up", self._settings.load_timeout_s)
        await self._tell(handle, "/resume", self._settings.health_timeout_s)

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        answer = await self._tell(handle, "/admin/kv", self._settings.health_timeout_s, method="GET")
        return int(json.loads(answer)["used_bytes"])

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        body = json.dumps({"num_bytes": num_bytes}).encode()
        await self._tell(handle, "/admin/kv", self._settings.health_timeout_s, body=body)

    async def serve_stages(self, handle: EngineHandle, later: Sequence[StageEndpoint] = ()) -> LoadReport:
        body = json.dumps({"stages": [{"url": one.url, "api_key": one.api_key} for one in later]}).encode()
        answer = json.loads(await self._tell(handle, "/stage/join", self._settings.load_timeout_s, body=body))
        return LoadReport(
            handle=handle, phases=(), num_slots=int(answer["num_slots"]), kv_tokens=int(answer["kv_tokens"])
        )

    async def consolidate(self, handle: EngineHandle, model: Model, weights_path: Path) -> int:
        body = json.dumps({"kv_bytes": model.kv_bytes, "max_running": model.max_concurrency}).encode()
        answer = await self._tell(handle, "/stage/consolidate", self._settings.load_timeout_s, body=body)
        return int(json.loads(answer)["kv_tokens"])

    async def abandon_consolidation(self, handle: EngineHandle) -> int | None:
        answer = json.loads(await self._tell(handle, "/stage/abandon", self._settings.health_timeout_s))
        return int(answer["kv_tokens"]) if answer["is_whole"] else None

    async def _tell(
        self, handle: EngineHandle, path: str, timeout_s: float, *, method: str = "POST", body: bytes = b""
    ) -> bytes:
        status, answer = await self._ask(handle, path, timeout_s, method=method, body=body)
        if status != 200:
            shown = answer[:200].decode("utf-8", "replace")
            raise EngineFailed(f"{self.name} {handle.instance_id}: {path} says {status}: {shown}")
        return answer
