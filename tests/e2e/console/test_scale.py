"""A large fleet and a slow reader: the page stays whole. `bench/console` measures speed."""

import argparse
import asyncio
import dataclasses

import pytest
from playwright.async_api import Page, expect

from bench.console.rig import fill
from bench.console.run import measure, parsed
from bench.console.synthetic import SyntheticFleet
from glowplug.events.facts import ModelDeployed
from tests import browser as chromium
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest, serving
from tests.slow_link import slow_link

pytestmark = pytest.mark.asyncio(loop_scope="session")

CARDS = "document.querySelectorAll('.node').length"


@pytest.mark.own_tab  # which it closes
async def test_two_hundred_nodes_and_five_hundred_models(page: Page) -> None:
    """A card out of sight is only a head until scrolled to."""
    fleet = SyntheticFleet(200, 8, 500)
    async with serving() as at:
        at.clock.stop()
        await fill(at.store, fleet)
        await page.goto(at.url)
        await until(page, f"{CARDS} === 200")
        await until(page, "document.querySelectorAll('.tile').length === 200")
        await expect(page.locator(".figures dd").nth(3)).to_contain_text("of 500")
        drawn = await page.evaluate("document.querySelectorAll('.gpu').length")
        assert 0 < drawn < 8 * 60, "most cards are heads only"
        last = page.locator(".node[data-node=node-200]")
        await last.scroll_into_view_if_needed()
        await expect(last.locator(".gpu")).to_have_count(8)
        await page.keyboard.press("/")
        await page.keyboard.type("node-137")
        await until(page, f"{CARDS} === 1")
        await expect(page.locator(".node .gpu")).to_have_count(8)
        await page.goto(f"{at.url}/#/models")
        await until(page, "document.querySelector('main').innerText.includes('500')")
        await page.close()  # else it complains of the lost console


@pytest.mark.own_tab  # which it closes
async def test_a_page_that_read_too_slowly_says_so_and_is_whole_again(page: Page) -> None:
    async with serving(stream_queue=4) as at, slow_link(int(at.url.rpartition(":")[2])) as link:
        await at.publish(*story.fleet_events(at.clock.stop()))
        await page.goto(link.url)
        await until(page, f"{CARDS} === 3")
        link.open.clear()
        revision = 2
        while not at.console.hub.num_dropped:
            await at.tell(*(deployed(number, revision) for number in range(400)))
            revision += 1
            await asyncio.sleep(0.06)  # so that each wave is its own message
        await at.tell(ModelDeployed(model=story.model("last", "the-last-one", 1)))
        link.open.set()
        await expect(page.locator("#status")).to_contain_text("dropped")
        whole = len(at.console.view.models)
        assert whole == 407
        await expect(page.locator(".figures dd").nth(3)).to_have_text(f"3 of {whole}")
        await page.close()


def deployed(number: int, revision: int) -> ModelDeployed:
    name = f"wide-{number}-{revision}-" + "x" * 1000
    return ModelDeployed(model=story.model(f"wide-{number}", name, 1, revision=revision))


async def test_what_comes_after_a_dropped_message_never_breaks_the_page(at: ConsoleUnderTest, page: Page) -> None:
    """Changes to rows the page never got wait for the next full read."""
    await page.goto(at.url)
    await until(page, f"{CARDS} === 3")
    await page.evaluate(
        """import("/page/live.js").then(({ live }) => live.patch({
             now: live.now, removed: { nodes: ["unknown"] },
             changed: { nodes: [{ node_id: "unseen", value: { draining: true } }],
                        models: [{ key: "unseen", joined: { num_waiting: 3 } }] },
           }))"""
    )
    await at.tell(ModelDeployed(model=story.model("aaa", "a-new-model", 20)))
    await expect(page.locator(".figures dd").nth(3)).to_have_text("3 of 7")
    assert await page.evaluate(CARDS) == 3


@pytest.mark.long
@pytest.mark.timeout(500)
async def test_the_bench_runs_from_the_bus_to_the_pixels() -> None:
    """A small run without bounds: real NATS and Valkey, a console process, a browser."""
    if chromium.CHROMIUM is None:
        pytest.skip(chromium.MISSING)
    small = ["--nodes", "6", "--gpus", "2", "--models", "12", "--loads", "1", "--marks", "5", "--minutes", "0.1"]
    args: argparse.Namespace = parsed(small)
    rows = await measure(args)
    seen = {row.what.strip(): row for row in rows}
    assert {"first contentful paint, median of 1 loads", "event to page, median of 5"} <= seen.keys()
    assert all(row.seen >= 0 or "grown" in row.what for row in rows)
    assert seen["page fell behind (0 no, 1 yes)"].seen == 0
    assert dataclasses.replace(rows[0], seen=10 * rows[0].bound).holds is False
