"""llama.cpp as an engine: real tokens on any CPU, about a second after the process starts."""

import asyncio
import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from glowplug.domain.errors import BadRequest
from glowplug.domain.model import Model
from glowplug.engines import apis
from glowplug.engines.apis import EngineApi
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import EngineCapabilities, EngineHandle, EngineSettings, LaunchRequest

ENGINE_ARGS = frozenset({"n_threads", "n_ctx", "n_batch", "n_ubatch", "n_gpu_layers", "embeddings", "pooling"})
ENGINE_ARGS |= {"chat_template", "mmproj"}  # texts: Jinja of a template, path of a projector's file on the node
MAX_TEMPLATE_CHARS = 64 * 1024  # the longest templates published have 20,000; it travels in every row of its model
_PROBE_TIMEOUT_S = 20.0
_QUICK_S = 2.0  # how long after it was found busy an engine is asked as often as one likes
_QUIET_S = 1.3  # afterwards at most so often: see LlamacppDriver.num_in_flight


@dataclass(frozen=True, slots=True)
class _Busy:
    since: float
    asked_at: float
    count: int


class LlamacppDriver(HostedDriver):
    """Runs `llamacpp_host` (xllamacpp's server) for one model. `engine_args`: see ENGINE_ARGS."""

    name = "llamacpp"
    capabilities = EngineCapabilities(embeddings=True, cancels_unstreamed=False, overhead_bytes=2 << 30)
    module = "glowplug.engines.llamacpp_host"
    in_flight_samples = ("llamacpp:requests_processing", "llamacpp:requests_deferred")

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
        )

    def __init__(self, settings: EngineSettings | None = None) -> None:
        super().__init__(settings)
        self._busy: dict[int, _Busy] = {}  # by pid

    async def num_in_flight(self, handle: EngineHandle) -> int:
        """llama.cpp looks for clients that left when its result queue has been silent for a second, and each answer
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

    def environment(self, request: LaunchRequest) -> dict[str, str]:
        """Threads that wait give their core away: spinning, as libgomp does by default, engines that share cores bring
        each other to a standstill."""
        wait = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        return super().environment(request) | wait

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

    def spec(self, request: LaunchRequest) -> dict[str, Any]:
        if unknown := sorted(set(request.model.engine_args) - ENGINE_ARGS):
            raise BadRequest(f"engine_args.{unknown[0]} is not known to llamacpp", param=f"engine_args.{unknown[0]}")
        for name in ("chat_template", "mmproj"):
            _check_text(name, request.model.engine_args.get(name, " "))
        return super().spec(request)


def _check_text(name: str, value: Any) -> None:
    """Raises BadRequest for what is no template and no path."""
    param = f"engine_args.{name}"
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{param}: a text is expected", param=param)
    if name == "chat_template" and value != " " and "{%" not in value and "{{" not in value:
        raise BadRequest(f"{param}: the text of a Jinja template is expected, not the name of one", param=param)
    if len(value) > MAX_TEMPLATE_CHARS:
        raise BadRequest(f"{param}: {len(value)} characters are more than {MAX_TEMPLATE_CHARS}", param=param)
