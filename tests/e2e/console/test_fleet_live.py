"""A real (emulated) fleet seen on its own console: a cold chat, a node that falls silent, a console that dies."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests import browser as chromium
from tests.browser import until
from tests.fleet_runner import EMULATED, Fleet

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.fleet, pytest.mark.timeout(300)]
SLOW_MS = 60_000  # a fleet of processes on a busy machine


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    if chromium.CHROMIUM is None:
        pytest.skip(chromium.MISSING)
    started = Fleet.start(tmp_path, {"sleeper": EMULATED.format(name="sleeper", keep_alive_s=600)}, nodes=2)
    try:
        yield started
    finally:
        started.stop()


async def test_a_fleet_is_seen_as_it_lives(fleet: Fleet, page: Page, complaints: list[str]) -> None:
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
    answer = await asyncio.to_thread(fleet.chat, "sleeper")
    assert answer.status_code == 200
    await until(page, "window.states.at(-1) === 'state ready'", within_s=60)
    seen = await page.evaluate("window.states")
    assert {"state starting", "state loading"} & set(seen), f"the start was seen on its way: {seen}"
    holder = page.locator(".holder", has_text="sleeper")
    await expect(holder).to_have_count(1)
    await expect(page.locator(".grant.weights.owned")).to_have_count(1)
    await expect(page.locator(".decisions .kind.place")).to_have_count(1)
    await holder.get_by_role("link").click()
    await expect(page.locator("h1")).to_contain_text("sleeper")
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
    await expect(page.locator(".holder", has_text="sleeper")).to_have_count(1, timeout=SLOW_MS)
    assert all("ERR_" in complaint for complaint in complaints), complaints
    complaints.clear()
