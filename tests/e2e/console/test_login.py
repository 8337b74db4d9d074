"""The login page in a real browser, and requests from another site's page."""

import asyncio

import pytest
from playwright.async_api import Browser, Page, expect

from tests import browser as chromium
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest, addresses, owning, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEY = "key-of-this-console"


@pytest.fixture
def settings() -> dict[str, str]:
    return {"console_key": KEY, "allowed_hosts": "glowplug.example"}


async def log_in(page: Page, key: str = KEY) -> None:
    await page.get_by_label("Key or token").fill(key)
    await page.get_by_role("button", name="Log in").click()


@pytest.mark.complains("status of 401")
async def test_the_way_in_leads_to_the_view_that_was_asked_for(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/models")
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    await expect(page.get_by_label("Key or token")).to_be_focused()
    await log_in(page, "wrong")
    await expect(page.get_by_role("alert")).to_have_text("That is not this console's key.")
    await page.keyboard.type(KEY)  # the wrong key is selected: typing replaces it
    await page.keyboard.press("Enter")
    await until(page, "document.querySelectorAll('.model-line').length > 1")
    assert page.url == f"{at.url}/#/models"
    [cookie] = await page.context.cookies()
    assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
    assert await page.evaluate("document.cookie") == ""


async def test_the_way_out(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(at.url)
    await log_in(page)
    await until(page, "document.querySelectorAll('.node').length > 1")
    await page.evaluate("sessionStorage.setItem('glowplug.admin-token', 'kept')")
    await page.get_by_role("button", name="Log out").click()
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    assert await page.evaluate("sessionStorage.length") == 0
    await page.goto(f"{at.url}/")
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()


@pytest.mark.complains("responded with a status of")
async def test_a_page_whose_session_ends_shows_the_login_page(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/decisions")
    await log_in(page)
    await expect(page.get_by_text("live", exact=True)).to_be_visible()
    await at.publish(*story.fleet_events(at.clock.forward(13 * 3600)))
    await expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    assert page.url.endswith("#/decisions")


async def test_nothing_is_wider_than_a_small_screen(at: ConsoleUnderTest, page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.goto(at.url)
    await expect(page.get_by_role("button", name="Log in")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    assert await page.evaluate("document.querySelector('.login button').getBoundingClientRect().height") >= 34


EVIL = """
<img src="%s/api/v1/stream">
<script>
const asked = (type) => ({ method: "POST", mode: "no-cors", body: "{}", headers: { "Content-Type": type } });
const post = (type) => fetch("%s/api/v1/models/m/load", asked(type));
window.done = Promise.allSettled([post("text/plain"), post("application/x-www-form-urlencoded"), fetch("%s/session")]);
</script>
"""


async def test_a_page_of_another_site_does_nothing(browser: Browser) -> None:
    """From another origin on loopback no request is forwarded and no stream stays open."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    async with owning() as owner, serving(**addresses(owner)) as console:
        body = EVIL.replace("%s", console.url).encode()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        tab = await browser.new_page()
        await tab.goto(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        said = await tab.evaluate("window.done.then((all) => all.map((one) => one.status))")
        assert said == ["rejected"] * 3
        assert owner.asked == [] and not console.console.hub.clients
        await tab.close()
        server.close()


async def test_a_name_that_was_rebound_to_this_machine_shows_nothing() -> None:
    if chromium.CHROMIUM is None:
        pytest.skip(chromium.MISSING)
    async with serving(allowed_hosts="glowplug.example") as console:
        port = console.url.rpartition(":")[2]
        rules = "--host-resolver-rules=MAP evil.example 127.0.0.1, MAP glowplug.example 127.0.0.1"
        async with chromium.browsing(rules) as browser:
            tab = await browser.new_page()
            rebound = await tab.goto(f"http://evil.example:{port}/api/v1/fleet")
            assert rebound is not None and "GLOWPLUG_ALLOWED_HOSTS" in await rebound.text()
            known = await tab.goto(f"http://glowplug.example:{port}/api/v1/fleet")
            assert known is not None and (rebound.status, known.status) == (421, 200)
            await tab.close()
