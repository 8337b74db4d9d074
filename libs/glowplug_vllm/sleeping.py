"""Routes by which the agent puts a vLLM server to sleep and wakes it, beside those of vLLM.

    POST /glowplug/sleep {"becomes": "prewarmed" | "swapped_out"}    -> {"seconds"}
    POST /glowplug/wake {"tags": ["weights"] | ["kv_cache"] | []}    -> {"seconds"}
    POST /glowplug/kv {"num_bytes"}, GET /glowplug/kv                -> {"total_bytes", "limit_bytes", "used_bytes"}
    GET /glowplug/sleep                                              -> {"asleep_as", "level"}
    POST /glowplug/export {"directory", "recompute_below"}           -> {"pause_s", "export_s", "requests"}: moving.py
    GET /glowplug/requests                                           -> {"num_requests", "by_adapter": {name: number}}

Each asks for the server's own key, which vLLM does only below /v1. vLLM's development mode has the like (`/sleep`,
`/wake_up`), and opens more than the agent needs: it stays off. Before its first sleep an engine continues a short
prompt, and after each wake it has to continue it in the same way.

A wake of the weights alone leaves a swapped out engine prewarmed; the one of its KV cache then makes it serve. On a GPU
a swapped out engine has dropped its weights (vLLM's level 2) where they can be loaded again from host memory
(reloading.py), else vLLM has copied them there (level 1).
"""

import asyncio
import hmac
import os
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Body, HTTPException, Request

from glowplug_vllm import kv_limit, reloading

FIRST_BYTES = "_GLOWPLUG_FIRST_BYTES"  # in the environment: of its weights, that a replica keeps until it first serves
WEIGHTS, KV_CACHE = "weights", "kv_cache"  # vLLM's tags

LATE_S = 1.0
_PROMPT_TOKENS = (1, 2, 3)  # any that are in every vocabulary
_NUM_TOKENS = 2  # the first proves the weights, the second what the first has left in the KV cache
_KEY = "VLLM_API_KEY"
_WHOLE = 1 << 62  # bytes: more than any KV cache has


class Sleeping:
    """The sleep of one engine, seen from its API server. `first_bytes`: of its weights, that it keeps while it is
    prewarmed and has not served yet; 0: all."""

    def __init__(self, client: Any, first_bytes: int = 0) -> None:
        self._client, self._first_bytes = client, first_bytes
        self._first_tokens: list[int] = []
        self.becomes = ""  # what it is asleep as
        self.level = 0  # of vLLM's sleep, while it is swapped out
        self._is_limited = False  # its KV cache has been cut down
        self._lock = asyncio.Lock()

    async def sleep(self, becomes: str) -> None:
        """End what runs; give up the KV cache, or all. Raises ValueError for another state, RuntimeError for an engine
        whose workers would do nothing, and what vLLM raises."""
        if becomes not in ("prewarmed", "swapped_out"):
            raise ValueError(f"an engine does not become {becomes!r}")
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
        """Serve nothing more. A drain counts no request before its engine is sent to sleep; one that a router sent
        while it had not learned of the drain has LATE_S to end, and what runs then is broken off."""
        try:
            await asyncio.wait_for(self._client.pause_generation(mode="wait"), LATE_S)
        except TimeoutError:
            await self._client.pause_generation(mode="abort")

    async def wake(self, tags: Sequence[str] = ()) -> None:
        """Take the weights again, the KV cache, or (no tags) both, and serve once both are there. Raises ValueError for
        other tags, and for a KV cache whose weights are away; RuntimeError when it does not answer as before its first
        sleep."""
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
        # on a GPU memory that is mapped must not be mapped again
        await self._client.wake_up(tags=[KV_CACHE] if self.becomes else None)
        await self._client.resume_generation()
        self.becomes, self._first_bytes = "", 0
        if self._is_limited:
            await self._ask_core(_WHOLE)
            self._is_limited = False
        if self._first_tokens and await self._canary() != self._first_tokens:
            raise RuntimeError("after its wake it does not answer as before its sleep")

    async def _level(self) -> int:
        """Of vLLM's sleep: 2 where every worker can load its weights again from host memory."""
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
        """The first tokens after a short prompt; none for a model that generates nothing. No log probabilities: vLLM
        compiles what counts them at their first use, which takes a quarter of a minute."""
        if "generate" not in await self._client.get_supported_tasks():
            return []
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
        prompt = {"prompt_token_ids": list(_PROMPT_TOKENS)}
        async for output in self._client.generate(prompt, params, f"canary-{time.monotonic_ns()}"):
            if output.finished:
                return [int(token) for token in output.outputs[0].token_ids]
        raise RuntimeError("it gives no token")


def _sleeps(config: Any) -> bool:
    """Whether its workers give memory back: ours on a CPU, and vLLM's own in its sleep mode on a GPU."""
    return _is_ours(config) or bool(getattr(config.model_config, "enable_sleep_mode", False))


def _is_ours(config: Any) -> bool:
    return str(config.parallel_config.worker_cls).endswith(kv_limit.WORKER)


def routes(of_server: Any, mover: Any = lambda: None) -> APIRouter:
    """The routes; `of_server()` is the Sleeping of the engine and `mover()` its Move, None while there is none."""
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
