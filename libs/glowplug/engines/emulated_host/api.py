"""The routes: vLLM's HTTP subset and the routes for fault injection, over one engine."""

import asyncio
import base64
import hmac
import struct
import time
import uuid
from collections.abc import Callable
from typing import Any

from glowplug.engines.emulated_host import openai
from glowplug.engines.emulated_host.answer import Answer
from glowplug.engines.emulated_host.engine import Engine
from glowplug.engines.emulated_host.faults import FAILURES, Faults, as_json, changed
from glowplug.engines.emulated_host.http import Reply, Request
from glowplug.engines.emulated_host.openai import ApiError, Generate
from glowplug.engines.emulated_host.stage_api import StageApi
from glowplug.engines.emulated_host.text import count_tokens, embedding, token_ids
from glowplug.engines.listener import REFUSED

VERSION = "0.0.0+emulated"
EMBEDDING_DIMENSIONS = 64
_GUARDED = ("/v1/", "/stage/")  # vLLM guards /v1/ alone


class Api:
    """One model's HTTP surface. `names`: every name it is served under, the first is its own."""

    def __init__(self, engine: Engine, names: list[str], system_prompt: str = "", api_key: str = "") -> None:
        self._engine = engine
        self._context_tokens = engine.config.context_tokens
        self._names = names
        self._system_prompt = system_prompt
        self._expected = f"Bearer {api_key}".encode() if api_key else b""
        self._created = int(time.time())
        self._answers: dict[str, Answer] = {}
        self._states: dict[str, Callable[[], dict[str, Any]]] = {  # what a GET of each path shows
            "/version": lambda: {"version": VERSION, "emulated": True},
            "/v1/models": self._models,
            "/admin/config": lambda: as_json(engine.faults),
            "/admin/kv": self._kv,
            "/is_sleeping": lambda: {"is_sleeping": engine.sleep_level > 0},
            "/is_paused": lambda: {"is_paused": engine.frozen},
        }
        self._routes = {
            **{("GET", path): self._show for path in self._states},
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
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
            ("POST", "/abort_requests"): self._abort_requests,
            **StageApi(engine, names[0]).routes,
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
        text = self._engine.metrics.text(labels, self._engine.batch, self._engine.sleep_level, carried)
        reply.send(200, text, "text/plain; version=0.0.4; charset=utf-8")

    # -- text -------------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request, reply: Reply) -> None:
        body, model = self._admitted(request, reply)
        body, begun = openai.begun_chat(body)
        prompt = openai.chat_prompt(body, self._system_prompt)
        num_prompt = count_tokens(prompt + begun)
        wanted = openai.check_generate(body, model, prompt, num_prompt, self._context_tokens, begun)
        await self._answer(request, reply, wanted, chat=True)

    async def _completion(self, request: Request, reply: Reply) -> None:
        body, model = self._admitted(request, reply)
        text, num_prompt = openai.completion_prompt(body)
        prompt, begun = openai.begun_completion(text)
        wanted = openai.check_generate(body, model, prompt, num_prompt, self._context_tokens, begun)
        await self._answer(request, reply, wanted, chat=False)

    def _admitted(self, request: Request, reply: Reply) -> tuple[dict[str, Any], str]:
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
            kind = self._engine.chance.choice(sorted(faults.failure_types or FAILURES))
            status, error_type, code = FAILURES[kind]
            raise ApiError(status, f"injected failure: {kind}", type=error_type, code=code)
        body = openai.parse_object(request.body)
        return body, openai.check_model(body, self._names)

    async def _answer(self, request: Request, reply: Reply, wanted: Generate, *, chat: bool) -> None:
        prefix = "chatcmpl" if chat else "cmpl"
        answer_id = f"{prefix}-{request.headers.get('x-request-id') or uuid.uuid4().hex}"
        answer = self._answers[answer_id] = Answer(self._engine, wanted, answer_id, chat)
        try:
            await (answer.stream(reply) if wanted.stream else answer.whole(reply))
        finally:
            del self._answers[answer_id]

    # -- vectors and tokens -----------------------------------------------------------------------------------------

    async def _embeddings(self, request: Request, reply: Reply) -> None:
        body, model = self._admitted(request, reply)
        texts = _embedding_inputs(body.get("input"))
        if (encoding := body.get("encoding_format", "float")) not in ("float", "base64"):
            raise openai.bad("encoding_format", "float or base64")
        num_tokens = sum(count_tokens(text) for text in texts)
        if max(count_tokens(text) for text in texts) > self._context_tokens:
            raise ApiError(400, "the input is longer than the context", param="input", code="context_length_exceeded")
        done = asyncio.Event()
        sequence = self._engine.submit(min(num_tokens, self._context_tokens), 1, lambda _: done.set())
        try:
            await done.wait()
        finally:
            self._engine.finish(sequence, "stop" if done.is_set() else "abort")
        data = [{"object": "embedding", "index": i, "embedding": _vector(t, encoding)} for i, t in enumerate(texts)]
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        answer = {"object": "list", "data": data, "model": model, "usage": usage}
        reply.send(200, {**answer, "system_fingerprint": openai.FINGERPRINT})

    async def _tokenize(self, request: Request, reply: Reply) -> None:
        body = openai.parse_object(request.body)
        openai.check_model(body, self._names)
        text = body.get("prompt")
        if "messages" in body:
            text = openai.chat_prompt(body, self._system_prompt)
        if not isinstance(text, str):
            raise openai.bad("prompt", "a string is expected")
        tokens = token_ids(text)
        counted = {"count": len(tokens), "max_model_len": self._context_tokens, "tokens": tokens}
        reply.send(200, {**counted, "emulated": True})

    # -- control ----------------------------------------------------------------------------------------------------

    async def _change_faults(self, request: Request, reply: Reply) -> None:
        try:
            faults: Faults = changed(self._engine.faults, openai.parse_object(request.body))
        except ValueError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        self._engine.set_faults(faults)
        reply.send(200, as_json(faults))

    def _kv(self) -> dict[str, Any]:
        total_bytes = self._engine.batch.num_blocks * self._engine.config.block_bytes
        return {"used_bytes": self._engine.kv_bytes_used, "total_bytes": total_bytes}

    async def _limit_kv(self, request: Request, reply: Reply) -> None:
        num_bytes = openai.parse_object(request.body).get("num_bytes")
        if type(num_bytes) is not int or num_bytes < 0:
            raise openai.bad("num_bytes", "a number of bytes, 0 or more, is expected")
        self._engine.limit_kv(num_bytes)
        reply.send(200, self._kv())

    async def _sleep(self, request: Request, reply: Reply) -> None:
        level = request.query.get("level", ["1"])[0]
        if level not in ("1", "2"):
            raise openai.bad("level", "1 or 2")
        _fail_for(self._engine.faults.sleep_failure)
        await self._engine.sleep(int(level))
        reply.send(200, b"")

    async def _wake_up(self, request: Request, reply: Reply) -> None:
        _fail_for(self._engine.faults.wake_failure)
        await self._engine.wake_up()
        reply.send(200, b"")

    async def _pause(self, request: Request, reply: Reply) -> None:
        mode = request.query.get("mode", ["abort"])[0]
        if mode not in ("abort", "wait", "keep", "idle"):
            raise openai.bad("mode", "abort, wait, keep or idle")
        _fail_for(self._engine.faults.sleep_failure)
        if mode == "idle":
            self._pause_if_idle(reply)
            return
        self._engine.admit(False)
        if mode == "abort":
            self._abort([])
        while mode == "wait" and self._engine.batch.running:
            await asyncio.sleep(0.01)
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

    async def _abort_requests(self, request: Request, reply: Reply) -> None:
        body = openai.parse_object(request.body or b"{}")
        ids = body.get("request_ids", [])
        if not isinstance(ids, list):
            raise openai.bad("request_ids", "a list is expected")
        reply.send(200, {"aborted": self._abort(ids)})

    def _abort(self, ids: list[Any]) -> int:
        """End these answers (all of them when the list is empty) with the finish reason "abort"."""
        wanted = [answer for answer_id, answer in self._answers.items() if not ids or answer_id in ids]
        for answer in wanted:
            answer.abort()
        return len(wanted)


def _embedding_inputs(given: Any) -> list[str]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(type(item) is int for item in given):
            return [" ".join(map(str, given))]
        if all(isinstance(item, str) for item in given):
            return given
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in given):
            return [" ".join(map(str, item)) for item in given]
    raise openai.bad("input", "a string, a list of strings or token ids is expected")


def _vector(text: str, encoding: str) -> list[float] | str:
    vector = embedding(text, EMBEDDING_DIMENSIONS)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if encoding == "base64" else vector


def _fail_for(reason: str) -> None:
    """Raises ApiError, where there is a reason."""
    if reason:
        raise ApiError(500, reason, type="injected_error", code="injected")
