"""The console of a real fleet, as a person uses it: a cold model woken in the playground, its trace, its unloading."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.browser import expected
from tests.fleet_runner import EMULATED, Fleet

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.fleet, pytest.mark.timeout(300)]
PATIENCE_MS = 60_000
NAME = "emulated-e2e"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    running = Fleet.start(tmp_path, {NAME: EMULATED.format(name=NAME, keep_alive_s=120)}, nodes=1)
    yield running
    running.cli("down")


async def test_wake_a_model_find_its_trace_and_put_it_away(fleet: Fleet, page: Page, complaints: list[str]) -> None:
    document = fleet.document
    await page.goto(f"{document['urls']['console']}/#/playground/{NAME}")
    await expect(page.locator(".model-card")).to_contain_text("cold", timeout=PATIENCE_MS)
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    await page.get_by_label("Longest answer").fill("12")
    await page.get_by_label("Message").fill("Wake up")
    await page.keyboard.press("Enter")
    await expect(page.locator(".waking")).to_contain_text("Starting on node-1", timeout=PATIENCE_MS)
    foot = page.locator(".turn.model .foot")
    await expect(foot).to_contain_text("total", timeout=PATIENCE_MS)
    await expect(page.locator(".turn.model .text:not(.thought)")).to_contain_text("[emulated]")
    await expect(page.locator(".turn.model h2 .emulated")).to_be_visible()
    for phase in ("queue", "launch", "load"):
        await expect(foot).to_contain_text(phase)

    await foot.get_by_role("link", name="trace").click()
    rows = page.get_by_role("treegrid").get_by_role("row")
    await expect(rows.filter(has_text="router").first).to_be_visible(timeout=PATIENCE_MS)
    await expect(rows.filter(has_text="agent").first).to_be_visible(timeout=PATIENCE_MS)

    await page.get_by_role("navigation", name="Views").get_by_role("link", name="Requests").click()
    row = page.locator(".requests-view tbody tr")
    await expect(row).to_have_count(1)
    await expect(row).to_contain_text("cold start")

    await page.get_by_role("navigation", name="Views").get_by_role("link", name="Models").click()
    await page.get_by_role("button", name=f"Unload {NAME}").click()
    await page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    await page.get_by_label("Admin token").fill(document["admin_token"])
    await page.keyboard.press("Enter")
    await expect(page.locator(".notes .good")).to_contain_text("is told to unload")
    await expect(page.get_by_role("button", name=f"Load {NAME}")).to_be_visible(timeout=PATIENCE_MS)
    await expected(page, complaints)
