"""Requests the console passes on. Real sockets, a fake far side."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from glowplug.events.facts import ServiceStarted
from tests import console_story as story
from tests.console_server import ADMIN_TOKEN, FakeOwner, Visit, addresses, owning, visited
from tests.waiting import until

CHAT = "/playground/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
RIGHT = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
FIRST = b'data: {"n": 0}\n\n'
FLOOD = [b'data: {"n": 1, "pad": "%s"}\n\n' % (b"x" * 1000)] * 200_000


@pytest.fixture
async def owner() -> AsyncIterator[FakeOwner]:
    async with owning() as far_side:
        yield far_side


def between(owner: FakeOwner, **settings: Any) -> Visit:
    return visited(**{**addresses(owner), **settings})


async def test_a_chat_streams_as_it_comes_with_the_headers_that_matter(owner: FakeOwner) -> None:
    asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "secret words"}], "top_k": 3}
    given = {"Authorization": "Bearer k", "X-Request-Id": "mine", "traceparent": "00-1-2-01", "Cookie": "a=b", **JSON}
    raw = json.dumps(asked).encode()
    owner.script = [FIRST, asyncio.Event()]
    async with between(owner) as (_, client), client.stream("POST", CHAT, content=raw, headers=given) as answer:
        chunks = answer.aiter_raw()
        assert await anext(chunks) == FIRST, "the first token is here before there is a second"
        assert answer.headers["x-glowplug-emulated"] == "1"
        assert answer.headers["server-timing"] == "queue;dur=1.0"
        assert answer.headers["x-request-id"] == "req-1", "the router's, not one of the console's own"
        assert answer.headers["traceparent"] == story.traceparent(1)
        assert "x-private" not in answer.headers and answer.headers["cache-control"] == "no-store"
    [(_, path, headers, body)] = owner.asked
    assert (path, body) == ("/v1/chat/completions", raw), "byte for byte, unknown fields too"
    assert headers["authorization"] == "Bearer k" and headers["x-request-id"] == "mine"
    assert headers["traceparent"] == "00-1-2-01" and "cookie" not in headers


async def test_a_reader_who_leaves_ends_the_generation(owner: FakeOwner) -> None:
    go_on = asyncio.Event()
    owner.script = [FIRST, go_on, *FLOOD]
    async with between(owner) as (_, client):
        async with client.stream("POST", CHAT, content=b"{}", headers=JSON) as answer:
            await anext(answer.aiter_raw())
        go_on.set()
        await until(owner.left.is_set, "the router sees that its client has left")
        assert owner.num_sent < len(FLOOD)


async def test_a_reader_who_leaves_before_the_head_ends_the_wait(owner: FakeOwner) -> None:
    owner.head_at_once = False
    async with between(owner, chat_max_streams=1) as (_, client):
        asking = asyncio.create_task(client.post(CHAT, content=b"{}", headers=JSON))
        await until(lambda: owner.asked, "the router has been asked")
        asking.cancel()
        await until(owner.left.is_set, "the router sees that its client has left")
        owner.head_at_once = True

        async def is_taken() -> bool:
            async with client.stream("POST", CHAT, content=b"{}", headers=JSON) as answer:
                return answer.status_code == 200

        await until(is_taken, "its place is free again")


async def test_a_reader_who_does_not_read_holds_the_router_back(owner: FakeOwner) -> None:
    owner.script = [*FLOOD]
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


async def test_too_many_chats_get_a_time_to_wait(owner: FakeOwner) -> None:
    owner.script = [FIRST, asyncio.Event()]
    async with between(owner, chat_max_streams=1) as (_, client):
        async with client.stream("POST", CHAT, content=b"{}", headers=JSON) as first:
            await anext(first.aiter_raw())
            second = await client.post(CHAT, content=b"{}", headers=JSON)
        assert second.status_code == 429 and second.headers["retry-after"] == "2"


async def test_errors_come_back_as_they_are(owner: FakeOwner) -> None:
    owner.api_key = "asked for"
    async with between(owner) as (_, client):
        models = await client.get("/playground/v1/models")
        assert models.status_code == 401 and models.json()["error"]["code"] == "invalid_api_key"
        assert models.headers["www-authenticate"] == "Bearer"


async def test_a_router_that_is_not_there_or_not_known(owner: FakeOwner) -> None:
    async with between(owner, data_url="http://127.0.0.1:1", placer_url="") as (_, client):
        gone = await client.post(CHAT, content=b"{}", headers=JSON)
        unknown = await client.post("/api/v1/nodes/node-1/drain")
    assert (gone.status_code, gone.json()["error"]["code"]) == (502, "upstream_unreachable")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "no_address")
    assert "GLOWPLUG_PLACER_URL" in unknown.json()["error"]["message"]


async def test_actions_go_to_their_owner_with_the_token_they_came_with(owner: FakeOwner) -> None:
    right = RIGHT | {"Cookie": "a=b"}
    async with between(owner) as (_, client):
        loaded = await client.post("/api/v1/models/smol-chat/load", headers=right)
        refused = await client.post("/api/v1/models/smol-chat/unload")
        drained = await client.post("/api/v1/nodes/node-1/drain", headers=right)
        wrong = await client.post("/api/v1/models/smol-chat/destroy", headers=right)
        foreign = await client.post("/api/v1/models/a/load", headers={**right, "Sec-Fetch-Site": "cross-site"})
    assert loaded.status_code == 202 and loaded.json()["state"] == "starting"
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "path.verb")
    assert foreign.status_code == 403
    assert drained.status_code == 202
    on_model, on_node = "/v1/models/smol-chat", "/v1/nodes/node-1"
    assert owner.paths == [f"{on_model}/load", f"{on_model}/unload", f"{on_node}/drain"]
    assert all("cookie" not in headers for *_, headers, _ in owner.asked)


async def test_an_owner_that_is_silent_is_distinguished_from_one_that_is_not_there(owner: FakeOwner) -> None:
    async with between(owner, action_timeout_s=0.2) as (_, client):
        answer = await client.post("/api/v1/models/slow/load")
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")


async def test_addresses_are_learned_from_services_that_start_and_settings_stand_above_them(owner: FakeOwner) -> None:
    async with between(owner, autoscaler_url="", data_url="http://127.0.0.1:9") as (at, client):
        assert (await client.post("/api/v1/models/m/load")).json()["error"]["code"] == "no_address"
        for name, data_url in (("autoscaler", ""), ("router", owner.url), ("prefetcher", "")):
            await at.tell(
                ServiceStarted(service=name, service_id=f"{name}-1", url=owner.url, version="0", data_url=data_url)
            )
        assert (await client.post("/api/v1/models/m/load")).status_code == 401
        assert (await client.get("/playground/router")).json() == {"router": "http://127.0.0.1:9"}
