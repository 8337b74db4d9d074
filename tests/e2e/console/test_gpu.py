"""The view of one GPU in a real browser."""

from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from tests import console_story as story
from tests.console_server import ConsoleUnderTest, FakeOwner, addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

GPU = "node-2/0"
ASKED_AGAIN_S = 20.0


def holder(instance_id: str, model: str, mib: int, **fields: Any) -> dict[str, Any]:
    worth = fields.get("saves_s", 0.0) / (mib << 20)
    return {
        "instance_id": instance_id, "model": model, "rung": "ready", "num_bytes": mib << 20, "asked": 1.0,
        "climb_s": 0.046, "saves_s": 0.0, "worth": worth, "state": "ready", "order": 0, "why": "", **fields,
    }  # fmt: skip


@pytest.fixture
def settings(owner: FakeOwner) -> dict[str, str]:
    replica = holder("r-1", story.MARKUP, 137, rung="prewarmed", state="prewarmed", asked=0.12, climb_s=0.281,
                     saves_s=0.0337, order=1)  # fmt: skip
    busy = holder("i-0a9e", "smol-poet", 203, saves_s=0.046, why="it has 1 request in flight")
    asleep = holder("s-1", "night", 16, rung="asleep", state="swapped_out", why="it is asleep")
    whole = {"gpu_id": GPU, "total_bytes": 640 << 20, "free_bytes": 284 << 20}
    owner.prices = {
        GPU: {**whole, "holders": [replica, busy, asleep]},
        "node-3/0": {**whole, "gpu_id": "node-3/0", "free_bytes": 640 << 20, "holders": []},
    }
    return addresses(owner)


async def test_a_click_on_a_gpu_leads_to_its_prices_and_on_to_the_model(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(at.url)
    await page.locator(".node[data-node=node-2] a.gpu").click()
    assert await page.evaluate("location.hash") == "#/gpu/node-2%2F0"
    rows = page.locator(".prices-panel tbody tr")
    await expect(rows).to_have_count(3)
    assert [await rows.nth(n).locator("td, th").all_text_contents() for n in range(3)] == [
        ["next", "r-1 ", story.MARKUP, "prewarmed", "137 MiB", "0.12", "281 ms", "0.252", "–"],
        ["stays", "i-0a9e ", "smol-poet", "ready", "203 MiB", "1", "46 ms", "0.232", "it has 1 request in flight"],
        ["–", "s-1 ", "night", "asleep", "16 MiB", "1", "46 ms", "0", "it is asleep"],
    ]
    assert "owned" not in await page.title()
    facts = await page.locator(".facts dd").all_text_contents()
    assert facts[:4] == ["host memory", "284 MiB of 640 MiB", "3", "r-1"]
    await page.get_by_role("link", name="smol-poet").click()
    assert await page.evaluate("location.hash") == "#/model/smol-poet"


async def test_prices_follow_what_the_placer_says_and_stay_with_their_time_when_it_is_gone(
    at: ConsoleUnderTest, page: Page, owner: FakeOwner
) -> None:
    await page.goto(f"{at.url}/#/gpu/{GPU}")
    await expect(page.locator(".prices-panel tbody tr")).to_have_count(3)
    await page.get_by_role("link", name="smol-poet").focus()
    owner.prices[GPU]["holders"].pop()
    at.clock.forward(2.0)
    await expect(page.locator(".prices-panel tbody tr")).to_have_count(2, timeout=ASKED_AGAIN_S * 1000)
    await expect(page.get_by_role("link", name="smol-poet")).to_be_focused()
    owner.prices[GPU] = {"gpu_id": GPU}
    at.clock.forward(2.0)
    problem = page.locator(".gpu-view [role=status]")
    await expect(problem).to_contain_text("not a price list", timeout=ASKED_AGAIN_S * 1000)
    await expect(problem).to_contain_text("Stale: these are the prices of ")
    await expect(page.locator(".prices-panel tbody tr")).to_have_count(2)


@pytest.mark.complains("404")
async def test_a_gpu_that_is_free_and_one_that_is_none(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/gpu/node-3%2F0")
    await expect(page.locator(".prices-panel .empty")).to_contain_text("Nothing is on this GPU")
    await expect(page.locator(".facts")).to_contain_text("none")
    await page.evaluate("location.hash = '#/gpu/node-9/7'")
    await expect(page.locator("h1")).to_have_text("No such GPU")
    await expect(page.locator(".prices-panel .empty")).to_contain_text("no GPU 'node-9/7'")


@pytest.mark.complains("503")
async def test_a_console_that_answers_an_error_is_no_gpu_that_is_missing(at: ConsoleUnderTest, page: Page) -> None:
    async def refuse(route: Route) -> None:
        await route.fulfill(status=503, json={"error": {"message": "starting", "type": "unavailable"}})

    await page.route("**/api/v1/gpus/**", refuse)
    await page.goto(f"{at.url}/#/gpu/{GPU}")
    problem = page.locator(".gpu-view [role=status]")
    await expect(problem).to_have_text("The console answered 503.")
    await expect(page.locator("h1")).to_have_text(f"GPU {GPU}")
    await page.unroute("**/api/v1/gpus/**")
    await expect(page.locator(".prices-panel tbody tr")).to_have_count(3, timeout=ASKED_AGAIN_S * 1000)
    await expect(problem).to_be_hidden()
    await page.route("**/api/v1/gpus/**", refuse)
    await expect(problem).to_contain_text("The console answered 503. Stale", timeout=ASKED_AGAIN_S * 1000)
    await expect(page.locator(".prices-panel tbody tr")).to_have_count(3)
