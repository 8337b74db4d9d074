"""What the console passes on: chats to the router, actions to their owners. Real sockets; the far side is a fake."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from glowplug.events.facts import ServiceStarted
from glowplug.runtime.rest import error_body
from glowplug.runtime.service import serve_rest
from glowplug.runtime.settings import ServiceSettings
from tests import console_story as story
from tests.console_server import ConsoleUnderTest, serving

PATIENCE_S = 20.0
CHAT = "/playground/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@dataclass
class FakeOwner:
    """A router, an autoscaler and a placer in one: it notes what reaches it and answers as it is told."""

    url: str = ""
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    head_at_once: bool = True
    num_sent: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            await self.note(request)
            if not self.head_at_once:
                await self.until_left(request)
            headers = {
                "X-Glowplug-Emulated": "1",
                "Server-Timing": "queue;dur=1.0",
                "X-Request-Id": "req-7",
                "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
                "X-Private": "stays inside",
            }
            return StreamingResponse(self.tokens(), media_type="text/event-stream", headers=headers)

        @app.get("/v1/models")
        async def models(request: Request) -> Response:
            await self.note(request)
            body = error_body("the API key is missing or wrong", "authentication_error", "invalid_api_key")
            return JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})

        @app.post("/{path:path}")
        async def act(request: Request, path: str) -> Response:
            await self.note(request)
            if "slow" in path:
                await asyncio.sleep(PATIENCE_S)
            if request.headers.get("authorization") != "Bearer right":
                body = error_body("the admin token is missing or wrong", "authentication_error", "invalid_api_key")
                return JSONResponse(body, status_code=401)
            return JSONResponse({"key": path, "state": "starting"}, status_code=202)

        return app

    async def note(self, request: Request) -> None:
        self.asked.append((request.method, request.url.path, dict(request.headers), await request.body()))

    async def until_left(self, request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.left.set()

    async def tokens(self) -> AsyncIterator[bytes]:
        try:
            yield b'data: {"n": 0}\n\n'
            await self.go_on.wait()
            for number in range(1, 200_000):
                self.num_sent = number
                await asyncio.sleep(0)
                yield b'data: {"n": %d, "pad": "%s"}\n\n' % (number, b"x" * 1000)
        finally:
            self.left.set()


@pytest.fixture
async def owner() -> AsyncIterator[FakeOwner]:
    owner = FakeOwner()
    server, owner.url = await serve_rest(owner.app(), ServiceSettings())
    yield owner
    owner.go_on.set()
    server.cancel()
    await asyncio.gather(server, return_exceptions=True)


@contextlib.asynccontextmanager
async def between(owner: FakeOwner, **settings: Any) -> AsyncIterator[tuple[ConsoleUnderTest, httpx.AsyncClient]]:
    urls = {f"{name}_url": owner.url for name in ("router", "autoscaler", "placer")}
    async with serving(**{**urls, **settings}) as at, httpx.AsyncClient(base_url=at.url, timeout=PATIENCE_S) as client:
        yield at, client
        await at.console.upstream.close()


async def test_a_chat_streams_as_it_comes_with_the_headers_that_matter(owner: FakeOwner) -> None:
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "secret words"}], "top_k": 3}
    given = {"Authorization": "Bearer k", "X-Request-Id": "mine", "traceparent": "00-1-2-01", "Cookie": "a=b", **JSON}
    raw = json.dumps(asked).encode()
    async with between(owner) as (_, client), client.stream("POST", CHAT, content=raw, headers=given) as answer:
        chunks = answer.aiter_raw()
        assert await anext(chunks) == b'data: {"n": 0}\n\n', "the first token is here before there is a second"
        assert answer.headers["x-glowplug-emulated"] == "1"
        assert answer.headers["server-timing"] == "queue;dur=1.0"
        assert answer.headers["x-request-id"] == "req-7", "the router's, not one of the console's own"
        assert answer.headers["traceparent"].startswith("00-aaaa")
        assert "x-private" not in answer.headers and answer.headers["cache-control"] == "no-store"
    [(_, path, headers, body)] = owner.asked
    assert (path, body) == ("/v1/chat/completions", raw), "byte for byte, unknown fields too"
    assert headers["authorization"] == "Bearer k" and headers["x-request-id"] == "mine"
    assert headers["traceparent"] == "00-1-2-01" and "cookie" not in headers


async def test_a_reader_who_leaves_ends_the_generation(owner: FakeOwner) -> None:
    async with between(owner) as (_, client):
        async with client.stream("POST", CHAT, content=b"{}", headers=JSON) as answer:
            await anext(answer.aiter_raw())
        owner.go_on.set()
        async with asyncio.timeout(PATIENCE_S):
            await owner.left.wait()
        assert owner.num_sent < 199_000


async def test_a_reader_who_leaves_before_the_head_ends_the_wait(owner: FakeOwner) -> None:
    owner.head_at_once = False
    async with between(owner, chat_max_streams=1) as (_, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, content=b"{}", headers=JSON, timeout=0.2)
        async with asyncio.timeout(PATIENCE_S):
            await owner.left.wait()
        owner.head_at_once = True
        async with client.stream("POST", CHAT, content=b"{}", headers=JSON) as answer:
            assert answer.status_code == 200, "its place is free again"


async def test_a_reader_who_does_not_read_holds_the_router_back(owner: FakeOwner) -> None:
    owner.go_on.set()
    async with between(owner) as (_, client), client.stream("POST", CHAT, content=b"{}", headers=JSON) as answer:
        await anext(answer.aiter_raw(64))
        num_sent = -1
        while num_sent != owner.num_sent:
            num_sent = owner.num_sent
            await asyncio.sleep(0.3)
        assert num_sent < 50_000, "most of 200 MB has not been sent: socket buffers are all there is"


async def test_what_is_not_a_chat_does_not_pass(owner: FakeOwner) -> None:
    async with between(owner, chat_max_body_bytes=2048) as (_, client):
        plain = await client.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"})
        large = await client.post(CHAT, content=b"x" * 4096, headers=JSON)
        chunked = await client.post(CHAT, content=_parts(), headers=JSON)
        foreign = await client.post(CHAT, content=b"{}", headers={**JSON, "Origin": "https://elsewhere.example"})
        other = await client.post("/playground/v1/embeddings", content=b"{}", headers=JSON)
    assert (plain.status_code, large.status_code, chunked.status_code) == (415, 413, 413)
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "foreign_origin")
    assert other.status_code == 404
    assert owner.asked == []


async def _parts() -> AsyncIterator[bytes]:
    for _ in range(8):
        yield b"x" * 1024


async def test_too_many_chats_are_told_to_wait(owner: FakeOwner) -> None:
    async with between(owner, chat_max_streams=1) as (_, client):
        async with client.stream("POST", CHAT, content=b"{}", headers=JSON) as first:
            await anext(first.aiter_raw())
            second = await client.post(CHAT, content=b"{}", headers=JSON)
        assert second.status_code == 429 and second.headers["retry-after"] == "2"


async def test_errors_come_back_as_they_are(owner: FakeOwner) -> None:
    async with between(owner) as (_, client):
        models = await client.get("/playground/v1/models")
        assert models.status_code == 401 and models.json()["error"]["code"] == "invalid_api_key"
        assert models.headers["www-authenticate"] == "Bearer"


async def test_a_router_that_is_not_there_or_not_known(owner: FakeOwner) -> None:
    async with between(owner, router_url="http://127.0.0.1:1", placer_url="") as (_, client):
        gone = await client.post(CHAT, content=b"{}", headers=JSON)
        unknown = await client.post("/api/v1/nodes/node-1/drain")
    assert (gone.status_code, gone.json()["error"]["code"]) == (502, "upstream_unreachable")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "no_address")
    assert "GLOWPLUG_PLACER_URL" in unknown.json()["error"]["message"]


async def test_actions_go_to_their_owner_with_the_token_they_came_with(owner: FakeOwner) -> None:
    right = {"Authorization": "Bearer right", "Cookie": "a=b"}
    async with between(owner) as (_, client):
        loaded = await client.post("/api/v1/models/smol-chat/load", headers=right)
        refused = await client.post("/api/v1/models/smol-chat/unload")
        drained = await client.post("/api/v1/nodes/node-1/drain", headers=right)
        wrong = await client.post("/api/v1/models/smol-chat/destroy", headers=right)
        foreign = await client.post("/api/v1/models/a/load", headers={**right, "Sec-Fetch-Site": "cross-site"})
    assert loaded.status_code == 202 and loaded.json()["state"] == "starting"
    assert refused.status_code == 401 and refused.json()["error"]["message"] == "the admin token is missing or wrong"
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "path.verb")
    assert foreign.status_code == 403
    assert drained.status_code == 202
    assert [path for _, path, *_ in owner.asked][:2] == ["/v1/models/smol-chat/load", "/v1/models/smol-chat/unload"]
    assert all("cookie" not in headers for *_, headers, _ in owner.asked)


async def test_an_owner_that_is_silent_is_told_from_one_that_is_not_there(owner: FakeOwner) -> None:
    async with between(owner, action_timeout_s=0.2) as (_, client):
        answer = await client.post("/api/v1/models/slow/load")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")


async def test_addresses_are_learned_from_services_that_start_and_settings_stand_above_them(owner: FakeOwner) -> None:
    async with between(owner, autoscaler_url="", router_url="http://127.0.0.1:9") as (at, client):
        assert (await client.post("/api/v1/models/m/load")).json()["error"]["code"] == "no_address"
        for name, data_url in (("autoscaler", ""), ("router", owner.url), ("prefetcher", "")):
            started = ServiceStarted(
                service=name, service_id=f"{name}-1", url=owner.url, version="0", data_url=data_url
            )
            await at.tell(story.fact(started, 1.0))
        assert (await client.post("/api/v1/models/m/load")).status_code == 401
        assert (await client.get("/playground/router")).json() == {"router": "http://127.0.0.1:9"}
