"""llama.cpp as an engine: real tokens on any CPU, about a second after the process starts."""

import subprocess
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from glowplug.domain.errors import BadRequest
from glowplug.domain.model import Model
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import EngineCapabilities, LaunchRequest

ENGINE_ARGS = frozenset({"n_threads", "n_ctx", "n_batch", "n_ubatch", "n_gpu_layers", "embeddings", "pooling"})
_PROBE_TIMEOUT_S = 20.0


class LlamacppDriver(HostedDriver):
    """Runs `llamacpp_host` (xllamacpp's server) for one model. `engine_args`: see ENGINE_ARGS."""

    name = "llamacpp"
    capabilities = EngineCapabilities(embeddings=True, cancels_unstreamed=False)
    module = "glowplug.engines.llamacpp_host"
    in_flight_samples = ("llamacpp:requests_processing", "llamacpp:requests_deferred")

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

    def host_footprint(self, model: Model) -> int:
        return 160 << 20  # interpreter, library and compute buffers of a small model, measured

    def spec(self, request: LaunchRequest) -> dict[str, Any]:
        if unknown := sorted(set(request.model.engine_args) - ENGINE_ARGS):
            raise BadRequest(f"engine_args.{unknown[0]} is not known to llamacpp", param=f"engine_args.{unknown[0]}")
        return super().spec(request)
