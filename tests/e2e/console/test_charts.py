"""Charts over time and the usage page: content, keys, tables; without uPlot, without data, on a phone."""

import dataclasses
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, Route, expect

from glowplug.domain.instance import InstanceState
from glowplug.domain.usage import UsageRecord
from glowplug.events.facts import InstanceReady
from glowplug.services.console.history import Sample
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest
from tests.e2e.console.test_access import COLOURS, JUDGE, RULES, faults

pytestmark = pytest.mark.asyncio(loop_scope="session")

INKED = """(() => {
  const canvas = document.querySelector('.charts-tokens canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const colours = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) colours.add(data.slice(i, i + 3).join());
  return colours.size;
})()"""
CONTROLS = "main button, main a, main select, main summary, main [role=slider]"
COVERED = (
    f"""[...document.querySelectorAll('{CONTROLS}')]"""
    + """.filter((at) => {
  if (!at.checkVisibility()) return false;
  at.scrollIntoView({ block: 'center' });
  const box = at.getBoundingClientRect();
  const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  return box.left < 0 || box.right > innerWidth + 0.5 || !(at.contains(top) || top?.contains(at));
}).map((at) => at.outerHTML.slice(0, 120))"""
)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    prices = tmp_path / "prices.yaml"
    prices.write_text('models:\n  "*": {prompt: 1, response: 4, gpu_second: 0.01}\n')
    return {"usage_database_url": f"sqlite:///{tmp_path / 'usage.db'}", "usage_prices": str(prices)}


@pytest.fixture
async def busy(at: ConsoleUnderTest) -> AsyncIterator[ConsoleUnderTest]:
    end, history = at.clock(), at.console.history.history
    for number in range(180):
        now_s = end - 1790 + 10 * number
        if 60 <= number < 90:
            continue
        for one in range(number % 7):
            fact = dataclasses.replace(story.request_finished(number + one, now_s), tenant="acme")
            history.take(story.fact(fact, now_s, number), now_s)
        used = (20 + number % 30) << 30
        history.sample(Sample({"smol-chat": number % 5}, {"smol-chat": 2}, used, 1 << 30, 80 << 30), now_s)
    ready = story.instance("i-new", "smol-chat", "node-1", InstanceState.READY, end)
    await at.tell(InstanceReady(instance=dataclasses.replace(ready, start_kind="growth")))
    at.console.ledger.add([record(number, end) for number in range(60)])
    yield at


def record(number: int, end: float) -> UsageRecord:
    tenant, model = ("acme", "globex", "")[number % 3], ("smol-chat", "smol-poet")[number % 2]
    finished_at = end - 3600 * (number % 40)
    tokens: Any = {"prompt_tokens": 1000, "cached_tokens": 0, "response_tokens": 100 * number, "tokens_exact": True}
    key: Any = {"tenant": tenant, "key_id": "k1" if tenant else "", "model_key": model, "path": "/v1/chat/completions"}
    times: Any = {"arrived_at": finished_at - 2, "finished_at": finished_at, "held_s": 0.1, "cold": False}
    ids: Any = {"record_id": f"u-{number}", "request_id": f"r-{number}", "instance_id": "i-1", "status": 200}
    gpu: Any = {"gpu_s": 2.5, "gpu_known": True} if tenant == "acme" else {}
    return UsageRecord(**ids, **key, **tokens, **times, **gpu)


async def has_a_row_a_slot(page: Page, chart: str) -> None:
    await until(page, f"[359, 360].includes(document.querySelectorAll('{chart} tbody tr').length)")


async def test_six_charts_are_drawn_read_by_keys_and_as_tables(busy: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{busy.url}/#/charts")
    await expect(page.locator("canvas")).to_have_count(6)
    assert await page.evaluate(INKED) > 8, "two lines and a grid"
    tokens = page.get_by_role("slider", name="Tokens a second, moment")
    await tokens.focus()
    assert re.search(r"prompt [\d.]+, response [\d.]+", await tokens.get_attribute("aria-valuetext") or "")
    await page.keyboard.press("Home")
    assert "nothing measured" in (await tokens.get_attribute("aria-valuetext") or ""), "half an hour before the first"
    await page.get_by_role("slider", name="GPU memory, moment").press("ArrowLeft")
    await expect(page.locator(".charts-gpu .chart-readout")).to_contain_text("capacity 80 GiB")
    await expect(page.locator(".charts-starts .chart-legend")).to_contain_text("prewarmed")
    await expect(page.locator(".charts-view .tools")).to_contain_text("emulated")
    await page.locator(".charts-hits summary").click()
    await has_a_row_a_slot(page, ".charts-hits")
    await expect(page.locator(".charts-hits tbody td").filter(has_text="%").first).to_be_visible()


async def test_span_and_model_stand_in_the_address(busy: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{busy.url}/#/charts")
    await page.get_by_role("button", name="7d").click()
    await expect(page.locator(".charts-view .tools .note")).to_contain_text("slots of 20 min")
    await page.locator("#charts-model").select_option("smol-poet")
    assert page.url.endswith("#/charts/span=7d&model=smol-poet")
    await expect(page.locator(".charts-gpu")).to_be_hidden()
    await expect(page.locator(".charts-starts .chart-readout")).to_contain_text("cold 0")


@pytest.mark.own_tab  # its clock
async def test_an_open_page_goes_on(busy: ConsoleUnderTest, page: Page) -> None:
    await page.clock.install()
    await page.goto(f"{busy.url}/#/charts")
    await expect(page.locator("canvas")).to_have_count(6)
    canvas = await page.query_selector(".charts-tokens canvas")
    busy.clock.forward(15 - busy.clock() % 10)  # mid-slot: one that has just begun is not drawn
    await busy.tell(dataclasses.replace(story.request_finished(1, busy.clock()), prompt_tokens=90_000))
    await page.clock.fast_forward(11_000)
    await expect(page.locator(".charts-tokens .chart-readout")).to_contain_text("k, response")
    assert canvas is not None and await canvas.evaluate("(at) => at.isConnected"), "the plot is filled, not made anew"


async def test_a_new_console_says_that_nothing_was_measured(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/charts/model=nobody")
    await expect(page.locator(".charts-ttft .empty")).to_have_text("Nothing was measured in this time.")


async def test_without_uplot_the_page_says_so_and_shows_tables(busy: ConsoleUnderTest, page: Page) -> None:
    async def without(route: Route) -> None:
        answer = await route.fetch()
        await route.fulfill(response=answer, body=(await answer.text()).replace('name="uplot"', 'name="nothing"'))

    await page.route(f"{busy.url}/", without)
    await page.goto(f"{busy.url}/#/charts")
    await expect(page.locator(".chart-missing").first).to_contain_text("needs the Python package uplot-python")
    await has_a_row_a_slot(page, ".charts-tokens")
    await expect(page.locator("canvas")).to_have_count(0)


async def test_usage_is_shown_by_tenant_model_and_key_and_taken_as_csv(busy: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{busy.url}/#/usage")
    await expect(page.locator(".usage-sums tbody th")).to_have_text(["no tenant", "globex", "acme"])
    await expect(page.locator(".usage-sums tbody tr").first).to_contain_text("20,000")
    await expect(page.locator(".usage-sums thead th").nth(-2)).to_have_text("GPU seconds")
    gpu_s = page.locator(".usage-sums tbody td:nth-last-child(2)")
    await expect(gpu_s).to_have_text(["–", "–", "50"])
    await expect(page.locator(".usage-sums tbody td:last-child").last).to_have_text("0.75")
    await expect(page.get_by_role("img", name="Usage over time")).to_be_visible()
    await page.get_by_role("button", name="tenant and model").click()
    await expect(page.locator(".usage-sums tbody tr")).to_have_count(6)
    await page.get_by_role("button", name="30d").click()
    await page.get_by_role("button", name="cost").click()
    assert page.url.endswith("#/usage/span=30d&by=tenant+and+model&show=cost")
    await expect(page.locator(".usage-view .tools .note")).to_have_text("6 groups, by the day")
    async with page.expect_download() as download:
        await page.get_by_role("link", name="Download CSV").click()
    lines = Path(await (await download.value).path()).read_text().splitlines()
    assert lines[0].startswith("day,tenant,model,num_requests") and "acme" in lines[1] + lines[2] + lines[3]


async def test_without_usage_the_page_says_so(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/usage")
    await expect(page.locator(".usage-chart .empty")).to_have_text("No request has ended in this time.")


@pytest.mark.parametrize("view", ["charts", "usage", "charts/span=7d"])
async def test_on_a_phone_nothing_is_cut_or_covered(busy: ConsoleUnderTest, page: Page, view: str) -> None:
    await page.set_viewport_size({"width": 390, "height": 844})
    await page.goto(f"{busy.url}/#/{view}")
    await until(page, "document.querySelectorAll('canvas').length > 0")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    assert await page.evaluate(COVERED) == []


@pytest.mark.parametrize("view", ["charts", "usage"])
async def test_axe_finds_nothing_in_charts_with_data(busy: ConsoleUnderTest, page: Page, view: str) -> None:
    """One table is open; the light theme is checked only for colour."""
    await page.goto(f"{busy.url}/#/{view}")
    await until(page, "document.querySelectorAll('canvas').length > 0")
    await page.locator("main summary").first.click()
    await page.evaluate(Axe().axe_script)
    assert faults(await page.evaluate(JUDGE, RULES)) == []
    await page.emulate_media(color_scheme="light")
    assert faults(await page.evaluate(JUDGE, COLOURS)) == []


async def test_colours_follow_the_theme(busy: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{busy.url}/#/charts")
    await expect(page.locator("canvas")).to_have_count(6)
    pixels = "document.querySelector('.charts-tokens canvas').toDataURL()"
    dark = await page.evaluate(pixels)
    await page.emulate_media(color_scheme="light")
    await until(page, f"{pixels} !== {dark!r}")
