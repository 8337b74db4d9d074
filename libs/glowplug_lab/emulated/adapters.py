"""LoRA adapters of an emulated engine: vLLM's routes to load and unload them, and what they cost in modelled time.

A load moves the adapter's bytes over the modelled link and takes `ADAPTER_LOAD_S` besides. While the engine holds any,
each step takes `STEP_S` longer, as in Punica (Chen et al. 2023, arXiv 2310.18547, abstract: "only adding 2ms latency
per token").
"""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

from glowplug.policies.start_times import ADAPTER_LOAD_S
from glowplug_lab.emulated import openai
from glowplug_lab.emulated.engine import Engine
from glowplug_lab.emulated.http import Reply, Request

STEP_S: Final = 0.002


class _LoadBody(openai.Body):
    lora_name: str
    num_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class _UnloadBody(openai.Body):
    lora_name: str


class Adapters:
    """The adapters that an engine holds, at most `num_slots`. `names`: of its model, to which theirs are added;
    `count(name)`: requests under a name that are being answered."""

    def __init__(self, engine: Engine, names: list[str], num_slots: int, count: Callable[[str], int]) -> None:
        self._engine, self._names, self._num_slots, self._count = engine, names, num_slots, count
        self._held: dict[str, None] = {}
        self._loading = asyncio.Lock()
        self.routes = {
            ("POST", "/v1/load_lora_adapter"): self._load,
            ("POST", "/v1/unload_lora_adapter"): self._unload,
            ("GET", "/admin/adapters"): self._show,
        }

    async def _load(self, request: Request, reply: Reply) -> None:
        body = openai.parse(request.body, _LoadBody)
        async with self._loading:
            if body.lora_name not in self._held:
                if len(self._held) >= self._num_slots:
                    raise openai.bad("lora_name", f"all {self._num_slots} adapter slots are taken")
                await self._engine.pass_time(body.num_bytes / self._engine.config.load_bytes_per_s + ADAPTER_LOAD_S)
                self._held[body.lora_name] = None
                self._names.append(body.lora_name)
                self._engine.adapters_s = STEP_S
        reply.send(200, b"")

    async def _unload(self, request: Request, reply: Reply) -> None:
        name = openai.parse(request.body, _UnloadBody).lora_name
        if name in self._held:
            del self._held[name]
            self._names.remove(name)
            self._engine.adapters_s = STEP_S if self._held else 0.0
        reply.send(200, b"")

    async def _show(self, request: Request, reply: Reply) -> None:
        shown: dict[str, Any] = {name: self._count(name) for name in self._held}
        reply.send(200, shown)
