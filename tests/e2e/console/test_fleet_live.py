"""A real (emulated) fleet on its own console: a model wakes and unloads, a node falls silent, a console dies."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
from playwright.async_api import Page, expect

from tests import browser as chromium
from tests.browser import until
from tests.fleet_runner import EMULATED, Fleet

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.fleet, pytest.mark.timeout(500)]
SLOW_MS = 60_000
NAME = "sleeper"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Shared: the first test leaves its model cold again. Nothing is prewarmed: a copy on the other node, which the
    forecast asks for after some 40 s, would be a second holder."""
    if chromium.CHROMIUM is None:
        pytest.skip(chromium.MISSING)
    with Fleet.start(
        tmp_path_factory.mktemp("fleet"),
        {NAME: EMULATED.format(name=NAME, keep_alive_s=600)},
        nodes=2,
        GLOWPLUG_POLICY_PREWARMING="none",
    ) as started:
        yield started


@pytest.mark.complains("responded with a status of")
async def test_wake_a_model_find_its_trace_and_put_it_away(fleet: Fleet, page: Page) -> None:
    document = fleet.document
    await page.goto(f"{document['urls']['console']}/#/playground/{NAME}")
    await expect(page.locator(".model-card")).to_contain_text("cold", timeout=SLOW_MS)
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    await page.get_by_label("Longest answer").fill("12")
    await page.get_by_label("Message").fill("Wake up")
    await page.keyboard.press("Enter")
    await expect(page.locator(".waking")).to_contain_text("Starting on node-1", timeout=SLOW_MS)
    foot = page.locator(".turn.model .foot")
    await expect(foot).to_contain_text("total", timeout=SLOW_MS)
    await expect(page.locator(".turn.model .text:not(.thought)")).to_contain_text("[emulated]")
    await expect(page.locator(".turn.model h2 .emulated")).to_be_visible()
    for phase in ("queue", "launch", "load"):
        await expect(foot).to_contain_text(phase)

    await foot.get_by_role("link", name="trace").click()
    rows = page.get_by_role("treegrid").get_by_role("row")
    await expect(rows.filter(has_text="router").first).to_be_visible(timeout=SLOW_MS)
    await expect(rows.filter(has_text="agent").first).to_be_visible(timeout=SLOW_MS)

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
    await expect(page.get_by_role("button", name=f"Load {NAME}")).to_be_visible(timeout=SLOW_MS)


@pytest.mark.complains("ERR_")
async def test_a_fleet_is_seen_as_it_lives(fleet: Fleet, page: Page) -> None:
    await page.goto(fleet.url("console"))
    await expect(page.locator(".node")).to_have_count(2, timeout=SLOW_MS)
    await expect(page.locator(".node-head .badge.emulated")).to_have_count(2)
    await expect(page.locator(".figures dd").nth(3)).to_have_text("0 of 1")
    states = "window.states ??= []"
    await page.evaluate(
        f"""{states}; new MutationObserver(() => {{
          const word = document.querySelector(".motion .state")?.className;
          if (word && window.states.at(-1) !== word) window.states.push(word);
        }}).observe(document.querySelector(".motion-panel"), {{ childList: true, subtree: true }})"""
    )
    placed = page.locator(".decisions .kind.place")
    before = await placed.count()
    answer = await asyncio.to_thread(fleet.chat, NAME)
    assert answer.status_code == 200
    await until(page, "window.states.at(-1) === 'state ready'", within_s=60)
    seen = await page.evaluate("window.states")
    assert {"state starting", "state loading"} & set(seen), f"the start was seen on its way: {seen}"
    holder = page.locator(".holder", has_text=NAME)
    await expect(holder).to_have_count(1)
    await expect(page.locator(".grant.weights.owned")).to_have_count(1)
    await expect(placed).to_have_count(before + 1)
    await holder.get_by_role("link").click()
    await expect(page.locator("h1")).to_contain_text(NAME)
    await page.go_back()

    agent = int(fleet.process("agent-2")["pid"])
    os.kill(agent, signal.SIGSTOP)
    try:
        await expect(page.locator(".node.silent .node-state")).to_contain_text("silent since", timeout=SLOW_MS)
        assert await page.locator(".node.silent").get_attribute("data-node") == "node-2"
    finally:
        os.kill(agent, signal.SIGCONT)
    await expect(page.locator(".node.silent")).to_have_count(0, timeout=SLOW_MS)

    os.kill(int(fleet.process("console")["pid"]), signal.SIGKILL)
    await expect(page.locator("#status")).to_contain_text("stale since", timeout=SLOW_MS)
    await expect(page.locator(".node")).to_have_count(2)
    await expect(page.locator("#status")).to_have_text("live", timeout=SLOW_MS)
    await expect(page.locator(".holder", has_text=NAME)).to_have_count(1, timeout=SLOW_MS)
