"""Login at an external issuer: accepted tokens, roles, and the end of a session."""

import logging
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc.jwk import ECKey, OctKey, RSAKey

from glowplug.services.console import oidc
from glowplug.services.console.settings import ConsoleSettings
from tests.console_server import ADMIN_TOKEN, FakeOwner, addresses, owning, visited
from tests.oidc_provider import CLIENT_ID, SECRET, Provider, providing


@pytest.fixture
async def issuer() -> AsyncIterator[Provider]:
    async with providing() as provider:
        yield provider


@pytest.fixture
async def owner() -> AsyncIterator[FakeOwner]:
    async with owning() as far_side:
        yield far_side


async def go(client: httpx.AsyncClient, view: str = "") -> httpx.Response:
    there = await client.get("/login/oidc", params={"view": view})
    assert there.status_code == 303, there.text
    if there.headers["location"].startswith("/login"):
        return there
    back = await client.get(there.headers["location"])
    return await client.get(back.headers["location"])


async def role(client: httpx.AsyncClient) -> tuple[str, str]:
    said = (await client.get("/session")).json()
    return said["name"], said["role"]


async def test_a_login_opens_a_session_with_the_role_of_a_group(issuer: Provider, owner: FakeOwner) -> None:
    async with visited(**issuer.settings(admin_token=ADMIN_TOKEN, **addresses(owner))) as (_, client):
        assert (await client.get("/session")).json()["oidc"] == issuer.url.removeprefix("http://")
        assert (await client.get("/api/v1/fleet")).status_code == 401
        answer = await go(client, "#/models")
        assert (answer.status_code, answer.headers["location"]) == (303, "/login#/models")
        session, attempt = answer.headers.get_list("set-cookie")
        assert all(part in session for part in ("HttpOnly", "SameSite=strict", "Path=/;")), session
        assert "Max-Age=0" in attempt
        assert await role(client) == ("ann@example.org", "operator")
        assert (await client.get("/api/v1/fleet")).status_code == 200
        assert (await client.post("/api/v1/models/m/load", headers={"X-Glowplug-Actor": "eve"})).status_code == 202
        refused = await client.post("/api/v1/keys", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "role_required")
    [(_, path, headers, _)] = owner.asked
    assert path == "/v1/models/m/load"
    assert (headers["authorization"], headers["x-glowplug-actor"]) == (f"Bearer {ADMIN_TOKEN}", "ann@example.org")


@pytest.mark.parametrize(
    ("claims", "settings", "expected"),
    [
        ({"groups": ["staff"]}, {}, "viewer"),
        ({"groups": ["staff", "root"]}, {}, "admin"),
        ({"groups": "oncall"}, {}, "operator"),
        ({"groups": ["stafff"]}, {}, "none"),
        ({"groups": {"staff": True}}, {}, "none"),
        ({"groups": None}, {}, "none"),
        ({"groups": None}, {"oidc_viewers": "*"}, "viewer"),
        ({"realm_access": {"roles": ["root"]}}, {"oidc_role_claim": "realm_access.roles"}, "admin"),
        ({"https://a.example/r": ["ops"]}, {"oidc_role_claim": "https://a.example/r"}, "operator"),
    ],
)
async def test_the_role_is_the_greatest_that_a_value_gives(
    issuer: Provider, claims: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    issuer.claims |= claims
    async with visited(**issuer.settings(**settings)) as (_, client):
        answer = await go(client)
        assert (await role(client))[1] == expected
        assert answer.headers["location"] == ("/login?failed=no_role" if expected == "none" else "/login")


@pytest.mark.parametrize(
    "spoil",
    [
        {"nonce": "another"},
        {"nonce": None},
        {"exp": int(time.time()) - 3600},
        {"exp": None},
        {"aud": "another"},
        {"aud": [CLIENT_ID, "another"]},
        {"azp": "another"},
        {"iss": "http://evil.example"},
        {"iss": None},
        {"sub": None},
        {"iat": int(time.time()) + 3600},
    ],
)
async def test_a_token_that_is_not_for_this_login_opens_nothing(
    issuer: Provider, spoil: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    issuer.spoil = spoil
    async with visited(**issuer.settings()) as (_, client):
        answer = await go(client)
        assert answer.headers["location"] == "/login?failed=failed"
        assert await role(client) == ("", "none")
        assert (await client.get("/api/v1/fleet")).status_code == 401
    assert "the ID token" in caplog.text


@pytest.mark.parametrize("how", ["nothing", "the client's secret", "the public key"])
async def test_a_token_signed_with_what_others_know_opens_nothing(issuer: Provider, how: str) -> None:
    right = issuer.key
    secret = {
        "nothing": b"",
        "the client's secret": SECRET.encode(),
        "the public key": right.as_dict(private=False)["n"].encode(),
    }[how]
    async with visited(**issuer.settings()) as (_, client):
        issuer.published = [right]
        issuer.alg = "HS256" if secret else "none"
        issuer.key = OctKey.import_key(secret or b"unused" * 8, parameters={"kid": right.kid})
        assert (await go(client)).headers["location"] == "/login?failed=failed"
        issuer.alg, issuer.key = "RS256", right
        assert (await go(client)).headers["location"] == "/login"


async def test_the_keys_are_kept_and_read_again_when_they_have_rotated(issuer: Provider) -> None:
    async with visited(**issuer.settings()) as (at, client):
        at.clock.stop()
        for _ in range(2):
            assert (await go(client)).headers["location"] == "/login"
        assert issuer.asked == ["discovery", "keys"]
        stranger = RSAKey.generate_key(2048, parameters={"kid": "first"})
        issuer.published, issuer.key = [issuer.key], stranger
        assert (await go(client)).headers["location"] == "/login?failed=failed", "a stranger's key by the known name"
        at.clock.forward(oidc.KEYS_EVERY_S)
        issuer.key = ECKey.generate_key("P-256", parameters={"kid": "second"})
        issuer.alg, issuer.published = "ES256", []
        assert (await go(client)).headers["location"] == "/login"
        assert issuer.asked == ["discovery", "keys", "keys"]


async def test_an_answer_is_for_the_browser_and_the_login_that_began(issuer: Provider) -> None:
    async with visited(**issuer.settings()) as (at, client):
        there = await client.get("/login/oidc")
        back = (await client.get(there.headers["location"])).headers["location"]
        async with httpx.AsyncClient(base_url=at.url) as other:
            assert (await other.get(back)).headers["location"] == "/login?failed=stale", "of another browser"
            forged = {"Cookie": there.headers["set-cookie"].partition(";")[0] + "x"}
            assert (await other.get(back, headers=forged)).headers["location"] == "/login?failed=stale"
            code = parse_qs(urlsplit(back).query)["code"][0]
            await other.get("/login/oidc")
            stolen = f"/login/oidc/callback?code={code}&state=another"
            assert (await other.get(stolen)).headers["location"] == "/login?failed=stale"
        at.clock.stop()
        at.clock.forward(oidc.ATTEMPT_S + 5)
        assert (await client.get(back)).headers["location"] == "/login?failed=stale", "too late"


async def test_what_the_issuer_refuses_is_said(issuer: Provider, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with visited(**issuer.settings()) as (_, client):
        issuer.error = "access_denied"
        assert (await go(client)).headers["location"] == "/login?failed=refused"
    assert "access_denied" in caplog.text
    async with visited(**issuer.settings(oidc_client_secret="wrong")) as (_, client):
        issuer.error = ""
        assert (await go(client)).headers["location"] == "/login?failed=failed"
    issuer.document = {"issuer": "http://evil.example"}
    async with visited(**issuer.settings()) as (_, client):
        assert (await go(client)).headers["location"] == "/login?failed=unreachable"
    async with visited(**issuer.settings(oidc_issuer="http://127.0.0.1:1")) as (_, client):
        assert (await go(client)).headers["location"] == "/login?failed=unreachable"
    assert SECRET not in caplog.text and "eyJ" not in caplog.text


async def test_the_logout_ends_the_session_here_and_there(issuer: Provider) -> None:
    async with visited(**issuer.settings()) as (at, client):
        await go(client)
        answer = await client.post("/logout")
        then = urlsplit(answer.json()["next"])
        query = parse_qs(then.query)
        assert f"{then.scheme}://{then.netloc}{then.path}" == f"{issuer.url}/logout"
        assert query["post_logout_redirect_uri"] == [f"{at.url}/login"] and query["client_id"] == [CLIENT_ID]
        assert query["id_token_hint"][0].count(".") == 2
        assert (await client.get("/api/v1/fleet")).status_code == 401
    issuer.has_logout = False
    async with visited(**issuer.settings()) as (_, client):
        await go(client)
        assert (await client.post("/logout")).status_code == 204


async def test_a_session_ends_by_itself(issuer: Provider) -> None:
    async with visited(**issuer.settings(console_session_s=60)) as (at, client):
        at.clock.stop()
        await go(client)
        at.clock.forward(61)
        assert (await client.get("/api/v1/fleet")).status_code == 401


async def test_where_to_go_after_the_login_is_a_view_of_the_console(issuer: Provider) -> None:
    async with visited(**issuer.settings()) as (_, client):
        for view in ("https://evil.example", "//evil.example", "#javascript:1", "#/a\r\nX: y", "#" + "/" * 511):
            assert (await go(client, view)).headers["location"] == "/login", view


@pytest.mark.parametrize(
    "settings",
    [
        {"oidc_issuer": "http://id.example", "oidc_client_id": "a", "oidc_viewers": "*"},
        {"oidc_issuer": "id.example", "oidc_client_id": "a", "oidc_viewers": "*"},
        {"oidc_issuer": "https://id.example", "oidc_viewers": "*"},
        {"oidc_issuer": "https://id.example", "oidc_client_id": "a"},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="GLOWPLUG_OIDC_"):
        ConsoleSettings(**settings)
