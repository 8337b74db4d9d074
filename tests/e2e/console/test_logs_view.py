"""The fleet's logs in the page: followed, filtered and linked."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from glowplug.telemetry.log_ring import LogRing
from tests import console_story as story
from tests.console_server import ADMIN_TOKEN, ConsoleUnderTest
from tests.e2e.console.test_access import JUDGE, RULES, faults
from tests.integration.test_logs import filled, process

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def settings() -> dict[str, str]:
    return {"admin_token": ADMIN_TOKEN}


@pytest_asyncio.fixture(loop_scope="session")
async def ring(at: ConsoleUnderTest) -> AsyncIterator[LogRing]:
    made, now = LogRing(), time.time()
    ids = {"request_id": "req-0000", "trace_id": story.trace_id(0), "model": "smol-chat"}
    made.put(now - 9, "info", "a request for smol-chat waited 3.10 s for a start of its model", ids)
    made.put(now - 8, "info", "decided to place: node-1/0 has room", {"decision_id": "d-3", "instance": "i-7f2"})
    made.put(now - 7, "warning", "failed to publish request.waiting on the bus", {"model": "smol-poet"})
    made.put(now - 6, "error", "failed", {"exception": "Traceback\n  here\nValueError: no"})
    async with process(made) as url:
        await filled(at, url)
        yield made


@pytest_asyncio.fixture(loop_scope="session")
async def page(at: ConsoleUnderTest, ring: LogRing, page: Page) -> Page:
    await at.publish(*story.cold_trace(0, time.time() - 5, "smol-chat", "req-0000"))
    await page.goto(f"{at.url}/#/fleet")
    await page.evaluate(f"sessionStorage.setItem('glowplug.admin-token', '{ADMIN_TOKEN}')")
    await page.evaluate("location.hash = '#/logs/service=router-1'")
    await expect(page.locator(".log-line")).to_have_count(4)
    return page


async def test_lines_are_followed_as_they_come(ring: LogRing, page: Page) -> None:
    for n in range(60):
        ring.put(time.time(), "info", f"line {n}", {})
    await expect(page.locator(".log-line").last).to_contain_text("line 59")
    await expect(page.locator(".log-line").last).to_be_in_viewport()
    await page.locator(".log-box").evaluate("(box) => { box.scrollTop = 0; }")
    await expect(page.get_by_role("button", name="Follow")).to_have_attribute("aria-pressed", "false")
    ring.put(time.time(), "info", "meanwhile", {})
    await page.keyboard.press("f")
    await expect(page.locator(".log-line").last).to_contain_text("meanwhile")
    assert await page.locator(".log-line").count() == 65


async def test_filters_stand_in_the_address_and_ids_are_taken_back(ring: LogRing, page: Page) -> None:
    await page.get_by_label("Level").select_option("warning")
    await expect(page.locator(".log-line")).to_have_count(2)
    await page.get_by_label("Filter by text").fill("BUS")
    await expect(page.locator(".log-line")).to_have_count(1)
    assert await page.evaluate("location.hash") == "#/logs/service=router-1&level=warning&q=BUS"
    await page.evaluate("location.hash = '#/logs/service=router&id=d-3%2Creq-0000'")
    await expect(page.locator(".log-line")).to_have_count(2)
    await page.get_by_role("button", name="Do not ask for d-3").click()
    await expect(page.locator(".log-line")).to_have_count(1)
    await page.get_by_role("link", name="model smol-chat").click()
    await expect(page.get_by_role("heading", name="smol-chat")).to_be_visible()
    await page.get_by_role("link", name="Logs", exact=True).last.click()
    await expect(page.locator(".log-line", has_text="waited 3.10 s").first).to_be_visible()


async def test_a_slow_request_leads_to_its_trace_its_decision_and_its_lines(page: Page) -> None:
    await page.locator(".log-line a", has_text="trace").first.click()
    await expect(page.get_by_role("link", name="Log lines")).to_be_visible()
    await page.get_by_role("link", name="Log lines").click()
    await expect(page.locator(".log-line", has_text="waited 3.10 s").first).to_be_visible()
    await page.evaluate("location.hash = '#/logs/id=d-3'")
    await page.locator(".log-line a", has_text="decision").first.click()
    await page.get_by_role("link", name="lines about it").click()
    await expect(page.locator(".log-line", has_text="node-1/0 has room").first).to_be_visible()


async def test_a_source_that_does_not_answer_is_named(page: Page) -> None:
    await page.evaluate("location.hash = '#/logs/service=placer'")
    await expect(page.get_by_text("not read: placer-9 (the placer-9 does not answer at")).to_be_visible()


@pytest.mark.complains("401")
async def test_without_the_token_no_line_is_shown(page: Page) -> None:
    await page.evaluate("sessionStorage.clear()")
    await page.reload()
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.locator(".log-line")).to_have_count(0)
    await expect(page.get_by_text("holders of the admin token only").first).to_be_visible()


async def test_axe_finds_nothing_in_either_theme_and_a_phone_shows_all_of_it(page: Page) -> None:
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.evaluate("location.hash = '#/logs/service=router&id=d-3%2Creq-0000'")
    await expect(page.get_by_role("button", name="Do not ask for d-3")).to_be_visible()
    await asyncio.sleep(0.2)
    assert await page.evaluate("document.documentElement.scrollWidth") == 390
    await page.evaluate(Axe().axe_script)
    schemes: tuple[Any, ...] = ("dark", "light")
    for scheme in schemes:
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert faults(await page.evaluate(JUDGE, RULES)) == []
