"""The routes of a stage: what its agent asks of it, and what a pipeline's first stage asks of the later ones. All of
them ask for the engine's key.

    POST /stage/join         agent to the first stage: {"stages": [{"url", "api_key"}, ...]}, the later ones in order
    POST /stage/consolidate  agent: {"kv_bytes", "max_running"}; answers when it runs all of the model
    POST /stage/abandon      agent: give that up
    POST /stage/attach       first stage: {"instance_id", "stage", "num_stages"}
    POST /stage/step         first stage: activations of a step's tokens; its numbers stand in the query
    GET  /stage/kv           first stage: keys and values of so many `tokens`
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from glowplug_lab.emulated import openai
from glowplug_lab.emulated.batch import BLOCK_TOKENS
from glowplug_lab.emulated.consolidation import Consolidation
from glowplug_lab.emulated.engine import Engine, Whole
from glowplug_lab.emulated.http import Reply, Request
from glowplug_lab.emulated.openai import ApiError
from glowplug_lab.emulated.stages import KV_CHUNK_BYTES, Pipeline, StageLink, StageLost, StepPart

Route = Callable[[Request, Reply], Awaitable[None]]


class _Stage(msgspec.Struct):
    url: str
    api_key: str


class _Join(msgspec.Struct):
    stages: list[_Stage] = []


class StageApi:
    """`routes` by method and path."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._consolidation = Consolidation(engine)
        self.routes: dict[tuple[str, str], Route] = {
            ("POST", "/stage/join"): self._join,
            ("POST", "/stage/consolidate"): self._consolidate,
            ("POST", "/stage/abandon"): self._abandon,
            ("POST", "/stage/attach"): self._attach,
            ("POST", "/stage/step"): self._step,
            ("GET", "/stage/kv"): self._kv,
        }

    async def _join(self, request: Request, reply: Reply) -> None:
        engine, config = self._engine, self._engine.config
        given = openai.parse(request.body, _Join).stages
        if config.stage or len(given) != config.num_stages - 1:
            raise openai.bad("stages", f"the {config.num_stages - 1} later stages of stage {config.stage} are expected")
        links = [StageLink(one.url, one.api_key, config.stage_timeout_s) for one in given]
        pipeline = Pipeline(links, config.profile.activation_bytes, config.hop_s / config.time_scale)
        try:
            kv_tokens = await pipeline.attach(self._name)
        except StageLost as error:
            pipeline.close()
            raise ApiError(502, str(error), type="server_error", code="stage_lost") from error
        engine.join(pipeline, kv_tokens)
        reply.send(200, {"kv_tokens": engine.batch.num_blocks * BLOCK_TOKENS, "num_slots": config.max_running})

    async def _consolidate(self, request: Request, reply: Reply) -> None:
        await self._consolidation.run(openai.parse(request.body, Whole))
        reply.send(200, {"kv_tokens": self._consolidation.kv_tokens})

    async def _abandon(self, request: Request, reply: Reply) -> None:
        is_whole = await self._consolidation.abandon()
        reply.send(200, {"is_whole": is_whole, "kv_tokens": self._consolidation.kv_tokens if is_whole else 0})

    async def _attach(self, request: Request, reply: Reply) -> None:
        body, config = openai.parse(request.body, dict[str, Any]), self._engine.config
        asked = body.get("stage"), body.get("num_stages")
        if asked != (config.stage, config.num_stages) or not config.stage:
            message = f"this is stage {config.stage} of {config.num_stages}, not {asked[0]} of {asked[1]}"
            raise ApiError(409, message, code="another_stage")
        reply.send(200, {"kv_tokens": config.num_blocks * BLOCK_TOKENS})

    async def _step(self, request: Request, reply: Reply) -> None:
        try:
            part = StepPart.read(request.query)
        except ValueError as error:
            raise openai.bad("step", str(error)) from error
        await self._engine.carry(part)
        reply.send(200, request.body)

    async def _kv(self, request: Request, reply: Reply) -> None:
        given = request.query.get("tokens", [""])[-1]
        num_bytes = int(given) * self._engine.carried.bytes_per_token if given.isdecimal() else -1
        if not 0 <= num_bytes <= max(KV_CHUNK_BYTES, self._engine.carried.bytes_per_token):
            raise openai.bad("tokens", f"a number of tokens that have {KV_CHUNK_BYTES} bytes at most is expected")
        reply.send(200, bytes(num_bytes), "application/octet-stream")
