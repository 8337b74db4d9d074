"""llama.cpp as an engine: real tokens on any CPU, about a second after the process starts."""

import asyncio
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineFailed, WeightsUnavailable
from glowplug.domain.model import Model
from glowplug.engines import apis, llamacpp_args, probe, process
from glowplug.engines.apis import EngineApi
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import Ability, EngineCapabilities, EngineHandle, EngineSettings

_PROBE_TIMEOUT_S = 20.0
_QUICK_S = 2.0  # how long after it was found busy an engine is asked as often as one likes
_NOT_LOADED = re.compile(r"error loading model: (.+)")
_MAY_PASS = re.compile(r"alloc|memory|mmap|open|read error", re.IGNORECASE)  # of the machine, and not of the weights
_QUIET_S = 1.3  # afterwards at most so often: see LlamacppDriver.num_in_flight


@dataclass(frozen=True, slots=True)
class _Busy:
    since: float
    asked_at: float
    count: int


class LlamacppDriver(HostedDriver):
    """Runs `llamacpp_host` (xllamacpp's server) for one model. `engine_args`: see llamacpp_args.py."""

    name = "llamacpp"
    arguments = llamacpp_args.ARGUMENTS
    weights = llamacpp_args.WEIGHTS
    capabilities = EngineCapabilities(
        parked=True, cancels_unstreamed=False, overhead_bytes=2 << 30, asleep_bytes=512 << 20
    )
    module = "glowplug.engines.llamacpp_host"
    in_flight_samples = ("llamacpp:requests_processing", "llamacpp:requests_deferred")

    @property
    def is_parked(self) -> bool:
        return self._settings.llamacpp_parked and sys.platform == "linux"

    def abilities(self, gpu_kind: str) -> frozenset[Ability]:
        """On host memory it sleeps by pages (llamacpp_sleep.py), and its weights are those of the file it maps, which
        may still fill (llamacpp_host.py). On a GPU its server is dropped and built again, which leaves nothing there
        that could be prewarmed or shared, and weights are copied when it is built."""
        if gpu_kind == "host":
            return frozenset({Ability.PREWARM, Ability.SWAP, Ability.STREAM, Ability.SHARE})
        return frozenset({Ability.SWAP})

    @staticmethod
    def api(model: Model) -> EngineApi:
        args = model.engine_args
        lacks = {}
        if not args.get("embeddings"):
            lacks[apis.EMBEDDINGS] = "does not make embeddings: engine_args.embeddings is not set"
        if not (args.get("embeddings") and str(args.get("pooling", "")).lower() == "rank"):
            lacks[apis.RERANK] = (
                "does not rank: it takes a reranker's weights, engine_args.embeddings and pooling: rank"
            )
        # llama.cpp reads a tool choice that is an object as "auto".
        return EngineApi(
            lacks=lacks,
            functions_only=True,
            text_only=not args.get("mmproj"),
            tool_choices=frozenset((apis.REQUIRED,)),
            continues=frozenset((apis.CHAT, apis.COMPLETIONS, apis.MESSAGES, apis.RESPONSES)),
            prefills=True,
            mixed_prompts=True,
        )

    def __init__(self, settings: EngineSettings | None = None) -> None:
        super().__init__(settings)
        self._busy: dict[int, _Busy] = {}  # by pid

    async def num_in_flight(self, handle: EngineHandle) -> int:
        """llama.cpp looks for clients that left when its result queue has been empty for a second, and each answer
        of /metrics passes through that queue: asked too often, it would never drop an unstreamed request. So an
        engine that stays busy is left in peace between questions, and the last count, above 0, stands meanwhile."""
        now_s, last = asyncio.get_running_loop().time(), self._busy.get(handle.pid)
        is_fresh = last is not None and now_s - last.asked_at < _QUIET_S
        if last and is_fresh and now_s - last.since > _QUICK_S and self.adopt(handle):
            return last.count
        count = await super().num_in_flight(handle)
        if count:
            self._busy[handle.pid] = _Busy(last.since if last else now_s, now_s, count)
        else:
            self._busy.pop(handle.pid, None)
        return count

    async def stop(self, handle: EngineHandle, grace_s: float) -> None:
        self._busy.pop(handle.pid, None)
        await super().stop(handle, grace_s)

    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        await self._control(handle, {"do": "sleep", "becomes": becomes})

    async def sleep_if_idle(self, handle: EngineHandle, becomes: str) -> int:
        answer = await self._control(handle, {"do": "sleep", "becomes": becomes, "if_idle": True})
        return int(answer["running"])

    async def wake(self, handle: EngineHandle) -> None:
        await self._control(handle, {"do": "wake"})

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        """llama.cpp does not say."""
        return -1

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        raise EngineFailed("llama.cpp keeps the KV cache that it was started with")

    async def _control(self, handle: EngineHandle, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return await probe.ask_control(Path(handle.run_dir), question, self._settings.load_timeout_s)
        except (OSError, TimeoutError, RuntimeError, ValueError) as error:
            raise EngineFailed(f"{self.name} {handle.instance_id}: {question['do']}: {error!r}") from error

    def standing_environment(self) -> dict[str, str]:
        """Threads that wait give their core away: spinning, as libgomp does by default, engines that share cores bring
        each other to a standstill."""
        wait = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        return super().standing_environment() | wait

    def unavailable(self) -> str:
        return super().unavailable() or self._missing_library

    @cached_property
    def _missing_library(self) -> str:
        missing = "the package xllamacpp is not installed (pip install 'glowplug[llamacpp]')"
        if not self._settings.python:
            return "" if find_spec("xllamacpp") else missing
        probe = [self._python, "-c", "import glowplug.engines.llamacpp_host, xllamacpp"]
        try:
            asked = subprocess.run(probe, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{self._python} does not answer: {error}"
        return "" if asked.returncode == 0 else f"{missing} in {self._python}"

    def _failure(self, handle: EngineHandle, reason: str) -> EngineFailed:
        """llama.cpp says in its log alone why it does not load a model."""
        tail = process.log_tail(Path(handle.log_path), num_lines=200, num_bytes=65_536)
        found = _NOT_LOADED.search(tail)
        if found is None or _MAY_PASS.search(found[1]):
            return super()._failure(handle, reason)
        error = EngineFailed(f"llama.cpp does not load these weights: {found[1].strip()}")
        error.code = WeightsUnavailable.code  # another start would read the same bytes
        return error
