"""The emulated engine: a real process with vLLM's HTTP subset over modelled time. Never to be taken for a real one."""

import json
from typing import Any

from glowplug.domain.errors import BadRequest, EngineFailed
from glowplug.engines import probe
from glowplug.engines.emulated_host.faults import Faults, changed
from glowplug.engines.emulated_host.profiles import PROFILES
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import EngineCapabilities, EngineHandle, LaunchRequest

_NUMBERS = frozenset({"time_scale", "launch_s", "fetch_bytes_per_s", "load_bytes_per_s", "warmup_s"})
_WHOLE = frozenset({"seed", "max_num_batched_tokens"})
_POSITIVE = frozenset({"time_scale", "load_bytes_per_s", "max_num_batched_tokens"})
ENGINE_ARGS = _NUMBERS | _WHOLE | {"profile", "faults"}


class EmulatedDriver(HostedDriver):
    """Runs `emulated_host` for one model. `engine_args`: see ENGINE_ARGS; `profile` is a key of PROFILES."""

    name = "emulated"
    capabilities = EngineCapabilities(
        emulated=True,
        embeddings=True,
        sleep=True,
        metrics=True,
        prewarm=True,
        groups=True,
        overhead_bytes=1 << 30,
    )
    module = "glowplug.engines.emulated_host"
    in_flight_samples = ("vllm:num_requests_running", "vllm:num_requests_waiting")

    def spec(self, request: LaunchRequest) -> dict[str, Any]:
        args = request.model.engine_args
        for name, value in args.items():
            _check(name, value)
        spec = super().spec(request)
        spec["first_bytes"] = request.first_bytes
        spec["time_scale"] = args.get("time_scale", self._settings.emulated_time_scale)
        return spec

    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        """Prewarmed, it is paused with its weights where they are; swapped out, they go to host memory, which takes its
        modelled time."""
        await self._tell(handle, "/pause?mode=abort", self._settings.health_timeout_s)
        if becomes == "swapped_out":
            await self._tell(handle, "/sleep?level=1", self._settings.load_timeout_s)

    async def wake(self, handle: EngineHandle) -> None:
        await self._tell(handle, "/wake_up", self._settings.load_timeout_s)
        await self._tell(handle, "/resume", self._settings.health_timeout_s)

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        answer = await self._tell(handle, "/admin/kv", self._settings.health_timeout_s, method="GET")
        return int(json.loads(answer)["used_bytes"])

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        body = json.dumps({"num_bytes": num_bytes}).encode()
        await self._tell(handle, "/admin/kv", self._settings.health_timeout_s, body=body)

    async def _tell(
        self, handle: EngineHandle, path: str, timeout_s: float, *, method: str = "POST", body: bytes = b""
    ) -> bytes:
        try:
            status, answer = await probe.ask(
                handle.url, path, timeout_s, method=method, body=body, api_key=handle.api_key
            )
        except (OSError, TimeoutError) as error:
            raise EngineFailed(f"{self.name} {handle.instance_id} does not answer {path}: {error!r}") from error
        if status != 200:
            raise EngineFailed(f"{self.name} {handle.instance_id}: {path} says {status}")
        return answer


def _check(name: str, value: Any) -> None:
    """Raises BadRequest naming the engine argument that is unknown or wrong."""
    param = f"engine_args.{name}"
    if name == "profile":
        if not isinstance(value, str) or value not in PROFILES:
            raise BadRequest(f"{param}: one of {', '.join(PROFILES)}", param=param)
    elif name == "faults":
        try:
            changed(Faults(), value)
        except ValueError as error:
            raise BadRequest(f"{param}: {error}", param=param) from error
    elif name not in ENGINE_ARGS:
        raise BadRequest(f"{param} is not known to the emulated engine", param=param)
    elif isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else int | float):
        raise BadRequest(f"{param}: a number is expected", param=param)
    elif value < 0 or (name in _POSITIVE and value == 0):
        raise BadRequest(f"{param}: {value} is too small", param=param)
