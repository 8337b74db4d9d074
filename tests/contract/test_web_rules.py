"""One table for every port a browser can reach: (Host, Origin, Content-Type, key) -> status."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest
from fastapi import Depends

from glowplug.runtime.rest import admin, make_app
from glowplug.runtime.service import serve_rest
from glowplug.runtime.settings import ServiceSettings
from glowplug.runtime.web import MAX_BODY_BYTES
from tests.console_server import serving
from tests.contract.data_port_rig import a_rig, chat

JSON, TEXT, FORM = "application/json", "text/plain", "application/x-www-form-urlencoded"
EVIL, APP = "https://evil.example", "https://app.example"
OWN = "http://127.0.0.1"  # its port is the server's
SETTINGS: dict[str, Any] = {"allowed_hosts": "t,api.example,*.svc.example", "allowed_origins": APP}
KEY = "the-key"
PORTS = ("data", "console", "admin")


@contextlib.asynccontextmanager
async def data_port(key: str) -> AsyncIterator[tuple[str, str]]:
    async with a_rig(api_key=key, rules=ServiceSettings(**SETTINGS).web_rules()) as rig:
        await rig.engine()
        yield "http://{}:{}".format(*rig.host_port), "/v1/chat/completions"


@contextlib.asynccontextmanager
async def console(key: str) -> AsyncIterator[tuple[str, str]]:
    async with serving(api_key=key, **SETTINGS) as at:
        yield at.url, "/login"


@contextlib.asynccontextmanager
async def admin_port(key: str) -> AsyncIterator[tuple[str, str]]:
    app = make_app("placer", "placer-1", ready=lambda: "", policies=dict)

    @app.post("/v1/things", dependencies=[Depends(admin(key))])
    async def things(body: dict[str, Any]) -> dict[str, Any]:
        return body

    server, url = await serve_rest(app, ServiceSettings(**SETTINGS))
    try:
        yield url, "/v1/things"
    finally:
        server.cancel()
        with contextlib.suppress(BaseException):
            await server


OPENED = {"data": data_port, "console": console, "admin": admin_port}
READ = {"data": "/v1/models", "console": "/api/v1/fleet", "admin": "/docs"}
CHAT = chat().partition(b"\r\n\r\n")[2]
BODY = json.dumps({"key": KEY, **json.loads(CHAT)}).encode()

# Host ("": the port's), Origin ("=": the port's), other headers, status
REFUSED: list[tuple[str, str, Mapping[str, str], int]] = [
    ("evil.example", "", {}, 421),
    ("evil.example:8000", "http://evil.example:8000", {"Sec-Fetch-Site": "same-origin"}, 421),
    ("127.0.0.1.evil.example", "", {}, 421),
    ("", EVIL, {}, 403),
    ("", EVIL, {"Content-Type": TEXT}, 403),
    ("", "null", {}, 403),
    ("", "http://127.0.0.1:1", {}, 403),
    ("", "", {"Sec-Fetch-Site": "cross-site"}, 403),
    ("", EVIL, {"Sec-Fetch-Site": "cross-site", "Content-Type": FORM}, 403),
    ("", APP, {"Content-Type": TEXT}, 415),
    ("", "=", {"Content-Type": FORM}, 415),
    ("", "", {"Content-Type": "multipart/form-data", "Sec-Fetch-Site": "same-origin"}, 415),
]
ANSWERED: list[tuple[str, str, Mapping[str, str]]] = [
    ("", "", {}),
    ("localhost", "", {}),
    ("10.1.2.3:8080", "", {}),
    ("[::1]:8080", "", {}),
    ("api.example", "", {}),
    ("a.svc.example:8080", "http://a.svc.example:8080", {}),
    ("", "=", {"Sec-Fetch-Site": "same-origin"}),
    ("", APP, {"Sec-Fetch-Site": "cross-site"}),
]


def headers(url: str, host: str, origin: str, more: Mapping[str, str]) -> dict[str, str]:
    given = {"Host": host or url.removeprefix("http://"), "Content-Type": JSON, **more}
    return given | ({"Origin": url if origin == "=" else origin} if origin else {})


@pytest.mark.parametrize("port", PORTS)
async def test_what_is_refused_has_its_status_in_the_ports_own_shape(port: str) -> None:
    async with OPENED[port]("") as (url, path), httpx.AsyncClient(base_url=url) as client:
        for host, origin, more, status in REFUSED:
            given = headers(url, host, origin, more)
            answer = await client.post(path, content=BODY, headers=given)
            assert answer.status_code == status, (given, answer.text)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]
            if status != 415:
                assert (await client.get(READ[port], headers=given)).status_code == status, given
            if origin != APP:
                assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("key", ["", KEY])
async def test_what_is_answered_still_needs_the_key(port: str, key: str) -> None:
    async with OPENED[port](key) as (url, path), httpx.AsyncClient(base_url=url) as client:
        for host, origin, more in ANSWERED:
            given = headers(url, host, origin, more)
            body = CHAT if port == "data" else BODY
            right = await client.post(path, content=body, headers=given | {"Authorization": f"Bearer {KEY}"})
            assert right.is_success, (given, right.text)
            assert right.headers.get("access-control-allow-origin") == (APP if origin == APP else None)
            wrong = body.replace(KEY.encode(), b"wrong")
            answer = await client.post(path, content=wrong, headers=given | {"Authorization": "Bearer wrong"})
            assert answer.status_code == (401 if key else right.status_code), given


@pytest.mark.parametrize("port", PORTS)
async def test_a_page_is_told_beforehand_whether_it_may(port: str) -> None:
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    async with OPENED[port](KEY) as (url, path), httpx.AsyncClient(base_url=url) as client:
        may = await client.options(path, headers=asks | {"Origin": APP})
        may_not = await client.options(path, headers=asks | {"Origin": EVIL})
    assert may.status_code == 200 and may.headers["access-control-allow-origin"] == APP
    assert {"authorization", "content-type"} <= set(
        may.headers["access-control-allow-headers"].replace(" ", "").split(",")
    )
    assert "POST" in may.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in may.headers, "a cookie never goes along"
    assert may_not.status_code == 403 and "access-control-allow-origin" not in may_not.headers


async def test_pages_that_are_let_in_may_send_and_remove_files() -> None:
    async with data_port("") as (url, _), httpx.AsyncClient(base_url=url) as client:
        asks = {"Origin": APP, "Access-Control-Request-Method": "DELETE"}
        asked = await client.options("/v1/files/file-1", headers=asks)
        form = {"Origin": APP, "Content-Type": "multipart/form-data; boundary=b"}
        sent = [await client.post(path, content=b"--b--", headers=form) for path in ("/v1/files", "/v1/completions")]
    assert asked.status_code == 200 and "DELETE" in asked.headers["access-control-allow-methods"].split(", ")
    assert [answer.status_code for answer in sent] == [501, 415]


async def test_curl_without_a_content_type_is_answered_at_the_data_port_alone() -> None:
    """`curl -d` declares a form."""
    async with data_port("") as (url, path), httpx.AsyncClient(base_url=url) as client:
        assert (await client.post(path, content=CHAT, headers={"Content-Type": FORM})).status_code == 200
    async with admin_port("") as (url, path), httpx.AsyncClient(base_url=url) as client:
        assert (await client.post(path, content=BODY, headers={"Content-Type": FORM})).status_code == 415


async def test_no_more_than_the_bound_of_a_body_is_read_whoever_sends_it() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * (1 << 20)

    async with admin_port(KEY) as (url, path), httpx.AsyncClient(base_url=url) as client:
        fits = BODY + b" " * (MAX_BODY_BYTES - len(BODY))
        typed = {"Content-Type": JSON}
        allowed = typed | {"Authorization": f"Bearer {KEY}"}
        assert (await client.post(path, content=fits, headers=allowed)).status_code == 200
        for content in (fits + b" ", parts()):
            answer = await client.post(path, content=content, headers=typed)
            assert answer.status_code == 413, answer.text
            assert answer.json()["error"]["code"] == "request_too_large"
            assert answer.headers["x-request-id"]


async def test_a_stream_for_a_page_that_is_let_in_says_so_and_its_engine_does_not() -> None:
    async with a_rig(rules=ServiceSettings(**SETTINGS).web_rules()) as rig:
        engine = await rig.engine()
        answer = await rig.ask(chat(stream=True, extra=b"origin: https://app.example\r\n"))
        [served] = engine.served
    assert answer.status == 200 and answer.headers["access-control-allow-origin"] == APP
    assert served.header("origin") is None, "vLLM would answer with headers of its own"


@pytest.mark.parametrize("path", ["/", "/docs", "/api/v1/fleet", "/nothing", "/login"])
async def test_every_answer_tells_browsers_to_load_and_frame_nothing_else(path: str) -> None:
    async with serving() as at, httpx.AsyncClient(base_url=at.url) as client:
        answer = await client.get(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "http" not in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["referrer-policy"] == "no-referrer"


async def test_docs_load_nothing() -> None:
    async with serving() as at, httpx.AsyncClient(base_url=at.url) as client:
        page = (await client.get("/docs")).text
        assert (await client.get("/redoc")).status_code == 404
    assert "<script" not in page and "src=" not in page and "//" not in page.replace("</", "")
    assert "/api/v1/decisions/{decision_id}" in page and 'href="/openapi.json"' in page
