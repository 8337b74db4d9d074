"""llama.cpp as an engine: real tokens on any CPU, about a second after the process starts."""

import asyncio
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineFailed, EngineMisconfigured, WeightsUnavailable
from glowplug.domain.model import Model
from glowplug.engines import apis, llamacpp_args, openmp, probe, process
from glowplug.engines.apis import EngineApi
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import Ability, EngineCapabilities, EngineHandle, EngineSettings

_QUICK_S = 2.0  # an engine busy for less may be asked at any rate
_NOT_LOADED = re.compile(r"error loading model: (.+)")
_TEMPLATE = re.compile(r"chat template parsing error: (?:.*\nError: )?([^\n]+)", re.DOTALL)
_MAY_PASS = re.compile(r"alloc|memory|mmap|open|read error", re.IGNORECASE)  # the machine's fault, not the weights'
_QUIET_S = 1.3  # after that, the least time between questions: see LlamacppDriver.num_in_flight


@dataclass(slots=True)
class _Busy:
    since: float
    asked_at: float
    count: int
    by_adapter: dict[int, int] | None = None


# Request fields known to the router that llama.cpp's server accepts and ignores.
IGNORES: dict[str, Any] = {
    "echo": False,
    "best_of": None,
    "suffix": "",
    "min_tokens": 0,
    "stop_token_ids": [],
    "repetition_penalty": 1,
    "skip_special_tokens": True,
    "dimensions": None,
    "prompt_logprobs": 0,
    "guided_grammar": "",
    "guided_regex": "",
    "guided_json": None,
    "guided_choice": None,
    "structured_outputs": None,
    "verbosity": "medium",
    "return_documents": False,
    "max_tokens_per_doc": None,
    "truncate_prompt_tokens": None,
}


class LlamacppDriver(HostedDriver):
    """`engine_args`: see llamacpp_args.py."""

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
        """Engines on host memory sleep by pages (llamacpp_sleep.py) and map their weights. On a GPU the server is
        rebuilt: nothing to prewarm or share."""
        adapters = {Ability.ADAPTERS} if sys.platform == "linux" else frozenset()  # the library is an ELF file there
        if gpu_kind == "host":
            return frozenset({Ability.PREWARM, Ability.SWAP, Ability.STREAM, Ability.SHARE, *adapters})
        return frozenset({Ability.SWAP, *adapters})

    @staticmethod
    def api(model: Model) -> EngineApi:
        args = model.engine_args
        lacks = {}
        ranks = str(args.get("pooling", "")).lower() == "rank"
        if not args.get("embeddings"):
            lacks[apis.EMBEDDINGS] = "does not make embeddings: engine_args.embeddings is not set"
        elif ranks:  # the bytes behind its one score
            lacks[apis.EMBEDDINGS] = "does not make embeddings: engine_args.pooling is rank"
        if not (args.get("embeddings") and ranks):
            lacks[apis.RERANK] = (
                "does not rank: it takes a reranker's weights, engine_args.embeddings and pooling: rank"
            )
        # llama.cpp ignores the tool choice; the router turns its answer into a call.
        return EngineApi(
            lacks=lacks,
            also=frozenset((apis.TOKENIZE, apis.DETOKENIZE)),
            reads={apis.TOKENIZE: "content", apis.DETOKENIZE: "tokens"},
            ignores=IGNORES,
            text_only=not args.get("mmproj"),
            tool_choices=frozenset(),
            continues=frozenset((apis.CHAT, apis.COMPLETIONS, apis.MESSAGES)),
            prefills=True,
            thinks_by_template=True,
            mixed_prompts=True,
            translated=frozenset(p.encode() for p in (apis.CHAT, apis.COMPLETIONS, apis.MESSAGES)),
            ignores_formats=True,
            names_adapter={"lora": [{"id": 0, "scale": apis.adapter_number(model.key) if model.base else 0}]},
        )

    def __init__(self, settings: EngineSettings | None = None) -> None:
        super().__init__(settings)
        self._busy: dict[int, _Busy] = {}  # by pid

    async def num_in_flight(self, handle: EngineHandle) -> int:
        """llama.cpp drops departed clients only after a second without traffic in its result queue, which each
        answer of /metrics uses. So a busy engine is asked rarely, and its last count holds meanwhile."""
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

    async def num_of_adapter(self, handle: EngineHandle, adapter: Model) -> int:
        """Count its slots, plus all waiting requests: llama.cpp does not say whose those are."""
        if not await self.num_in_flight(handle):
            return 0
        busy = self._busy[handle.pid]
        if busy.by_adapter is None:
            status, body = await self._ask(handle, "/slots", self._settings.health_timeout_s)
            if status != 200:
                raise EngineFailed(f"{self.name} {handle.instance_id}: /slots says {status}")
            busy.by_adapter = _by_adapter(json.loads(body))
        waiting = max(0, busy.count - sum(busy.by_adapter.values()))
        return busy.by_adapter.get(apis.adapter_number(adapter.key), 0) + waiting

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

    async def load_adapter(self, handle: EngineHandle, adapter: Model, weights_path: Path) -> None:
        question = {"do": "load_adapter", "number": apis.adapter_number(adapter.key), "path": str(weights_path)}
        await self._control(handle, question)

    async def unload_adapter(self, handle: EngineHandle, adapter: Model) -> None:
        await self._control(handle, {"do": "unload_adapter", "number": apis.adapter_number(adapter.key)})

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        return -1

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        raise EngineFailed("llama.cpp keeps the KV cache that it was started with")

    async def _control(self, handle: EngineHandle, question: dict[str, Any]) -> dict[str, Any]:
        try:
            return await probe.ask_control(Path(handle.run_dir), question, self._settings.load_timeout_s)
        except (OSError, TimeoutError, RuntimeError, ValueError) as error:
            raise EngineFailed(f"{self.name} {handle.instance_id}: {question['do']}: {error!r}") from error

    def standing_environment(self) -> dict[str, str]:
        return super().standing_environment() | openmp.environment(os.environ)

    def unavailable(self) -> str:
        found = find_spec("xllamacpp")
        return "" if found else "the package xllamacpp is not installed (pip install 'glowplug[llamacpp]')"

    def _failure(self, handle: EngineHandle, reason: str) -> EngineFailed:
        """Read the reason from the log: llama.cpp gives it nowhere else."""
        tail = process.log_tail(Path(handle.log_path), num_lines=200, num_bytes=65_536)
        if broken := _TEMPLATE.search(tail):
            error = EngineFailed(f"llama.cpp does not render this model's chat template: {broken[1].strip()}")
            error.code = EngineMisconfigured.code
            return error
        found = _NOT_LOADED.search(tail)
        if found is None or _MAY_PASS.search(found[1]):
            return super()._failure(handle, reason)
        error = EngineFailed(f"llama.cpp does not load these weights: {found[1].strip()}")
        error.code = WeightsUnavailable.code  # another start would fail alike
        return error


def _by_adapter(slots: list[dict[str, Any]]) -> dict[int, int]:
    """Busy slots by adapter number, 0 for the base (llamacpp_lora.py)."""
    scales = (one["params"].get("lora") or [{"scale": 0}] for one in slots if one["is_processing"])
    return Counter(round(lora[0]["scale"]) for lora in scales)
