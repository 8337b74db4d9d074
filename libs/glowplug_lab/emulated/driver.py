"""Driver of the emulated engine, a real process with vLLM's HTTP subset over modelled time."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineFailed
from glowplug.domain.instance import EngineFigures
from glowplug.domain.model import Model
from glowplug.engines import apis
from glowplug.engines.apis import EngineApi
from glowplug.engines.declaration import Argument, EngineArguments, EngineWeights, WeightsForm, choice, number, whole
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import (
    Ability,
    EngineCapabilities,
    EngineHandle,
    LoadReport,
    Place,
    StageEndpoint,
    Stager,
)
from glowplug.events.commands import StartInstance
from glowplug_lab.emulated.faults import Faults, changed
from glowplug_lab.emulated.profiles import PROFILES

_MOST_S = 86_400.0  # a day
_MOST_RATE = 1e15  # bytes per second, far above any memory
_MOST_SCALE = 1e6


def _wrong_faults(value: Any) -> str | None:
    try:
        changed(Faults(), value)
    except ValueError as error:
        return str(error)
    return None


ARGUMENTS = EngineArguments(
    engine="the emulated engine",
    known={
        "profile": choice("the model and GPU whose timing is modelled", tuple(PROFILES)),
        "time_scale": number("emulated seconds per second", _MOST_SCALE, above_zero=True),
        "launch_s": number("seconds until the process has started", _MOST_S),
        "warmup_s": number("seconds of warm-up", _MOST_S),
        "load_bytes_per_s": number("host memory to GPU", _MOST_RATE, above_zero=True),
        "fetch_bytes_per_s": number("a modelled network in front of it; 0 for none", _MOST_RATE),
        "hop_s": number("from one stage of a pipeline to the next, beside what the connection takes", _MOST_S),
        "stage_timeout_s": number("real seconds until a stage that does not answer is lost", _MOST_S, above_zero=True),
        "max_num_batched_tokens": whole("tokens of one step", least=1),
        "long_prefill_token_threshold": whole("of them of one prompt, while other requests are there; 0: no limit"),
        "seed": whole("of texts and chances"),
        "faults": Argument(
            meaning="what goes wrong from the start",
            allowed="a mapping with the options of /admin/config",
            wrong=_wrong_faults,
        ),
    },
)


def unreadable(path: Path) -> str:
    """Return "" for anything but an empty file. Raises OSError."""
    return f"{path.name} is empty" if path.is_file() and not path.stat().st_size else ""


WEIGHTS = EngineWeights(
    kind="any file or directory, whose bytes it moves and does not read",
    form=WeightsForm.ANY,
    required=False,
    unreadable=unreadable,
)

# Request fields known to the router whose effect a made-up text cannot have.
IGNORES: dict[str, Any] = {
    "n": 1,
    "n_cmpl": 1,
    "best_of": None,
    "echo": False,
    "suffix": "",
    "n_predict": -1,
    "stop_token_ids": [],
    "n_probs": 0,
    "prompt_logprobs": 0,
    "top_logprobs": 0,
    "logprobs": False,
    "response_format": "text",
    "output_config": None,
    "output_format": None,
    "json_schema": None,
    "structured_outputs": None,
    "grammar": "",
    "guided_grammar": "",
    "guided_regex": "",
    "guided_json": None,
    "guided_choice": None,
    "timings_per_token": False,
    "verbosity": "medium",
    "dimensions": None,
}


class EmulatedDriver(HostedDriver, Stager):
    """`engine_args`: see ARGUMENTS."""

    name = "emulated"
    arguments = ARGUMENTS
    weights = WEIGHTS
    capabilities = EngineCapabilities(emulated=True, metrics=True, groups=True, overhead_bytes=1 << 30)
    module = "glowplug_lab.emulated"
    in_flight_samples = ("vllm:num_requests_running", "vllm:num_requests_waiting", "emulated:num_requests_carried")

    def abilities(self, gpu_kind: str) -> frozenset[Ability]:
        streams = {Ability.STREAM} if self._settings.emulated_streams else set[Ability]()
        stages = {Ability.STAGES} if gpu_kind == "emulated" else set[Ability]()
        return frozenset({Ability.PREWARM, Ability.SWAP, Ability.FIRST_LAYERS, Ability.ADAPTERS} | streams | stages)

    @staticmethod
    def api(model: Model) -> EngineApi:
        why = "runs on the emulated engine, which has no such API"
        lacks = dict.fromkeys((apis.COUNT_TOKENS, apis.RERANK), why)
        return EngineApi(
            lacks=lacks,
            ignores=IGNORES,
            tool_choices=frozenset(),
            continues=frozenset((apis.CHAT, apis.COMPLETIONS)),
            has_messages=False,
            translated=frozenset((apis.MESSAGES.encode(),)),
        )

    def spec(self, command: StartInstance, place: Place) -> dict[str, Any]:
        spec = super().spec(command, place)
        model, num_stages, num_bytes = command.model, command.num_stages, place.devices.num_bytes
        spec["first_bytes"] = num_bytes if command.replica else 0
        spec |= {"stage": command.stage, "num_stages": num_stages}
        if num_stages > 1:
            spec["kv_bytes"] = max(0, num_bytes - -(-model.weights_bytes // num_stages))
            if not command.stage:  # it runs all stages' requests (HydraServe section 6.1)
                spec["max_concurrency"] = model.max_concurrency * num_stages
        spec["time_scale"] = model.engine_args.get("time_scale", self._settings.emulated_time_scale)
        return spec

    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        """Pause; swapped out, also move the weights to host memory in modelled time."""
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

    async def load_adapter(self, handle: EngineHandle, adapter: Model, weights_path: Path) -> None:
        if not weights_path.exists():
            raise EngineFailed(f"there is no adapter at {weights_path}")
        body = json.dumps({"lora_name": adapter.name, "num_bytes": adapter.weights_bytes}).encode()
        await self._tell(handle, "/v1/load_lora_adapter", self._settings.load_timeout_s, body=body)

    async def unload_adapter(self, handle: EngineHandle, adapter: Model) -> None:
        body = json.dumps({"lora_name": adapter.name}).encode()
        await self._tell(handle, "/v1/unload_lora_adapter", self._settings.health_timeout_s, body=body)

    async def num_of_adapter(self, handle: EngineHandle, adapter: Model) -> int:
        shown = json.loads(await self._tell(handle, "/admin/adapters", self._settings.health_timeout_s, method="GET"))
        return int(shown.get(adapter.name, 0))

    async def serve_stages(self, handle: EngineHandle, later: Sequence[StageEndpoint] = ()) -> LoadReport:
        body = json.dumps({"stages": [{"url": one.url, "api_key": one.api_key} for one in later]}).encode()
        answer = json.loads(await self._tell(handle, "/stage/join", self._settings.load_timeout_s, body=body))
        figures = EngineFigures(num_slots=int(answer["num_slots"]), kv_tokens=int(answer["kv_tokens"]))
        return LoadReport(handle=replace(handle, figures=figures), phases=())

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
