"""Tenants and keys in a real browser; nothing is readable without the admin token."""

import json
from typing import Any

import pytest
import pytest_asyncio
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from playwright.async_api import Page, expect

from tests.console_server import ADMIN_TOKEN, ConsoleUnderTest, FakeOwner, addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

NO_LIMITS = dict.fromkeys(
    ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month", "concurrent", "queued"), 0
)
WHOLE = "gp-abcdefgh-" + "s" * 43


def tenant(name: str, **more: Any) -> dict[str, Any]:
    row = {"name": name, "limits": NO_LIMITS, "model_limits": {}, "priority": "standard", "weight": 1.0, "source": ""}
    row["num_keys"] = 1
    return row | more


def key(key_id: str, name: str, **more: Any) -> dict[str, Any]:
    row = {"key_id": key_id, "prefix": f"gp-{key_id}", "tenant": "lab", "name": name, "models": ["*"], "source": ""}
    row |= {"surfaces": ["data"], "priority": None, "expires_at": 0, "revoked_at": 0, "state": "active"}
    return row | more


class AccessOwner(FakeOwner):
    def rows(self) -> dict[str, list[dict[str, Any]]]:
        self.__dict__.setdefault("held", {"tenants": [tenant("lab")], "keys": [key("aaaaaaaa", "bot")]})
        held: dict[str, list[dict[str, Any]]] = self.__dict__["held"]
        return held

    def app(self) -> Any:
        app = super().app()
        app.router.routes.pop()  # the catch-all action must be last again
        app.api_route("/v1/{table}", methods=["GET"])(self.listed)
        app.api_route("/v1/{table}/{name}", methods=["PUT", "PATCH", "DELETE"])(self.changed)
        app.post("/{path:path}")(self.made)
        return app

    async def listed(self, request: Request, table: str) -> Response:
        await self._note(request)
        refused = self._unauthorized(request, ADMIN_TOKEN)
        return refused or JSONResponse({"object": "list", "data": self.rows()[table]})

    async def changed(self, request: Request, table: str, name: str) -> Response:
        await self._note(request)
        if refused := self._unauthorized(request, ADMIN_TOKEN):
            return refused
        rows = self.rows()[table]
        if request.method == "PUT":
            rows.append(tenant(name, **json.loads(await request.body())))
        elif request.method == "PATCH":
            next(row for row in rows if row["key_id"] == name).update(json.loads(await request.body()))
        elif table == "keys":
            next(row for row in rows if row["key_id"] == name).update(revoked_at=1.0, state="revoked")
        else:
            rows[:] = [row for row in rows if row["name"] != name]
        return JSONResponse({})

    async def made(self, request: Request, path: str) -> Response:
        await self._note(request)
        if refused := self._unauthorized(request, ADMIN_TOKEN):
            return refused
        body = {name: value for name, value in json.loads(await request.body()).items() if name != "expires"}
        row = key("abcdefgh", **body)
        self.rows()["keys"].append(row)
        return JSONResponse(row | {"key": WHOLE}, status_code=201)


@pytest_asyncio.fixture(loop_scope="session")
async def owner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tests.console_server.FakeOwner", AccessOwner)
    from tests.console_server import owning

    async with owning() as far_side:
        yield far_side


@pytest.fixture
def settings(owner: FakeOwner) -> dict[str, str]:
    return addresses(owner)


@pytest_asyncio.fixture(loop_scope="session")
async def page(at: ConsoleUnderTest, page: Page) -> Page:
    await page.goto(f"{at.url}/#/fleet")
    await page.evaluate(f"sessionStorage.setItem('glowplug.admin-token', '{ADMIN_TOKEN}')")
    await page.evaluate("location.hash = '#/access'")
    await expect(page.get_by_role("status").filter(has_text="1 tenant, 1 key")).to_be_visible()
    return page


async def test_a_key_is_made_and_shown_this_once(owner: FakeOwner, page: Page) -> None:
    await page.get_by_role("button", name="New key").click()
    await page.get_by_label("Name", exact=True).fill("ci")
    await page.get_by_label("Models: names or patterns").fill("org/*, smol-chat")
    await page.get_by_label("Ends after days").fill("30")
    await page.get_by_label("Requests a minute").fill("60")
    await page.get_by_role("button", name="Create").click()
    await expect(page.get_by_text(WHOLE)).to_be_visible()
    await page.get_by_role("button", name="Done").click()
    await expect(page.get_by_text(WHOLE)).to_have_count(0)
    row = page.locator(".keys tr", has_text="gp-abcdefgh")
    await expect(row).to_contain_text("org/*, smol-chat")
    asked = next(json.loads(body) for method, path, _, body in owner.asked if (method, path) == ("POST", "/v1/keys"))
    wanted = {"tenant": "lab", "name": "ci", "models": ["org/*", "smol-chat"], "surfaces": ["data"], "expires": "30d"}
    assert asked == wanted | {"limits": {"requests_per_minute": 60}}
    assert WHOLE not in await page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")


async def test_a_key_is_limited_later(owner: FakeOwner, page: Page) -> None:
    await page.get_by_role("button", name="Edit bot").click()
    await expect(page.get_by_label("Tenant", exact=True)).to_be_disabled()
    await page.get_by_label("Requests at once").fill("2")
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator(".keys tr", has_text="gp-aaaaaaaa")).to_contain_text("at most 2 requests at once")
    asked = next(json.loads(body) for method, path, _, body in owner.asked if method == "PATCH")
    assert asked["limits"] == {"concurrent": 2} and "tenant" not in asked and "expires" not in asked


async def test_a_key_is_revoked_after_a_question(owner: FakeOwner, page: Page) -> None:
    await page.get_by_role("button", name="Revoke bot").click()
    await expect(page.get_by_text("Its next request is refused everywhere")).to_be_visible()
    await page.get_by_role("button", name="Revoke", exact=True).click()
    await expect(page.locator(".keys tr", has_text="gp-aaaaaaaa")).to_contain_text("revoked")
    assert "/v1/keys/aaaaaaaa" in owner.paths


async def test_a_tenant_is_made_with_limits_and_removed_with_its_keys(owner: FakeOwner, page: Page) -> None:
    await page.get_by_role("button", name="New tenant").click()
    await page.get_by_label("Name", exact=True).fill("acme")
    await page.get_by_label("Most urgent class").select_option("batch")
    await page.get_by_label("Tokens a day").fill("5000")
    await page.get_by_role("button", name="Save").click()
    row = page.locator(".tenants tr", has_text="acme")
    await expect(row).to_contain_text("5000 tokens a day")
    await expect(row).to_contain_text("batch")
    await page.get_by_role("button", name="Remove acme").click()
    await page.get_by_role("button", name="Remove", exact=True).click()
    await expect(row).to_have_count(0)
    assert owner.paths[-3:] == ["/v1/tenants/acme", "/v1/tenants", "/v1/keys"]


async def test_what_a_file_declares_is_changed_there(owner: AccessOwner, page: Page) -> None:
    owner.rows()["tenants"][0]["source"] = "/etc/access/lab.yaml"
    await page.reload()
    await expect(page.locator(".tenants tr", has_text="lab.yaml")).to_be_visible()
    await expect(page.get_by_role("button", name="Edit lab")).to_be_disabled()


async def test_on_a_phone_the_actions_of_a_key_are_in_sight(page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 844})
    for name in ("Edit bot", "Rotate bot", "Revoke bot", "Remove lab"):
        box = await page.get_by_role("button", name=name).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390, name
    await expect(page.locator(".keys td").first).to_have_attribute("data-column", "Key")


@pytest.mark.complains("responded with a status of")
async def test_without_the_token_nothing_is_shown(at: ConsoleUnderTest, page: Page) -> None:
    await page.evaluate("sessionStorage.clear()")
    await page.reload()
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.get_by_text("holders of the admin token only")).to_be_visible()
    await expect(page.get_by_text("gp-aaaaaaaa")).to_have_count(0)
