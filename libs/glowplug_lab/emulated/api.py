"""The routes: vLLM's HTTP subset and the routes for fault injection, over one engine."""

import asyncio
import base64
import hmac
import struct
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

from glowplug.engines.listener import REFUSED
from glowplug_lab.emulated import openai
from glowplug_lab.emulated.adapters import Adapters
from glowplug_lab.emulated.answer import Answer
from glowplug_lab.emulated.engine import Engine
from glowplug_lab.emulated.faults import FAILURES, Faults, as_json, changed
from glowplug_lab.emulated.http import Reply, Request
from glowplug_lab.emulated.openai import ApiError, Generate
from glowplug_lab.emulated.stage_api import StageApi
from glowplug_lab.emulated.text import count_tokens, embedding, token_ids

EMBEDDING_DIMENSIONS = 64
_GUARDED = ("/v1/", "/stage/")  # vLLM guards /v1/ alone


BodyT = TypeVar("BodyT", bound=openai.Body)


class _KvBody(msgspec.Struct):
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Api:
    """One model's HTTP surface. `names`: every name it is served under, the first is its own."""

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
        self._states: dict[str, Callable[[], dict[str, Any]]] = {  # what a GET of each path shows
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

    async def __call__(self, request: Request, reply: Reply) -> None:
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

    def _may(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").encode()
        return not self._expected or hmac.compare_digest(given, self._expected)

    # -- the engine itself ------------------------------------------------------------------------------------------

    async def _health(self, request: Request, reply: Reply) -> None:
        faults = self._engine.faults
        if faults.hang_health:
            await asyncio.Event().wait()
        if faults.health_delay_s:
            await self._engine.pass_time(faults.health_delay_s)
        reply.send(503 if faults.unhealthy else 200, b"")

    async def _show(self, request: Request, reply: Reply) -> None:
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

    async def _metrics(self, request: Request, reply: Reply) -> None:
        name = self._names[0].replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        labels = f'model_name="{name}",engine="0",emulated="true"'
        carried = self._engine.carried.requests(asyncio.get_running_loop().time())
        text = self._engine.metrics.text(labels, self._engine.batch, carried)
        reply.send(200, text, "text/plain; version=0.0.4; charset=utf-8")

    # -- text -------------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request, reply: Reply) -> None:
        body, model = self._admitted(request, reply, openai.ChatBody)
        messages, begun = openai.begun_chat(body)
        prompt = openai.chat_prompt(messages, self._system_prompt)
        num_prompt = count_tokens(prompt + begun)
        wanted = Generate(body=body, model=model, prompt=prompt, num_prompt=num_prompt, begun=begun)
        await self._answer(request, reply, wanted, chat=True)

    async def _completion(self, request: Request, reply: Reply) -> None:
        body, model = self._admitted(request, reply, openai.CompletionBody)
        (text, num_prompt), *others = openai.texts_of("prompt", body.prompt)
        if others:
            raise openai.bad("prompt", "only one is supported")
        prompt, begun = openai.begun_completion(text)
        wanted = Generate(body=body, model=model, prompt=prompt, num_prompt=num_prompt, begun=begun)
        await self._answer(request, reply, wanted, chat=False)

    def _admitted(self, request: Request, reply: Reply, kind: type[BodyT]) -> tuple[BodyT, str]:
        """The body and its model, unless this request is one that must fail (X-Return-Error, failure_rate), or comes
        while the engine sleeps."""
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

    async def _answer(self, request: Request, reply: Reply, wanted: Generate, *, chat: bool) -> None:
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

    async def _embeddings(self, request: Request, reply: Reply) -> None:
        body, model = self._admitted(request, reply, openai.EmbeddingBody)
        texts = openai.texts_of("input", body.input)
        num_tokens = sum(num for _, num in texts)
        if max(num for _, num in texts) > self._context_tokens:
            raise ApiError(400, "the input is longer than the context", param="input", code="context_length_exceeded")
        done = asyncio.Event()
        sequence = self._engine.submit(min(num_tokens, self._context_tokens), 1, lambda _: done.set())
        try:
            await done.wait()
        finally:
            self._engine.finish(sequence, "stop" if done.is_set() else "abort")
        vectors = [_vector(text, body.encoding_format) for text, _ in texts]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        answer = {"object": "list", "data": data, "model": model, "usage": usage}
        reply.send(200, {**answer, "system_fingerprint": openai.FINGERPRINT})

    async def _tokenize(self, request: Request, reply: Reply) -> None:
        body = openai.parse(request.body, openai.TokenizeBody)
        openai.check_model(body.model, self._names)
        text = openai.chat_prompt(body.messages, self._system_prompt) if body.messages else body.prompt
        if text is None:
            raise openai.bad("prompt", "a string is expected")
        tokens = token_ids(text)
        counted = {"count": len(tokens), "max_model_len": self._context_tokens, "tokens": tokens}
        reply.send(200, {**counted, "emulated": True})

    # -- control ----------------------------------------------------------------------------------------------------

    async def _change_faults(self, request: Request, reply: Reply) -> None:
        try:
            faults: Faults = changed(self._engine.faults, openai.parse(request.body, dict[str, Any]))
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        self._engine.set_faults(faults)
        reply.send(200, as_json(faults))

    def _kv(self) -> dict[str, Any]:
        total_bytes = self._engine.batch.num_blocks * self._engine.config.block_bytes
        return {"used_bytes": self._engine.kv_bytes_used, "total_bytes": total_bytes}

    async def _limit_kv(self, request: Request, reply: Reply) -> None:
        self._engine.limit_kv(openai.parse(request.body, _KvBody).num_bytes)
        reply.send(200, self._kv())

    async def _sleep(self, request: Request, reply: Reply) -> None:
        if request.query.get("level", ["1"])[0] != "1":
            raise openai.bad("level", "only 1 is supported")
        _fail_for(self._engine.faults.sleep_failure)
        await self._engine.sleep()
        reply.send(200, b"")

    async def _wake_up(self, request: Request, reply: Reply) -> None:
        _fail_for(self._engine.faults.wake_failure)
        await self._engine.wake_up()
        reply.send(200, b"")

    async def _pause(self, request: Request, reply: Reply) -> None:
        mode = request.query.get("mode", ["abort"])[0]
        if mode not in ("abort", "idle"):
            raise openai.bad("mode", "abort or idle")
        _fail_for(self._engine.faults.sleep_failure)
        if mode == "idle":
            self._pause_if_idle(reply)
            return
        self._engine.admit(False)
        for answer in self._answers:
            answer.abort()
        self._engine.freeze(True)
        reply.send(200, {"status": "paused"})

    def _pause_if_idle(self, reply: Reply) -> None:
        """Ours: pause, and refuse what comes, unless something runs."""
        num_in_flight = self._engine.num_in_flight
        if not num_in_flight:
            self._engine.refuses = True
            self._engine.freeze(True)
        reply.send(200, {"status": "paused" if not num_in_flight else "running", "num_in_flight": num_in_flight})

    async def _resume(self, request: Request, reply: Reply) -> None:
        self._engine.refuses = False
        self._engine.freeze(False)
        self._engine.admit(True)
        reply.send(200, {"status": "resumed"})


def _vector(text: str, encoding: str) -> list[float] | str:
    vector = embedding(text, EMBEDDING_DIMENSIONS)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if encoding == "base64" else vector


def _fail_for(reason: str) -> None:
    """Raises ApiError, where there is a reason."""
    if reason:
        raise ApiError(500, reason, type="injected_error", code="injected")
