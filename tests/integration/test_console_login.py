"""A console with a key: access without it, with it and with a session."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from glowplug.services.console import login
from tests import console_story as story
from tests.console_server import ADMIN_TOKEN, API_KEY, SILENCE_S, FakeOwner, Visit, addresses, owning, visited
from tests.waiting import until

KEY = "key-of-this-console"
READ = [
    *("/api/v1/fleet", "/api/v1/stream", "/api/v1/models/m", "/api/v1/requests", "/api/v1/traces", "/api/v1/traces/1"),
    *("/api/v1/requests/1/trace", "/api/v1/decisions", "/api/v1/events", "/api/v1/events/latest", "/api/v1/forecasts"),
    "/playground/router",
    *("/playground/v1/models", "/docs", "/openapi.json", "/policies", "/nothing", "/live/", "//api/v1/fleet", "/Login"),
]
OPEN = ["/live", "/health", "/ready", "/metrics", "/login", "/session", "/page/base.css"]


def locked(**settings: Any) -> Visit:
    return visited(**{"console_key": KEY, **settings})


async def log_in(client: httpx.AsyncClient, key: str = KEY, **headers: str) -> httpx.Response:
    return await client.post("/login", json={"key": key}, headers=headers)


async def session(client: httpx.AsyncClient) -> tuple[bool, bool, str, str]:
    said = (await client.get("/session")).json()
    return said["key_asked"], said["open"], said["role"], said["name"]


async def test_without_the_key_nothing_can_be_read() -> None:
    async with locked() as (_, client):
        for path in READ:
            answer = await client.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "console_key_required", path
            assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
        for path in ("/api/v1/models/m/load", "/api/v1/nodes/n/drain", "/playground/v1/chat/completions"):
            assert (await client.post(path, json={})).status_code == 401, path
        page = await client.get("/")
    assert (page.status_code, page.headers["location"], page.headers["cache-control"]) == (303, "/login", "no-store")


async def test_what_probes_and_scrapes_need_is_open() -> None:
    async with locked() as (_, client):
        for path in OPEN:
            assert (await client.get(path)).status_code == 200, path


async def test_programs_send_the_key() -> None:
    async with locked() as (_, client):
        for headers in (
            {"Authorization": f"Bearer {KEY}"},
            {"Authorization": f"bearer {KEY}"},
            {"X-Glowplug-Console-Key": KEY},
        ):
            assert (await client.get("/api/v1/fleet", headers=headers)).status_code == 200
        for wrong in (f"Basic {KEY}", "Bearer", "Bearer wrong", KEY):
            assert (await client.get("/api/v1/fleet", headers={"Authorization": wrong})).status_code == 401
        assert not client.cookies, "a program gets no session"


async def test_the_api_key_is_asked_for_where_the_console_has_no_key_of_its_own() -> None:
    async with locked(console_key="", api_key=API_KEY) as (_, client):
        assert (await log_in(client, KEY)).status_code == 401
        assert (await log_in(client, API_KEY)).status_code == 204
    async with locked(api_key=API_KEY) as (_, client):
        assert (await log_in(client, API_KEY)).status_code == 401
    async with locked(console_key="") as (_, client):
        assert (await session(client))[:3] == (False, True, "admin")
        assert (await client.get("/api/v1/fleet")).status_code == 200


async def test_a_session_opens_everything_until_the_logout() -> None:
    async with locked() as (_, client):
        assert await session(client) == (True, False, "none", "")
        answer = await log_in(client)
        assert answer.status_code == 204
        cookie = answer.headers["set-cookie"]
        assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"))
        assert "Secure" not in cookie and KEY not in cookie
        assert (await client.get("/")).status_code == 200 and (await client.get("/api/v1/fleet")).status_code == 200
        assert await session(client) == (True, True, "admin", "the console key")
        kept = {"Cookie": cookie.partition(";")[0]}
        assert (await client.post("/logout")).status_code == 204
        assert not client.cookies
        assert (await client.get("/api/v1/fleet", headers=kept)).status_code == 401, "also with a cookie that was kept"


async def test_the_cookie_is_for_https_alone_where_that_is_spoken() -> None:
    async with locked() as (_, client):
        answer = await log_in(client, **{"X-Forwarded-Proto": "https"})
    assert "Secure" in answer.headers["set-cookie"]


async def test_a_session_ends_by_itself_and_with_it_what_is_open() -> None:
    async with locked(console_session_s=60) as (at, client):
        at.clock.stop()
        await log_in(client)
        for path in ("/api/v1/stream", "/api/v1/events"):
            async with client.stream("GET", path) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                at.clock.forward(61)
                await at.publish(*story.fleet_events(at.clock()))
                async with asyncio.timeout(SILENCE_S):
                    async for _ in lines:
                        pass
            assert (await client.get("/api/v1/fleet")).status_code == 401
            await log_in(client)
        await until(
            lambda: not at.console.hub.clients and not at.console.events.watchers, "their places are free again"
        )


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"key": 7}', b'{"key": "' + b"x" * 2000 + b'"}', b"\xff"])
async def test_what_is_no_login_is_refused(body: bytes) -> None:
    async with locked() as (_, client):
        answer = await client.post("/login", content=body, headers={"Content-Type": "application/json"})
        large = await client.post("/login", content=b"x" * (login.MAX_LOGIN_BYTES + 1))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "key")
    assert large.status_code == 413


async def test_guessing_is_bounded_at_every_way_in() -> None:
    async with locked() as (at, client):
        at.clock.stop()
        for k in range(login.MAX_WRONG):
            if k % 2:
                refused = await log_in(client, f"guess {k}")
            else:
                refused = await client.get("/api/v1/fleet", headers={"Authorization": f"Bearer guess-{k}"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "wrong_console_key")
        answer = await log_in(client)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_wrong_keys")
        assert 0 < int(answer.headers["retry-after"]) <= login.WINDOW_S
        by_header = await client.get("/api/v1/fleet", headers={"X-Glowplug-Console-Key": KEY})
        assert by_header.status_code == 429
        at.clock.forward(login.WINDOW_S)
        assert (await log_in(client)).status_code == 204


@pytest.fixture
async def owner() -> AsyncIterator[FakeOwner]:
    async with owning() as far_side:
        far_side.api_key = API_KEY
        yield far_side


async def test_who_logged_in_with_the_api_key_need_not_give_it_again_to_chat(owner: FakeOwner) -> None:
    stated = {**addresses(owner), "console_key": "", "api_key": API_KEY}
    async with locked(**stated) as (_, client):
        await log_in(client, API_KEY)
        assert (await client.get("/playground/v1/models")).status_code == 200
        assert (await client.post("/playground/v1/chat/completions", json={})).status_code == 200
        given = {"Authorization": "Bearer another"}
        assert (await client.get("/playground/v1/models", headers=given)).status_code == 401, "what is given goes along"
    async with locked(**{**stated, "console_key": KEY}) as (_, client):
        await log_in(client)
        assert (await client.get("/playground/v1/models")).status_code == 401, (
            "the console's own key is not the router's"
        )


async def test_a_program_acts_with_the_console_key_and_the_owners_token(owner: FakeOwner) -> None:
    both = {"Authorization": f"Bearer {ADMIN_TOKEN}", "X-Glowplug-Console-Key": KEY}
    async with locked(**addresses(owner)) as (_, client):
        assert (await client.post("/api/v1/models/m/load", headers=both)).status_code == 202
        alone = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        assert (await client.post("/api/v1/models/m/load", headers=alone)).status_code == 401
    [(_, _, headers, _)] = owner.asked
    assert "x-glowplug-console-key" not in headers and "cookie" not in headers


async def test_a_page_of_another_site_cannot_log_its_reader_in_or_out() -> None:
    foreign = {"Origin": "https://evil.example"}
    async with locked() as (_, client):
        assert (await log_in(client, **foreign)).status_code == 403
        await log_in(client)
        assert (await client.post("/logout", headers=foreign)).status_code == 403
        assert (await client.get("/api/v1/fleet")).status_code == 200
