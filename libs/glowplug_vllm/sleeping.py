"""Routes by which the agent puts a vLLM server to sleep and wakes it, beside those of vLLM.

    POST /glowplug/sleep {"becomes": "prewarmed" | "swapped_out"}    -> {"seconds"}
    POST /glowplug/wake                                              -> {"seconds"}
    POST /glowplug/kv {"num_bytes"}, GET /glowplug/kv                -> {"total_bytes", "limit_bytes", "used_bytes"}

Each asks for the server's own key, which vLLM does only below /v1. vLLM's development mode has the like, and opens more
than the agent needs. Before its first sleep an engine continues a short prompt, and after each wake it has to continue
it in the same way.
"""

import asyncio
import hmac
import os
import time
from typing import Any

from fastapi import APIRouter, Body, HTTPException, Request

from glowplug_vllm import kv_limit

_PROMPT_TOKENS = (1, 2, 3)  # any that are in every vocabulary
_NUM_TOKENS = 3
_KEY = "VLLM_API_KEY"
_WHOLE = 1 << 62  # bytes: more than any KV cache has


class Sleeping:
    """The sleep of one engine, seen from its API server."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._first_tokens: list[int] = []
        self._becomes = ""  # what it is asleep as
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
            if self._becomes == becomes:
                return
            await self._client.pause_generation(mode="abort")
            if not self._first_tokens and not self._becomes:
                await self._client.resume_generation()
                self._first_tokens = await self._canary()
                await self._client.pause_generation(mode="abort")
            if becomes == "swapped_out":
                await self._client.sleep(level=1, mode="abort")
            else:
                await self._client.release_kv_cache_memory()
            self._becomes = becomes

    async def wake(self) -> None:
        """Serve again, with the whole KV cache. Raises RuntimeError when it does not answer as before its first
        sleep."""
        async with self._lock:
            await self._client.wake_up()
            await self._client.resume_generation()
            self._becomes = ""
            if self._is_limited:
                await self._ask_core(_WHOLE)
                self._is_limited = False
            if self._first_tokens and await self._canary() != self._first_tokens:
                raise RuntimeError("after its wake it does not answer as before its sleep")

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
        from vllm import SamplingParams

        if "generate" not in await self._client.get_supported_tasks():
            return []
        params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
        prompt = {"prompt_token_ids": list(_PROMPT_TOKENS)}
        async for output in self._client.generate(prompt, params, f"canary-{time.monotonic_ns()}"):
            if output.finished:
                return [int(token) for token in output.outputs[0].token_ids]
        raise RuntimeError("it gives no token")


def _sleeps(config: Any) -> bool:
    """Whether its workers give memory back: ours on a CPU, and vLLM's own in its sleep mode on a GPU."""
    is_ours = str(config.parallel_config.worker_cls).endswith(kv_limit.WORKER)
    return is_ours or bool(getattr(config.model_config, "enable_sleep_mode", False))


def routes(of_server: Any) -> APIRouter:
    """The routes; `of_server()` is the Sleeping of the engine, None while there is none."""
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
        except Exception as error:  # the agent reads the reason
            raise HTTPException(500, f"{type(error).__name__}: {error}") from error
        return {"seconds": round(time.monotonic() - began, 4), **(answer or {})}

    @router.post("/glowplug/sleep")
    async def sleep(request: Request, becomes: str = Body(embed=True)) -> dict[str, Any]:
        return await timed(asked(request).sleep(becomes))

    @router.post("/glowplug/wake")
    async def wake(request: Request) -> dict[str, Any]:
        return await timed(asked(request).wake())

    @router.get("/glowplug/kv")
    async def kv(request: Request) -> dict[str, Any]:
        return await timed(asked(request).kv())

    @router.post("/glowplug/kv")
    async def limit(request: Request, num_bytes: int = Body(embed=True)) -> dict[str, Any]:
        return await timed(asked(request).kv(num_bytes))

    return router
