"""Routes to put a vLLM server to sleep and to wake it, beside vLLM's own.

    POST /glowplug/sleep {"becomes": "prewarmed" | "swapped_out"}    -> {"seconds"}
    POST /glowplug/wake {"tags": ["weights"] | ["kv_cache"] | []}    -> {"seconds"}
    POST /glowplug/kv {"num_bytes"}, GET /glowplug/kv                -> {"total_bytes", "limit_bytes", "used_bytes"}
    GET /glowplug/sleep                                              -> {"asleep_as", "level"}
    POST /glowplug/export {"directory", "recompute_below"}           -> {"pause_s", "export_s", "requests"}: moving.py
    GET /glowplug/requests                                           -> {"num_requests", "by_adapter": {name: number}}

Each asks for the server's key, which vLLM checks only below /v1. vLLM's development mode has similar routes
(`/sleep`, `/wake_up`) but opens too much. After each wake an engine must continue a short prompt as before its first
sleep.

A wake of the weights leaves a swapped out engine prewarmed; that of the KV cache makes it serve. On a GPU a swapped
out engine has dropped its weights (vLLM's level 2) if they can be reloaded from host memory (reloading.py), else
vLLM has copied them there (level 1)."""

import asyncio
import hmac
import os
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Body, HTTPException, Request

from glowplug_vllm import kv_limit, reloading

FIRST_BYTES = "_GLOWPLUG_FIRST_BYTES"  # environment: weights of a replica until it serves
WEIGHTS, KV_CACHE = "weights", "kv_cache"

LATE_S = 1.0
_PROMPT_TOKENS = (1, 2, 3)  # in every vocabulary
_NUM_TOKENS = 2  # the second proves the KV cache
_KEY = "VLLM_API_KEY"
_WHOLE = 1 << 62  # bytes: above any KV cache


class Sleeping:
    """`first_bytes`: of the weights, kept while prewarmed and not yet serving; 0: all."""

    def __init__(self, client: Any, first_bytes: int = 0) -> None:
        self._client, self._first_bytes = client, first_bytes
        self._first_tokens: list[int] = []
        self.becomes = ""
        self.level = 0
        self._is_limited = False
        self._lock = asyncio.Lock()

    async def sleep(self, becomes: str) -> None:
        """Release the KV cache, or all. Raises ValueError for another state, RuntimeError if the workers cannot sleep,
        and vLLM's errors."""
        if becomes not in ("prewarmed", "swapped_out"):
            raise ValueError(f"an engine cannot become {becomes!r}")
        if not _sleeps(self._client.vllm_config):
            raise RuntimeError("its workers do not sleep: it runs in parallel on CPUs, or with another worker")
        async with self._lock:
            if self.becomes == becomes:
                return
            await self._end_what_runs()
            if not self._first_tokens and not self.becomes:
                await self._client.resume_generation()
                self._first_tokens = await self._canary()
                await self._end_what_runs()
            if becomes == "swapped_out":
                self.level = await self._level()
                await self._client.sleep(level=self.level, mode="abort")
            else:
                await self._release_kv()
            self.becomes = becomes

    async def _end_what_runs(self) -> None:
        """Stop serving; requests still sent before a router learned of the drain have LATE_S."""
        try:
            await asyncio.wait_for(self._client.pause_generation(mode="wait"), LATE_S)
        except TimeoutError:
            await self._client.pause_generation(mode="abort")

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """Restore weights, KV cache, or (no tags) both, and serve once both are there.

        Raises ValueError for other tags, and for a KV cache without weights; RuntimeError if the canary's answer has
        changed."""
        if wrong := set(tags) - {WEIGHTS, KV_CACHE}:
            raise ValueError(f"an engine has no {min(wrong)!r} to wake")
        async with self._lock:
            if tags and WEIGHTS not in tags and self.becomes == "swapped_out":
                raise ValueError("its weights are away: wake them first, or with its KV cache")
            if self.becomes == "swapped_out":
                await self._client.wake_up(tags=[WEIGHTS])
                if self.level == 2:
                    await self._client.collective_rpc("glowplug_reload_weights")
                self.becomes, self.level = "prewarmed", 0
            if tags and KV_CACHE not in tags:
                return
            await self._serve()

    async def _serve(self) -> None:
        # on a GPU, mapped memory must not be mapped again
        await self._client.wake_up(tags=[KV_CACHE] if self.becomes else None)
        await self._client.resume_generation()
        self.becomes, self._first_bytes = "", 0
        if self._is_limited:
            await self._ask_core(_WHOLE)
            self._is_limited = False
        if self._first_tokens and await self._canary() != self._first_tokens:
            raise RuntimeError("after waking it does not answer as before its sleep")

    async def _level(self) -> int:
        """Return 2 if every worker can reload its weights from host memory, else 1."""
        parallel = self._client.vllm_config.parallel_config
        if not str(getattr(parallel, "worker_extension_cls", "")).endswith(reloading.EXTENSION):
            return 1
        return 2 if all(await self._client.collective_rpc("glowplug_hold_weights")) else 1

    async def _release_kv(self) -> None:
        if self.becomes == "swapped_out":
            raise ValueError("it is swapped out: wake its weights")
        await self._client.release_kv_cache_memory()
        if self._first_bytes and _is_ours(self._client.vllm_config):
            await self._client.collective_rpc("keep_first", args=(self._first_bytes,))

    async def kv(self, num_bytes: int = -1) -> dict[str, int]:
        """See kv_limit.kv."""
        self._is_limited = self._is_limited or num_bytes >= 0
        return await self._ask_core(num_bytes)

    async def _ask_core(self, num_bytes: int) -> dict[str, int]:
        answer: dict[str, int] = await self._client.engine_core.call_utility_async("glowplug_kv", num_bytes)
        return answer

    async def _canary(self) -> list[int]:
        """Empty for models that do not generate. No log probabilities: vLLM compiles them at first use, a quarter of a
        minute."""
        if "generate" not in await self._client.get_supported_tasks():
            return []
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
        prompt = {"prompt_token_ids": list(_PROMPT_TOKENS)}
        async for output in self._client.generate(prompt, params, f"canary-{time.monotonic_ns()}"):
            if output.finished:
                return [int(token) for token in output.outputs[0].token_ids]
        raise RuntimeError("it generates no token")


def _sleeps(config: Any) -> bool:
    return _is_ours(config) or bool(getattr(config.model_config, "enable_sleep_mode", False))


def _is_ours(config: Any) -> bool:
    return str(config.parallel_config.worker_cls).endswith(kv_limit.WORKER)


def routes(of_server: Any, mover: Any = lambda: None) -> APIRouter:
    """`of_server()`: the Sleeping, `mover()`: its Move, or None."""
    router = APIRouter(include_in_schema=False)

    def asked(request: Request) -> Sleeping:
        key = os.environ.get(_KEY, "")
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(key.encode(), given.encode()):
            raise HTTPException(401, "only the agent of this engine may ask")
        sleeping: Sleeping | None = of_server()
        if sleeping is None:
            raise HTTPException(503, "no engine in this server")
        return sleeping

    async def timed(work: Any) -> dict[str, Any]:
        began = time.monotonic()
        try:
            answer = await work
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        except Exception as error:  # the agent reads the reason
            raise HTTPException(500, f"{type(error).__name__}: {error}") from error
        return {"seconds": round(time.monotonic() - began, 4), **(answer or {})}

    @router.post("/glowplug/sleep")
    async def sleep(request: Request, becomes: str = Body(embed=True)) -> dict[str, Any]:
        return await timed(asked(request).sleep(becomes))

    @router.get("/glowplug/sleep")
    async def state(request: Request) -> dict[str, Any]:
        sleeping = asked(request)
        return {"asleep_as": sleeping.becomes, "level": sleeping.level}

    @router.post("/glowplug/wake")
    async def wake(request: Request, tags: list[str] = Body(default=[], embed=True)) -> dict[str, Any]:
        return await timed(asked(request).wake(tags))

    @router.post("/glowplug/export")
    async def export(
        request: Request, directory: str = Body(embed=True), recompute_below: int = Body(embed=True)
    ) -> dict[str, Any]:
        asked(request)
        return await timed(mover().export(directory, recompute_below))

    @router.get("/glowplug/requests")
    async def requests(request: Request) -> dict[str, Any]:
        asked(request)
        return {"num_requests": mover().num_requests(), "by_adapter": mover().by_adapter()}

    @router.get("/glowplug/kv")
    async def kv(request: Request) -> dict[str, Any]:
        return await timed(asked(request).kv())

    @router.post("/glowplug/kv")
    async def limit(request: Request, num_bytes: int = Body(embed=True)) -> dict[str, Any]:
        return await timed(asked(request).kv(num_bytes))

    return router
