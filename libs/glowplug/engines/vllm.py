"""vLLM as an engine: its OpenAI server in its own environment, started as a fork of a parked process.

A parked start takes a twentieth of a plain one to the first token (docs/figures.md).
`engine_args` are flags of `vllm serve` (`dtype: float32`, `max-num-batched-tokens: 2048`), and our own: `parked` (false
starts a fresh interpreter) and `num_threads` (CPU).
"""

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from glowplug.domain.errors import EngineFailed, EngineMisconfigured, WeightsUnavailable
from glowplug.domain.model import Model
from glowplug.engines import apis, process, rendezvous, vllm_args, vllm_env
from glowplug.engines.apis import EngineApi
from glowplug.engines.hosted import HostedDriver, phases_of
from glowplug.engines.port import (
    Ability,
    EngineCapabilities,
    EngineHandle,
    Health,
    LoadReport,
    Moved,
    Place,
    Stager,
)
from glowplug.engines.template_tools import WITH_TOOLS
from glowplug.engines.vllm_zygote import ZygoteLease, default_dir
from glowplug.events.commands import StartInstance

STAGE = "stage"
# vLLM as the stages of a pipeline, each an engine process on its own node (HydraServe sections 4 and 6). vLLM's
# processes meet at `StartInstance.rendezvous`, so none loads before all have their weights. A later stage has no server
# and no url.
# A stage becomes whole in a process beside its own, since vLLM fixes a process's layers at its start; `move_requests`
# pauses the pipeline and brings over the KV cache of running requests (glowplug_vllm/moving.py).

OF_STAGE = "of_stage"
WHOLE, HANDLE = "whole", "handle.json"  # in a stage's run directory
RECOMPUTE_BELOW = 128  # tokens, one vLLM block on a CPU: a shorter KV cache is recomputed
_SHARED_MEMORY = Path("/dev/shm")

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _ExportedRequest(msgspec.Struct):
    num_bytes: _Count
    num_computed: _Count = 0


class _Exported(msgspec.Struct):
    """The used fields of the answer of /glowplug/export (glowplug_vllm/sleeping.py)."""

    requests: list[_ExportedRequest]
    pause_s: float
    export_s: float


def is_stage(handle: EngineHandle) -> bool:
    return STAGE in handle.data


def is_later(handle: EngineHandle) -> bool:
    return handle.data.get(STAGE, "0") != "0"


def kv_directory(stage_run_dir: str) -> Path:
    """Return the directory for requests that leave a stage, until the whole engine has them."""
    if not _SHARED_MEMORY.is_dir():
        return Path(stage_run_dir) / "kv"
    return _SHARED_MEMORY / f"glowplug-kv-{hashlib.sha256(stage_run_dir.encode()).hexdigest()[:16]}"


def stage_of(handle: EngineHandle) -> EngineHandle | None:
    return EngineHandle.from_json(handle.data[OF_STAGE].encode()) if OF_STAGE in handle.data else None


class StagedVllm(HostedDriver, Stager):
    """The part of VllmDriver for stages."""

    @abstractmethod
    async def start(self, command: StartInstance, place: Place, more_argv: Sequence[str] = ()) -> EngineHandle:
        """As `launch`, with more flags."""

    async def load_stage(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        """Return when the stage's own part is loaded."""
        run_dir = Path(handle.run_dir)
        loaded: dict[str, Any] = {}
        async with self._loading(handle, weights_path):
            rendezvous.write(run_dir, rendezvous.GO, {"path": str(weights_path)})
            for number in range(len(handle.devices.ordinals)):
                loaded = await self._wait_ready(handle, run_dir, weights_path, rendezvous.loaded(number))
        return LoadReport(handle=handle, phases=phases_of(loaded))

    async def serve_stages(self, handle: EngineHandle, later: Sequence[Any] = ()) -> LoadReport:
        if is_later(handle) or not is_stage(handle):
            raise EngineFailed(f"{self.name} {handle.instance_id} is not the first stage of a pipeline")
        return self._report(handle, await self._wait_ready(handle, Path(handle.run_dir), None))

    @cached_property
    def _renewals(self) -> dict[str, tuple[int, float]]:
        """By instance: the file's time, in ns, and our monotonic clock when it was first seen."""
        return {}

    def health_of_later(self, handle: EngineHandle, hung_after_s: float) -> Health:
        """Health of a stage without a server: its worker renews a file at least every `hung_after_s`."""
        try:
            renewed = (Path(handle.run_dir) / rendezvous.loaded(0)).stat().st_mtime_ns
        except OSError:
            return Health(ok=False, reason="not loaded yet")
        now_s = time.monotonic()
        last, since_s = self._renewals.get(handle.instance_id, (0, now_s))
        if renewed != last:  # compared with the last look: a file's time is of a clock that steps
            since_s = now_s
        self._renewals[handle.instance_id] = renewed, since_s
        if (silent_s := now_s - since_s) > hung_after_s:
            return Health(ok=False, reason=f"the stage has been silent for {silent_s:.0f} s")
        return Health(ok=True)

    async def consolidate(self, handle: EngineHandle, model: Model, weights_path: Path) -> int:
        return await self.consolidate_at(handle, model, weights_path, 0)

    async def consolidate_at(self, handle: EngineHandle, model: Model, weights_path: Path, port: int) -> int:
        if OF_STAGE in handle.data and (already := self.whole(handle)) is not None:
            return already.handle.figures.kv_tokens
        if not is_stage(handle):
            raise EngineFailed(f"{self.name} {handle.instance_id} is not a stage of a pipeline")
        beside = self._beside(handle)
        if beside is None or not self.adopt(beside):
            beside = await self._launch_whole(handle, model, port)
        report = await self.load(beside, weights_path)
        await self._first_tokens(report.handle, model)
        return report.handle.figures.kv_tokens

    async def _first_tokens(self, handle: EngineHandle, model: Model) -> None:
        """Warm the engine up before streams move to it. A pooling model refuses, and has nothing to take over."""
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
        command = StartInstance(target="", instance_id=handle.instance_id, model=model, workers=(), decision_id="")
        place = Place(
            run_dir=run_dir,
            log_path=Path(handle.log_path),
            devices=replace(handle.devices, num_bytes=model.memory_bytes),
            host=handle.host,
            port=port,
            api_key=handle.api_key,
        )
        beside = await self.start(command, place, vllm_args.pulling_argv(model, directory))
        (run_dir / HANDLE).write_bytes(beside.to_json())
        return beside

    def _beside(self, handle: EngineHandle) -> EngineHandle | None:
        try:
            return EngineHandle.from_json((Path(handle.run_dir) / WHOLE / HANDLE).read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None

    def whole(self, handle: EngineHandle) -> LoadReport | None:
        if OF_STAGE in handle.data:
            ready = rendezvous.read(Path(handle.run_dir), rendezvous.READY)
            return self._report(handle, ready) if ready is not None else None
        beside = self._beside(handle) if is_stage(handle) else None
        ready = rendezvous.read(Path(beside.run_dir), rendezvous.READY) if beside is not None else None
        if beside is None or ready is None or not self.adopt(beside):
            return None
        kept = {name: value for name, value in handle.data.items() if name != STAGE}
        data = {**kept, **beside.data, OF_STAGE: handle.to_json().decode()}
        return self._report(replace(beside, data=data), ready)

    def processes(self, handle: EngineHandle) -> tuple[int, ...]:
        others = (stage_of(handle), self._beside(handle))
        return tuple(other.pid for other in others if other is not None and self.adopt(other))

    async def move_requests(self, handle: EngineHandle) -> Moved:
        """A later stage has no requests of its own."""
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
            why = f"{self.name} {handle.instance_id}: its stage did not report what it exported: {error}"
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
        stage = stage_of(handle)
        if stage is None or not self.adopt(stage):
            return True
        return not is_later(stage) and await self._num_in_stage(stage) == 0

    async def num_in_stages(self, handle: EngineHandle) -> int:
        """Requests in a whole engine's former stages. Raises EngineFailed."""
        stage = stage_of(handle)
        if stage is None or is_later(stage) or not self.adopt(stage):
            return 0
        return await self._num_in_stage(stage)

    async def _num_in_stage(self, stage: EngineHandle) -> int:
        """Ask a first stage. vLLM's own samples freeze once nothing runs."""
        status, text = await self._ask(stage, "/glowplug/requests", self._settings.health_timeout_s)
        why = f"{self.name} {stage.instance_id}: its stage did not report its requests: {text[:300]!r}"
        if status != 200:
            raise EngineFailed(why)
        try:
            return int(json.loads(text)["num_requests"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineFailed(why) from error

    async def end_stage(self, handle: EngineHandle) -> None:
        """Idempotent."""
        if (stage := stage_of(handle)) is not None:
            await process.stop_group(stage.pid, stage.pid_started_at, grace_s=0.0)

    def forget_moved(self, handle: EngineHandle) -> None:
        if (stage := stage_of(handle)) is not None:
            shutil.rmtree(kv_directory(stage.run_dir), ignore_errors=True)

    async def abandon_consolidation(self, handle: EngineHandle) -> int | None:
        if not is_stage(handle):
            ready = rendezvous.read(Path(handle.run_dir), rendezvous.READY)
            return int(ready["kv_tokens"]) if ready is not None else 0
        if (whole := self.whole(handle)) is not None:  # running requests may have left the stages already
            return whole.handle.figures.kv_tokens
        await self._end_beside(handle)
        return None

    async def _end_beside(self, handle: EngineHandle) -> None:
        beside = self._beside(handle)
        if beside is not None:
            await process.stop_group(beside.pid, beside.pid_started_at, grace_s=0.0)
        shutil.rmtree(Path(handle.run_dir) / WHOLE, ignore_errors=True)
        shutil.rmtree(kv_directory(handle.run_dir), ignore_errors=True)

    async def stop(self, handle: EngineHandle, grace_s: float) -> None:
        """Give the whole group the grace: its last member frees the shared memory."""
        await process.stop_group(handle.pid, handle.pid_started_at, grace_s, waits_for_group=True)
        self._renewals.pop(handle.instance_id, None)
        if is_stage(handle):
            await self._end_beside(handle)
        elif stage_of(handle) is not None:
            await self.end_stage(handle)
            self.forget_moved(handle)


_log = logging.getLogger(__name__)
_SHARES = "shares"
_CORE_PATH = "/glowplug/core"
_FLEET_MARK = "_GLOWPLUG_FLEET"  # runtime/supervisor/sweep.py finds a fleet's processes by it
_KEEP_DELAY_S = 2.0  # the first request of a cold start takes precedence
_CAUSE = re.compile(r"((?:[\w.]*(?:Error|Exception|Exit)): .*|error: .*)$")
_LOWER_LEVEL = re.compile(r"^(?:\([^)]*\) )?(?:DEBUG|INFO|WARNING) ")  # such a line may mention an error, and is none
_NO_CONTEXT = "max seq len"  # vLLM's message where kv_bytes is too small for one request of context_tokens
_CANNOT_SHARE = "SharingError: "  # ours: the weights' form in memory differs from that in their files
_NOT_A_CAUSE = "See root cause above"


# Request fields known to the router that vLLM accepts and ignores.
IGNORES: dict[str, Any] = {
    "best_of": None,
    "repeat_penalty": 1,
    "n_predict": -1,
    "n_probs": 0,
    "n_cmpl": 1,
    "grammar": "",
    "json_schema": None,
    "output_format": None,  # Anthropic's older field; `output_config.format` is heeded
    "guided_grammar": "",  # `structured_outputs` is heeded
    "guided_regex": "",
    "guided_json": None,
    "guided_choice": None,
    "timings_per_token": False,
    "verbosity": "medium",
}


class VllmDriver(StagedVllm):
    """Starts vLLM servers on this node. Holds a lease on the parked process."""

    name = "vllm"
    arguments = vllm_args.ARGUMENTS
    weights = vllm_args.WEIGHTS
    capabilities = EngineCapabilities(
        parked=True,
        metrics=True,
        asleep_bytes=2 << 30,
        groups=True,
        groups_lack=frozenset({Ability.SWAP, Ability.FIRST_LAYERS, Ability.SHARE}),  # part of a matrix is no view
        shares_when_asked=True,
    )
    module = "glowplug_vllm.server"
    in_flight_samples = ("vllm:num_requests_running", "vllm:num_requests_waiting")

    def abilities(self, gpu_kind: str) -> frozenset[Ability]:
        """CPUs use our worker (glowplug_vllm/worker.py), GPUs vLLM's own sleep mode; vLLM's loader reads arriving
        weights (glowplug_vllm/arriving_load.py)."""
        everywhere = frozenset({Ability.PREWARM, Ability.SWAP, Ability.STREAM, Ability.ADAPTERS})
        on_host = {Ability.FIRST_LAYERS, Ability.SHARE, Ability.STAGES}
        return everywhere | on_host if gpu_kind != "cuda" else everywhere

    @staticmethod
    def api(model: Model) -> EngineApi:
        """vLLM derives the task from the weights, unless a flag says it (`--runner`)."""
        runner = model.engine_args.get("runner")
        generating = (apis.CHAT, apis.COMPLETIONS, apis.RESPONSES, apis.MESSAGES, apis.COUNT_TOKENS)
        if runner == "pooling":
            return EngineApi(lacks=dict.fromkeys(generating, "generates no text: engine_args.runner is pooling"))
        pooling = (apis.EMBEDDINGS, apis.RERANK) if runner == "generate" else ()
        return EngineApi(
            lacks=dict.fromkeys(pooling, "only generates text: engine_args.runner is generate"),
            continues=frozenset((apis.CHAT, apis.COMPLETIONS)),
            thinks_by_template=True,
            token_ids=not model.system_prompt,  # it would show the prompt's too, which clients must not read
            completion_tokens=16,
            also=frozenset((apis.TOKENIZE, apis.DETOKENIZE, apis.TRANSCRIPTIONS, apis.TRANSLATIONS)),
            ignores=IGNORES,
        )

    @cached_property
    def _interpreter(self) -> Path:
        return vllm_env.interpreter(self._settings.vllm_python)

    @property
    def _python(self) -> str:
        return str(self._interpreter)

    @cached_property
    def _zygote(self) -> ZygoteLease:
        # A fork shows its zygote's environment, so each fleet has its own zygote.
        fleet = os.environ.get(_FLEET_MARK, "")
        default = default_dir(self._interpreter, f"{vllm_env.version(self._interpreter)} {fleet}")
        directory = Path(self._settings.extra.get("vllm_parked_dir") or default)
        env = vllm_args.zygote_environment()
        return ZygoteLease(self._interpreter, directory, env, self._settings.launch_timeout_s)

    @cached_property
    def _background(self) -> set[asyncio.Task[None]]:
        return set()

    @property
    def _hung_after_s(self) -> float:
        """The longest silence of a healthy engine core: one step of a long prompt takes seconds on a CPU."""
        return float(self._settings.extra.get("vllm_hung_after_s", 60.0))

    def unavailable(self) -> str:
        return vllm_env.missing(self._interpreter)

    async def warm(self) -> None:
        """Begin to park. Failure is not fatal: `launch` retries, then starts unparked."""
        if self._settings.vllm_parked and not self.unavailable():
            self._run_aside(self._zygote.ensure, "vLLM is not parked yet")

    async def close(self) -> None:
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._zygote.close()

    def spec(self, command: StartInstance, place: Place) -> dict[str, Any]:
        base = super().spec(command, place)
        kept = {key: base[key] for key in ("instance_id", "launched_at", "wait_s", "system_prompt")}
        kept |= {"with_tools": WITH_TOOLS, "num_stages": command.num_stages}
        return {**kept, "argv": vllm_args.server_argv(command, place)}

    def environment(self, command: StartInstance, place: Place) -> dict[str, str]:
        return {**vllm_args.zygote_environment(), **vllm_args.server_environment(command, place)}

    async def launch(self, command: StartInstance, place: Place) -> EngineHandle:
        return await self.start(command, place)

    async def start(self, command: StartInstance, place: Place, more_argv: Sequence[str] = ()) -> EngineHandle:
        if reason := self.unavailable():
            raise EngineFailed(reason)
        is_parked = vllm_args.wants_parked(command.model, self._settings.vllm_parked)
        spec = self.spec(command, place)
        spec["argv"] += more_argv
        if not is_parked:
            return self._spawn(command, place, spec)
        env = vllm_args.server_environment(command, place)
        try:
            await self._zygote.ensure()
            rendezvous.write(place.run_dir, rendezvous.SPEC, spec)
            pid = await self._zygote.start(place.run_dir, place.log_path, env)
        except EngineFailed as error:
            _log.warning("the parked process did not start vLLM, so a fresh interpreter does: %s", error.message)
            return self._spawn(command, place, spec)
        return self._handle(command, place, pid, parked="true")

    def _handle(self, command: StartInstance, place: Place, pid: int, **data: str) -> EngineHandle:
        shares = {_SHARES: "true"} if command.model.weights_shared else {}
        stage = {STAGE: str(command.stage)} if command.num_stages > 1 else {}
        return super()._handle(command, place, pid, **data, **shares, **stage)

    async def load(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        if why := self.weights.unreadable(weights_path):
            await self.stop(handle, 0.0)
            error = EngineFailed(f"{self.name} reads {self.weights.kind}: {why}")
            error.code = WeightsUnavailable.code  # another start would fail alike
            raise error
        load = self.load_stage if is_stage(handle) else super().load
        report = await load(handle, weights_path)
        if _SHARES in handle.data:  # otherwise the load would have failed: see glowplug_vllm/cpu_weights.py
            shared_bytes = sum(path.stat().st_size for path in weights_path.glob("*.safetensors"))
            figures = replace(report.handle.figures, shared_bytes=shared_bytes)
            report = replace(report, handle=replace(report.handle, figures=figures))
        if handle.data.get("parked") and not is_stage(report.handle):
            self._run_aside(partial(self._keep_tokenizer, weights_path), "the tokenizer is not kept")
        return report

    async def health(self, handle: EngineHandle) -> Health:
        if is_later(handle) and self.adopt(handle):
            return self.health_of_later(handle, self._hung_after_s)
        return await super().health(handle)

    def health_path(self, handle: EngineHandle) -> str:
        return _CORE_PATH

    def judged(self, path: str, status: int, body: bytes) -> Health:
        try:
            answer = json.loads(body)
        except ValueError as error:
            return Health(ok=False, reason=f"{path} answers with invalid JSON: {error}")
        if status != 200:
            return Health(ok=False, reason=f"the engine core is dead: {answer.get('error', status)}")
        if (silent_s := float(answer.get("silent_s", 0.0))) > self._hung_after_s:
            return Health(ok=False, reason=f"the engine core has not answered for {silent_s:.0f} s")
        return Health(ok=True)

    async def num_in_flight(self, handle: EngineHandle) -> int:
        """Count for all at a pipeline's first stage; include a whole engine's former stages."""
        if is_later(handle):
            return 0
        return await super().num_in_flight(handle) + await self.num_in_stages(handle)

    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        await self._tell(handle, "sleep", {"becomes": becomes}, self._settings.load_timeout_s)

    async def wake(self, handle: EngineHandle, tags: Sequence[str] = ()) -> None:
        await self._tell(handle, "wake", {"tags": list(tags)} if tags else {}, self._settings.load_timeout_s)

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        return int((await self._tell(handle, "kv", None, self._settings.health_timeout_s))["used_bytes"])

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        await self._tell(handle, "kv", {"num_bytes": num_bytes}, self._settings.health_timeout_s)

    async def load_adapter(self, handle: EngineHandle, adapter: Model, weights_path: Path) -> None:
        await self.unload_adapter(handle, adapter)
        given = {"lora_name": adapter.name, "lora_path": str(weights_path)}
        await self._ask_adapter(handle, "load", given)

    async def unload_adapter(self, handle: EngineHandle, adapter: Model) -> None:
        await self._ask_adapter(handle, "unload", {"lora_name": adapter.name}, fine=404)

    async def num_of_adapter(self, handle: EngineHandle, adapter: Model) -> int:
        found = (await self._tell(handle, "requests", None, self._settings.health_timeout_s))["by_adapter"]
        return int(found.get(adapter.name, 0))

    async def _ask_adapter(self, handle: EngineHandle, verb: str, given: dict[str, str], fine: int = 200) -> None:
        path = f"/v1/{verb}_lora_adapter"
        asked = json.dumps(given).encode()
        status, text = await self._ask(handle, path, self._settings.load_timeout_s, method="POST", body=asked)
        if status not in (200, fine):
            try:
                why = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                why = text[:500].decode("utf-8", "replace")
            raise EngineFailed(f"vLLM does not {verb} the adapter {given['lora_name']}: {why} ({status})")

    async def _tell(
        self, handle: EngineHandle, what: str, message: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        method, body = ("GET", b"") if message is None else ("POST", json.dumps(message).encode())
        status, text = await self._ask(handle, f"/glowplug/{what}", timeout_s, method=method, body=body)
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise EngineFailed(f"{self.name} {handle.instance_id}: {what}: broken answer ({error})") from error
        if status != 200:
            refusal = answer.get("error")
            why = refusal.get("message") if isinstance(refusal, dict) else answer.get("detail")
            raise EngineFailed(f"{self.name} {handle.instance_id}: {what}: {why or status}")
        return answer

    async def _keep_tokenizer(self, directory: Path) -> None:
        await asyncio.sleep(_KEEP_DELAY_S)
        await self._zygote.keep_tokenizer(directory)

    def _run_aside(self, work: Callable[[], Awaitable[None]], complaint: str) -> None:
        async def watched() -> None:
            try:
                await work()
            except EngineFailed as error:
                _log.warning("%s: %s", complaint, error.message)

        task = asyncio.create_task(watched())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _failure(self, handle: EngineHandle, reason: str) -> EngineFailed:
        tail = process.log_tail(Path(handle.log_path), num_lines=200, num_bytes=65_536)
        cause = root_cause(tail)
        if cause and cause not in reason:
            reason = f"{reason}; {cause}"
        last = "\n".join(tail.splitlines()[-12:])
        error = EngineFailed(f"{self.name} {handle.instance_id}: {reason}\n{last}")
        if _NO_CONTEXT in cause or _CANNOT_SHARE in cause:
            error.code = EngineMisconfigured.code
        return error


def root_cause(log: str) -> str:
    """The first error in a failed start's log; vLLM's last lines only refer to it."""
    for line in log.splitlines():
        found = _CAUSE.search(line)
        if found and _NOT_A_CAUSE not in line and not _LOWER_LEVEL.match(line):
            return found[1].strip()
    return ""
