"""Routes of one engine: vLLM's HTTP subset, pipeline stages, fault injection."""

import asyncio
import base64
import hmac
import json
import struct
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from itertools import islice
from typing import Annotated, Any, Final, TypeVar

import msgspec

from glowplug.engines.listener import REFUSED
from glowplug.fleet.start_times import ADAPTER_LOAD_S
from glowplug_lab.emulated import openai
from glowplug_lab.emulated.engine import BLOCK_TOKENS, Engine, Whole
from glowplug_lab.emulated.faults import FAILURES, Faults, as_json, changed
from glowplug_lab.emulated.http import HttpRequest, Reply
from glowplug_lab.emulated.openai import ApiError, Generate
from glowplug_lab.emulated.stages import KV_CHUNK_BYTES, Pipeline, StageLink, StageLost, StepPart, ended
from glowplug_lab.emulated.text import answer_tokens, count_tokens, embedding, natural_length, num_begun, token_ids
from glowplug_lab.simulator.hardware.batching import Sequence

# LoRA adapters: a load takes `ADAPTER_LOAD_S` more than its bytes. While any is held, a step takes `STEP_S` longer, as
# in Punica (Chen et al. 2023, arXiv 2310.18547, abstract: "only adding 2ms latency per token").

STEP_S: Final = 0.002


class _LoadBody(openai.Body):
    lora_name: str
    num_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class _UnloadBody(openai.Body):
    lora_name: str


class Adapters:
    """`count(name)`: requests in flight."""

    def __init__(self, engine: Engine, names: list[str], num_slots: int, count: Callable[[str], int]) -> None:
        self._engine, self._names, self._num_slots, self._count = engine, names, num_slots, count
        self._held: dict[str, None] = {}
        self._loading = asyncio.Lock()
        self.routes = {
            ("POST", "/v1/load_lora_adapter"): self._load,
            ("POST", "/v1/unload_lora_adapter"): self._unload,
            ("GET", "/admin/adapters"): self._show,
        }

    async def _load(self, request: HttpRequest, reply: Reply) -> None:
        body = openai.parse(request.body, _LoadBody)
        async with self._loading:
            if body.lora_name not in self._held:
                if len(self._held) >= self._num_slots:
                    raise openai.bad("lora_name", f"all {self._num_slots} adapter slots are taken")
                await self._engine.pass_time(body.num_bytes / self._engine.config.load_bytes_per_s + ADAPTER_LOAD_S)
                self._held[body.lora_name] = None
                self._names.append(body.lora_name)
                self._engine.lengthen_steps(STEP_S)
        reply.send(200, b"")

    async def _unload(self, request: HttpRequest, reply: Reply) -> None:
        name = openai.parse(request.body, _UnloadBody).lora_name
        if name in self._held:
            del self._held[name]
            self._names.remove(name)
            self._engine.lengthen_steps(STEP_S if self._held else 0.0)
        reply.send(200, b"")

    async def _show(self, request: HttpRequest, reply: Reply) -> None:
        shown: dict[str, Any] = {name: self._count(name) for name in self._held}
        reply.send(200, shown)


class Answer:
    """`abort` ends the answer early with the finish reason "abort"."""

    def __init__(self, engine: Engine, wanted: Generate, answer_id: str, chat: bool) -> None:
        self._engine = engine
        self._wanted, self.model = wanted, wanted.model
        self._chat = chat
        body = wanted.body
        seed, is_echo = body.seed or engine.config.seed, engine.faults.mode == "echo"
        num_there = num_begun(wanted.prompt, seed, wanted.begun, is_echo) if wanted.begun else 0
        prompt = wanted.prompt if num_there else wanted.prompt + wanted.begun
        self._words = islice(answer_tokens(prompt, seed, is_echo), num_there, None)
        self._due: asyncio.Queue[bool | None] = asyncio.Queue()  # per token: is it the last; None: aborted
        self._num_tokens = 0
        self._reason = "stop"
        num_free = engine.config.context_tokens - wanted.num_prompt
        natural = max(natural_length(prompt, seed) - num_there, body.min_tokens or 0, 1)
        limit = min(body.num_wanted or num_free, num_free)
        self._length = limit if body.ignore_eos else min(natural, limit)
        self._end_reason = "length" if self._length >= limit else "stop"
        kind = "chat.completion" if chat else "text_completion"
        self._head = {
            "id": answer_id,
            "object": f"{kind}.chunk" if chat and body.stream else kind,
            "created": int(time.time()),
            "model": wanted.model,
            "system_fingerprint": openai.FINGERPRINT,
        }

    async def whole(self, reply: Reply) -> None:
        async with aclosing(self._pieces()) as pieces:
            text = "".join([piece async for piece in pieces])
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        reply.send(200, {**self._head, "choices": [choice], "usage": self._usage()})

    async def stream(self, reply: Reply) -> None:
        async with aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                if not reply.started:
                    reply.start("text/event-stream; charset=utf-8")
                    if self._chat:
                        await reply.chunk(self._event({"role": "assistant", "content": ""}, None))
                if piece:
                    await reply.chunk(self._event({"content": piece} if self._chat else piece, None))
        await reply.chunk(self._event({} if self._chat else "", self._reason))
        if self._wanted.body.includes_usage:
            last = {**self._head, "choices": [], "usage": self._usage()}
            await reply.chunk(f"data: {json.dumps(last)}\n\n".encode())
        await reply.chunk(b"data: [DONE]\n\n")
        reply.end()

    def abort(self) -> None:
        self._due.put_nowait(None)

    async def _pieces(self) -> AsyncGenerator[str, None]:
        self._reason = "abort"
        stream = self._engine.submit(self._wanted.num_prompt, self._length, self._due.put_nowait)
        cutter = StopCutter(self._wanted.body.stops)
        try:
            last: bool | None = False
            while last is False and not cutter.found:
                last = await self._due.get()
                if last is not None:
                    self._num_tokens += 1
                    yield cutter.feed(next(self._words))
            yield cutter.rest()
            if last is not None:
                self._reason = "stop" if cutter.found else self._end_reason
        finally:
            self._engine.finish(stream, self._reason)

    def _event(self, delta: dict[str, str] | str, reason: str | None) -> bytes:
        choice = {"index": 0, "delta" if self._chat else "text": delta, "logprobs": None, "finish_reason": reason}
        return f"data: {json.dumps({**self._head, 'choices': [choice]})}\n\n".encode()

    def _usage(self) -> dict[str, int]:
        prompt, answer = self._wanted.num_prompt, self._num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


class StopCutter:
    """Holds back a possible beginning of a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        if not self._stops:
            return text
        self._held += text
        starts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if starts:
            self.found = True
            shown, self._held = self._held[: min(starts)], ""
            return shown
        keep = max(self._overlap(stop) for stop in self._stops)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def rest(self) -> str:
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        return next((n for n in range(min(len(stop), len(self._held)), 0, -1) if self._held.endswith(stop[:n])), 0)


# A stage takes over the whole model while serving (HydraServe section 6): first the other weights, then the KV cache in
# rounds for the tokens made meanwhile; only the last, small round holds up a step.

MAX_ROUNDS = 4
FEW_TOKENS = 32  # left for the last round


class Consolidation:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None

    @property
    def kv_tokens(self) -> int:
        return self._engine.config.kv_tokens

    async def run(self, whole: Whole) -> None:
        if self._engine.config.num_stages == 1:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._become(whole))
        await asyncio.shield(self._task)

    async def abandon(self) -> bool:
        """Return whether the model was whole already."""
        if self._task is not None and not self._task.done():
            await ended(self._task)
        if self._engine.config.num_stages > 1:
            self._engine.whole = None
        return self._engine.config.num_stages == 1

    async def _become(self, whole: Whole) -> None:
        engine = self._engine
        rest_bytes = engine.config.weights_bytes - engine.config.part_bytes
        await engine.pass_time(rest_bytes / engine.config.load_bytes_per_s)
        engine.whole = whole
        print("the rest of the weights is loaded", flush=True)
        try:
            await self._take_kv()
        except StageLost as error:
            print(f"a part of the KV cache is computed again: {error}", flush=True)
            async with engine.stepping:
                if engine.config.num_stages > 1:  # else a step found the same, and went on alone
                    engine.be_whole(recompute=True)

    async def _take_kv(self) -> None:
        """The last round is between two steps. Raises StageLost."""
        engine, taken = self._engine, dict[Sequence, int]()
        for _ in range(MAX_ROUNDS):
            if (pipeline := engine.pipeline) is None or _missing(engine, taken) <= FEW_TOKENS:
                break
            await self._round(pipeline, taken)
        async with engine.stepping:
            if engine.pipeline is not None:
                await self._round(engine.pipeline, taken)
            if engine.config.num_stages > 1:
                engine.be_whole(recompute=False)

    async def _round(self, pipeline: Pipeline, taken: dict[Sequence, int]) -> None:
        engine = self._engine
        now = engine.batch.kv_tokens_read()
        await pipeline.take_kv(_missing(engine, taken), engine.config.kv_bytes_per_token)
        taken.clear()
        taken.update(now)


def _missing(engine: Engine, taken: dict[Sequence, int]) -> int:
    return sum(max(0, num - taken.get(one, 0)) for one, num in engine.batch.kv_tokens_read().items())


# The routes of a stage, all guarded by the engine's key:
#
#     POST /stage/join         agent to the first stage: {"stages": [{"url", "api_key"}, ...]}, the later ones in order
#     POST /stage/consolidate  agent: {"kv_bytes", "max_running"}; answers when it runs the whole model
#     POST /stage/abandon      agent: give that up
#     POST /stage/attach       first stage: {"instance_id", "stage", "num_stages"}
#     POST /stage/step         first stage: activations of a step's tokens; its numbers in the query
#     GET  /stage/kv           first stage: keys and values of so many `tokens`

Route = Callable[[HttpRequest, Reply], Awaitable[None]]


class _Stage(msgspec.Struct):
    url: str
    api_key: str


class _Join(msgspec.Struct):
    stages: list[_Stage] = []


class StageApi:
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

    async def _join(self, request: HttpRequest, reply: Reply) -> None:
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
        reply.send(200, {"kv_tokens": engine.batch.limits.kv_tokens, "num_slots": config.max_running})

    async def _consolidate(self, request: HttpRequest, reply: Reply) -> None:
        await self._consolidation.run(openai.parse(request.body, Whole))
        reply.send(200, {"kv_tokens": self._consolidation.kv_tokens})

    async def _abandon(self, request: HttpRequest, reply: Reply) -> None:
        is_whole = await self._consolidation.abandon()
        reply.send(200, {"is_whole": is_whole, "kv_tokens": self._consolidation.kv_tokens if is_whole else 0})

    async def _attach(self, request: HttpRequest, reply: Reply) -> None:
        body, config = openai.parse(request.body, dict[str, Any]), self._engine.config
        asked = body.get("stage"), body.get("num_stages")
        if asked != (config.stage, config.num_stages) or not config.stage:
            message = f"this is stage {config.stage} of {config.num_stages}, not {asked[0]} of {asked[1]}"
            raise ApiError(409, message, code="another_stage")
        reply.send(200, {"kv_tokens": config.kv_tokens})

    async def _step(self, request: HttpRequest, reply: Reply) -> None:
        try:
            part = StepPart.read(request.query)
        except ValueError as error:
            raise openai.bad("step", str(error)) from error
        await self._engine.carry(part)
        reply.send(200, request.body)

    async def _kv(self, request: HttpRequest, reply: Reply) -> None:
        given = request.query.get("tokens", [""])[-1]
        num_bytes = int(given) * self._engine.carried.bytes_per_token if given.isdecimal() else -1
        if not 0 <= num_bytes <= max(KV_CHUNK_BYTES, self._engine.carried.bytes_per_token):
            raise openai.bad("tokens", f"a number of tokens that have {KV_CHUNK_BYTES} bytes at most is expected")
        reply.send(200, bytes(num_bytes), "application/octet-stream")


EMBEDDING_DIMENSIONS = 64
_GUARDED = ("/v1/", "/stage/")  # vLLM guards /v1/ alone


BodyT = TypeVar("BodyT", bound=openai.Body)


class _KvBody(msgspec.Struct):
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Api:
    """`names`: the model's own name first."""

    def __init__(
        self, engine: Engine, names: list[str], system_prompt: str = "", api_key: str = "", adapter_slots: int = 0
    ) -> None:
        self._engine = engine
        self._context_tokens = engine.config.context_tokens
        self._names = names
        self._system_prompt = system_prompt
        self._expected = f"Bearer {api_key}".encode() if api_key else b""
        self._created = int(time.time())
        self._answers: set[Answer] = set()
        self._states: dict[str, Callable[[], dict[str, Any]]] = {
            "/v1/models": self._models,
            "/admin/config": lambda: as_json(engine.faults),
            "/admin/kv": self._kv,
            "/is_paused": lambda: {"is_paused": engine.frozen},
        }
        self._routes = {
            **{("GET", path): self._show for path in self._states},
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completion,
            ("POST", "/v1/embeddings"): self._embeddings,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/admin/config"): self._change_faults,
            ("POST", "/admin/kv"): self._limit_kv,
            ("POST", "/sleep"): self._sleep,
            ("POST", "/wake_up"): self._wake_up,
            ("POST", "/pause"): self._pause,
            ("POST", "/resume"): self._resume,
            **StageApi(engine, names[0]).routes,
            **Adapters(engine, names, adapter_slots, self._num_under).routes,
        }

    async def __call__(self, request: HttpRequest, reply: Reply) -> None:
        if request_id := request.headers.get("x-request-id"):
            reply.headers["x-request-id"] = request_id
        route = self._routes.get((request.method, request.path))
        try:
            if request.path.startswith(_GUARDED) and not self._may(request):
                raise ApiError(401, "Unauthorized", code="invalid_api_key")
            if route is None:
                known = any(path == request.path for _, path in self._routes)
                raise ApiError(405 if known else 404, f"{request.method} {request.path} is not served here")
            await route(request, reply)
        except ApiError as error:
            reply.send(error.status, error.body)

    def _num_under(self, name: str) -> int:
        return sum(answer.model == name for answer in self._answers)

    def _may(self, request: HttpRequest) -> bool:
        given = request.headers.get("authorization", "").encode()
        return not self._expected or hmac.compare_digest(given, self._expected)

    # -- the engine itself ------------------------------------------------------------------------------------------

    async def _health(self, request: HttpRequest, reply: Reply) -> None:
        faults = self._engine.faults
        if faults.hang_health:
            await asyncio.Event().wait()
        if faults.health_delay_s:
            await self._engine.pass_time(faults.health_delay_s)
        reply.send(503 if faults.unhealthy else 200, b"")

    async def _show(self, request: HttpRequest, reply: Reply) -> None:
        reply.send(200, self._states[request.path]())

    def _models(self) -> dict[str, Any]:
        card = {
            "object": "model",
            "created": self._created,
            "owned_by": "glowplug-emulated",
            "root": self._names[0],
            "max_model_len": self._context_tokens,
            "emulated": True,
        }
        return {"object": "list", "data": [{"id": name, **card} for name in self._names]}

    async def _metrics(self, request: HttpRequest, reply: Reply) -> None:
        name = self._names[0].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = f'model_name="{name}",engine="0",emulated="true"'
        reply.send(200, self._engine.metrics_text(labels), "text/plain; version=0.0.4; charset=utf-8")

    # -- text -------------------------------------------------------------------------------------------------------

    async def _chat(self, request: HttpRequest, reply: Reply) -> None:
        body, model = self._admitted(request, reply, openai.ChatBody)
        messages, begun = openai.begun_chat(body)
        prompt = openai.chat_prompt(messages, self._system_prompt)
        num_prompt = count_tokens(prompt + begun)
        wanted = Generate(body=body, model=model, prompt=prompt, num_prompt=num_prompt, begun=begun)
        await self._answer(request, reply, wanted, chat=True)

    async def _completion(self, request: HttpRequest, reply: Reply) -> None:
        body, model = self._admitted(request, reply, openai.CompletionBody)
        (text, num_prompt), *others = openai.texts_of("prompt", body.prompt)
        if others:
            raise openai.bad("prompt", "only one is supported")
        prompt, begun = openai.begun_completion(text)
        wanted = Generate(body=body, model=model, prompt=prompt, num_prompt=num_prompt, begun=begun)
        await self._answer(request, reply, wanted, chat=False)

    def _admitted(self, request: HttpRequest, reply: Reply, kind: type[BodyT]) -> tuple[BodyT, str]:
        """Raises ApiError for an injected error (X-Return-Error, failure_rate) or a sleeping engine."""
        if self._engine.refuses:
            reply.headers[REFUSED] = "asleep"
            raise ApiError(503, "the engine sleeps", code="engine_asleep")
        if asked_status := request.headers.get("x-return-error"):
            status = int(asked_status) if asked_status.isdecimal() and 400 <= int(asked_status) <= 599 else 500
            raise ApiError(status, f"injected error {status}", type="injected_error", code="injected")
        config = self._engine.config
        if not self._engine.serves:
            message = f"this is stage {config.stage} of {config.num_stages}, and answers no client"
            raise ApiError(503, message, type="server_error", code="not_joined")
        faults = self._engine.faults
        if faults.failure_rate and self._engine.chance.random() < faults.failure_rate:
            failure = self._engine.chance.choice(sorted(faults.failure_types or FAILURES))
            status, error_type, code = FAILURES[failure]
            raise ApiError(status, f"injected failure: {failure}", type=error_type, code=code)
        body = openai.parse(request.body, kind)
        return body, openai.check_model(body.model, self._names)

    async def _answer(self, request: HttpRequest, reply: Reply, wanted: Generate, *, chat: bool) -> None:
        openai.check_generate(wanted, self._context_tokens)
        prefix = "chatcmpl" if chat else "cmpl"
        answer_id = f"{prefix}-{request.headers.get('x-request-id') or uuid.uuid4().hex}"
        answer = Answer(self._engine, wanted, answer_id, chat)
        self._answers.add(answer)
        try:
            await (answer.stream(reply) if wanted.body.stream else answer.whole(reply))
        finally:
            self._answers.remove(answer)

    # -- vectors and tokens -----------------------------------------------------------------------------------------

    async def _embeddings(self, request: HttpRequest, reply: Reply) -> None:
        body, model = self._admitted(request, reply, openai.EmbeddingBody)
        texts = openai.texts_of("input", body.input)
        num_tokens = sum(num for _, num in texts)
        if max(num for _, num in texts) > self._context_tokens:
            raise ApiError(400, "the input is longer than the context", param="input", code="context_length_exceeded")
        done = asyncio.Event()
        stream = self._engine.submit(min(num_tokens, self._context_tokens), 1, lambda _: done.set())
        try:
            await done.wait()
        finally:
            self._engine.finish(stream, "stop" if done.is_set() else "abort")
        vectors = [_vector(text, body.encoding_format) for text, _ in texts]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        answer = {"object": "list", "data": data, "model": model, "usage": usage}
        reply.send(200, {**answer, "system_fingerprint": openai.FINGERPRINT})

    async def _tokenize(self, request: HttpRequest, reply: Reply) -> None:
        body = openai.parse(request.body, openai.TokenizeBody)
        openai.check_model(body.model, self._names)
        text = openai.chat_prompt(body.messages, self._system_prompt) if body.messages else body.prompt
        if text is None:
            raise openai.bad("prompt", "a string is expected")
        tokens = token_ids(text)
        counted = {"count": len(tokens), "max_model_len": self._context_tokens, "tokens": tokens}
        reply.send(200, {**counted, "emulated": True})

    # -- control ----------------------------------------------------------------------------------------------------

    async def _change_faults(self, request: HttpRequest, reply: Reply) -> None:
        try:
            faults: Faults = changed(self._engine.faults, openai.parse(request.body, dict[str, Any]))
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        self._engine.set_faults(faults)
        reply.send(200, as_json(faults))

    def _kv(self) -> dict[str, Any]:
        total_bytes = self._engine.batch.limits.kv_tokens * self._engine.config.block_bytes // BLOCK_TOKENS
        return {"used_bytes": self._engine.kv_bytes_used, "total_bytes": total_bytes}

    async def _limit_kv(self, request: HttpRequest, reply: Reply) -> None:
        self._engine.limit_kv(openai.parse(request.body, _KvBody).num_bytes)
        reply.send(200, self._kv())

    async def _sleep(self, request: HttpRequest, reply: Reply) -> None:
        if request.query.get("level", ["1"])[0] != "1":
            raise openai.bad("level", "only 1 is supported")
        _fail_for(self._engine.faults.sleep_failure)
        await self._engine.sleep()
        reply.send(200, b"")

    async def _wake_up(self, request: HttpRequest, reply: Reply) -> None:
        _fail_for(self._engine.faults.wake_failure)
        await self._engine.wake_up()
        reply.send(200, b"")

    async def _pause(self, request: HttpRequest, reply: Reply) -> None:
        mode = request.query.get("mode", ["abort"])[0]
        if mode not in ("abort", "idle"):
            raise openai.bad("mode", "abort or idle")
        _fail_for(self._engine.faults.sleep_failure)
        if mode == "idle":
            self._pause_if_idle(reply)
            return
        for answer in self._answers:
            answer.abort()
        self._engine.freeze(True)
        reply.send(200, {"status": "paused"})

    def _pause_if_idle(self, reply: Reply) -> None:
        """Unlike vLLM, pause only without running requests."""
        num_in_flight = self._engine.num_in_flight
        if not num_in_flight:
            self._engine.refuses = True
            self._engine.freeze(True)
        reply.send(200, {"status": "paused" if not num_in_flight else "running", "num_in_flight": num_in_flight})

    async def _resume(self, request: HttpRequest, reply: Reply) -> None:
        self._engine.refuses = False
        self._engine.freeze(False)
        reply.send(200, {"status": "resumed"})


def _vector(text: str, encoding: str) -> list[float] | str:
    vector = embedding(text, EMBEDDING_DIMENSIONS)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if encoding == "base64" else vector


def _fail_for(reason: str) -> None:
    if reason:
        raise ApiError(500, reason, type="injected_error", code="injected")
