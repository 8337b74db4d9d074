"""Viewer and admin in a real browser, with OpenID Connect."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from glowplug.domain.access import KEYS, ApiKey, Surface, digest_of
from glowplug.events.envelope import to_json
from tests import console_story as story
from tests.console_server import ADMIN_TOKEN, ConsoleUnderTest, FakeOwner, addresses, serving
from tests.e2e.console.test_access import COLOURS, JUDGE, faults
from tests.oidc_provider import Provider, providing

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEY = "gp-abcdefgh-" + "s" * 43
ROW = ApiKey(key_id="abcdefgh", tenant="lab", name="wall", sha256=digest_of(KEY), surfaces=(Surface.READ,))


@pytest_asyncio.fixture(loop_scope="session")
async def issuer() -> AsyncIterator[Provider]:
    async with providing() as provider:
        yield provider


@pytest_asyncio.fixture(loop_scope="session")
async def at(issuer: Provider, owner: FakeOwner) -> AsyncIterator[ConsoleUnderTest]:
    settings = issuer.settings(admin_token=ADMIN_TOKEN, **addresses(owner))
    async with serving(**settings) as console:
        await console.store.put(KEYS, ROW.key_id, to_json(ROW))
        await console.publish(*story.fleet_events(console.clock.stop()))
        yield console
        await console.console.upstream.close()


async def log_in(page: Page, at: ConsoleUnderTest, key: str, view: str) -> None:
    await page.goto(f"{at.url}/{view}")
    await page.get_by_label("Key or token").fill(key)
    await page.get_by_role("button", name="Log in").click()


async def check_axe(page: Page, name: str) -> None:
    """The light theme is checked only for colour."""
    found = await Axe().run(page, options={"resultTypes": ["violations"]})
    assert found.violations_count == 0, f"{name}: {found.generate_report()}"
    await page.emulate_media(color_scheme="light")
    assert faults(await page.evaluate(JUDGE, COLOURS)) == [], name
    await page.emulate_media(color_scheme="dark")


@pytest.mark.complains("status of 403")
async def test_a_viewer_reads_and_changes_nothing(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    await log_in(page, at, KEY, "#/models")
    await expect(page.locator("#who")).to_have_text("viewer key gp-abcdefgh (lab/wall)")
    button = page.get_by_role("button", name="Unload smol-chat")
    await expect(button).to_be_disabled()
    await expect(button).to_have_attribute("title", "Your role is viewer; this needs the role operator")
    await check_axe(page, "models")
    status = await page.evaluate("fetch('/api/v1/models/smol-chat/unload', {method: 'POST'}).then((a) => a.status)")
    assert status == 403 and owner.asked == [], "the page is no guard"


async def test_an_admin_acts_without_giving_the_token_again(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    await log_in(page, at, ADMIN_TOKEN, "#/models")
    await expect(page.locator("#who")).to_have_text("admin the admin token")
    await page.get_by_role("button", name="Unpin smol-chat").click()
    await expect(page.get_by_role("complementary").get_by_text("is no longer pinned")).to_be_visible()
    [(_, path, headers, _)] = owner.asked
    assert (path, headers["x-glowplug-actor"]) == ("/v1/models/smol-chat/unpin", "the admin token")


async def test_the_way_there_and_back_and_out(at: ConsoleUnderTest, issuer: Provider, page: Page) -> None:
    await page.goto(f"{at.url}/#/models")
    await page.get_by_role("link", name=f"Log in at {issuer.url.removeprefix('http://')}").click()
    await expect(page.locator("#who")).to_have_text("operator ann@example.org")
    assert page.url == f"{at.url}/#/models"
    await expect(page.get_by_role("button", name="Unload smol-chat")).to_be_enabled()
    await page.get_by_role("button", name="Log out").click()
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    assert issuer.asked[-1] == "logout"
    issuer.claims["groups"] = ["visitors"]
    await page.get_by_role("link", name="Log in at ").click()
    await expect(page.get_by_role("alert")).to_contain_text("none of your groups has a role here")
    assert page.url == f"{at.url}/login"


BELOW_THE_HEAD = "(({ scrollHeight: a, clientHeight: b }) => a - b)(document.querySelector('.top'))"


@pytest.mark.complains("status of 401")
async def test_a_page_whose_key_is_revoked_shows_the_login_page(at: ConsoleUnderTest, page: Page) -> None:
    await log_in(page, at, KEY, "#/decisions")
    await expect(page.get_by_text("live", exact=True)).to_be_visible()
    await at.store.put(KEYS, ROW.key_id, to_json(replace(ROW, revoked_at=1.0)))
    await at.publish(*story.fleet_events(at.clock.forward(2.0)))
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()


# Controls of the head that are cut or covered, unless scrollable into view.
COVERED = """[...document.querySelectorAll(".top nav a, #status, #who, #logout, #help-button")].filter((part) => {
  const box = part.getBoundingClientRect(), row = part.closest("nav")?.getBoundingClientRect();
  if (row && (box.right > row.right || box.left < row.left) && row.width + 40 > innerWidth) return false;
  const seen = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  return box.width < 20 || box.left < 0 || box.right > innerWidth || !(part.contains(seen) || seen?.contains(part));
}).map((part) => part.textContent)"""


async def test_who_is_here_fits_a_small_screen(at: ConsoleUnderTest, page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.goto(at.url)
    await expect(page.get_by_role("link", name="Log in at ")).to_be_visible()
    await check_axe(page, "login")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    await log_in(page, at, KEY, "#/models")
    await expect(page.locator("#who")).to_be_visible()
    await check_axe(page, "models")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    for width in (390, 800, 1280, 1440, 1480):
        await page.set_viewport_size({"width": width, "height": 844})
        assert await page.evaluate(COVERED) == [], width
        assert await page.evaluate(BELOW_THE_HEAD) <= 1
