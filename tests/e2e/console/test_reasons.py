"""Decisions, traces, events and forecasts on the page."""

import dataclasses
import re
import time

import pytest
from playwright.async_api import Page, expect

from glowplug.events import Event
from glowplug.events.commands import StopInstance
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROWS = "[...document.querySelectorAll('.event-row')]"


def stop(number: int) -> Event:
    data = StopInstance(target="node-1", instance_id=f"i-{number}", reason="idle")
    return dataclasses.replace(story.fact(data, time.time()), event_id=f"e-stop-{number}")


async def test_decisions_are_filtered_by_what_stands_in_the_address(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/decisions")
    rows = page.locator(".decision-list tbody tr")
    await expect(rows).to_have_count(6)
    await page.select_option("#decision-kind", "evict")
    await expect(rows).to_have_count(1)
    assert page.url.endswith("#/decisions/kind=evict")
    await page.reload()
    await expect(rows).to_have_count(1)
    await page.select_option("#decision-kind", "")
    await page.fill("#decision-filter", "320 MiB")
    await expect(rows).to_have_count(1)
    await page.fill("#decision-filter", "")
    await at.publish(*story.placement(time.time()))
    await expect(rows).to_have_count(7)
    assert await page.title() != "owned"


async def test_a_decision_shows_rule_inputs_rivals_causes_and_outcome(at: ConsoleUnderTest, page: Page) -> None:
    await at.publish(*story.placement(time.time()))
    await page.goto(f"{at.url}/#/decision/d-9")
    await expect(page.locator("h1")).to_contain_text("place smol-poet")
    await expect(page.locator(".because")).to_contain_text(story.MARKUP)
    await expect(page.locator(".decision-inputs")).to_contain_text("203 MiB")
    await expect(page.locator("tr.chosen")).to_contain_text("node-2/0")
    await expect(page.locator(".decision-rivals")).to_contain_text("16 MiB free")
    await expect(page.locator(".decision-causes")).to_contain_text("request.waiting")
    await expect(page.locator(".decision-outcome")).to_contain_text("ready after 1.73 s")
    await expect(page.locator(".gaps")).to_contain_text("fetch 610 ms, predicted 671 ms: as predicted")
    await expect(page.locator(".command-text")).to_have_text("glowplug why i-9")
    await page.locator(".decision-causes a", has_text="request.waiting").click()
    await expect(page.locator(".event-view h1")).to_contain_text("request.waiting")


@pytest.mark.complains("404")
async def test_an_event_that_is_gone_is_a_404_and_no_more(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/event/none")
    await expect(page.locator(".event-view h1")).to_have_text("No such event")
    await page.goto(f"{at.url}/#/decision/nothing")
    await expect(page.locator("h1")).to_have_text("No such decision")


async def test_a_cold_start_is_drawn_predicted_behind_actual(at: ConsoleUnderTest, page: Page) -> None:
    await at.publish(*story.predicted_trace(28, time.time() - 10))
    await page.goto(f"{at.url}/#/trace/{story.trace_id(28)}")
    lines = page.locator(".phase-line")
    await expect(lines).to_have_count(3)
    labels = await lines.locator("small").all_text_contents()
    assert labels == ["as predicted", "300 ms longer", "no prediction yet"]
    assert await lines.nth(1).get_attribute("aria-label") == (
        "Cold start phase fetch 900 ms, predicted 600 ms: 300 ms longer"
    )
    widths = "(c) => [...document.querySelectorAll(c)].map((bar) => parseFloat(bar.style.width))"
    predicted, actual = await page.evaluate(widths, ".predicted-bar"), await page.evaluate(widths, ".actual-bar")
    assert predicted[1] == pytest.approx(15.0, abs=0.1) and actual[1] == pytest.approx(22.5, abs=0.1)
    assert len(predicted) == 2, "what was not predicted has no bar"
    stages = await page.locator(".stage-list li").all_text_contents()
    assert [text.split("%")[0].rstrip() for text in stages[:3]] == ["queue80 ms2", "decide20 ms0.5", "fetch0 s0.0"]
    assert "prefill" in stages[4] and "decode" in stages[5]
    await page.locator(".phase-line").nth(2).click()
    await expect(page.locator(".detail h2")).to_have_text("engine.launch")


async def test_a_trace_names_its_decisions_and_can_be_taken_away(at: ConsoleUnderTest, page: Page) -> None:
    await at.publish(*story.placement(time.time()))
    await at.publish(*story.cold_trace(0, time.time() - 5, "smol-poet", "req-w"))
    await page.goto(f"{at.url}/#/trace/{story.trace_id(0)}")
    await expect(page.locator(".trace-decisions")).to_contain_text("first GPU with 301 MiB free")
    async with page.expect_download() as download:
        await page.get_by_role("link", name="Download").click()
    path = await (await download.value).path()
    assert story.trace_id(0) in path.read_text(encoding="utf-8")
    await page.locator(".trace-decisions a", has_text="place").last.click()
    await expect(page.locator(".decision-view h1")).to_contain_text("place")


async def test_events_are_filtered_paused_and_read_by_keys(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/events")
    await until(page, f"{ROWS}.length > 5")
    await page.fill("#event-type", "agent.stop")
    await expect(page.locator(".command-text")).to_have_text("glowplug tap --type agent.stop")
    await expect(page.locator(".event-row")).to_have_count(0)
    await at.publish(stop(1), *story.placement(time.time()))
    await expect(page.locator(".event-row")).to_have_count(1)
    await page.keyboard.press("Tab")
    await page.locator("h1").evaluate("(e) => document.activeElement.blur()")
    await page.keyboard.press("p")
    await at.publish(*(stop(number) for number in range(2, 6)))
    await expect(page.locator(".events-bar .note")).to_contain_text("paused: 4 events passed meanwhile")
    assert await page.evaluate(f"{ROWS}.length") == 1
    await page.keyboard.press("p")
    await expect(page.locator(".event-row")).to_have_count(5)
    await page.locator(".event-row").first.focus()
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("Enter")
    await expect(page.locator(".event-detail h2")).to_contain_text("agent.stop")
    assert await page.evaluate("document.activeElement.dataset.id") == "e-stop-4"
    await expect(page.locator(".event-detail .payload")).to_contain_text('"instance_id": "i-4"')


async def test_a_flood_of_events_is_bounded_and_counted(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/events/type=agent.stop")
    await until(page, "document.querySelector('.command-text').textContent.includes('agent.stop')")
    await at.publish(*(stop(number) for number in range(1500)))
    await until(page, f"{ROWS}[0]?.dataset.id === 'e-stop-1499'")
    shown = await page.evaluate(f"{ROWS}.length")
    text = await page.locator(".events-bar .note").text_content() or ""
    skipped = int(text.split(" not shown")[0].rsplit(" ", 1)[-1])
    assert shown <= 300 and skipped > 0 and shown + skipped <= 1500


@pytest.mark.usefixtures("forecast")
async def test_forecasts_are_drawn_against_what_came_and_read_by_keys(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/forecasts/model=smol-chat")
    await expect(page.get_by_role("img", name="Requests per window")).to_be_visible()
    await expect(page.locator(".chart-key")).to_have_count(6)  # with the unfinished window's own lines
    await expect(page.locator(".chart-legend")).to_contain_text("forecast, 10 % to 90 %")
    cursor = page.get_by_role("slider")
    await cursor.focus()
    before = await cursor.get_attribute("aria-valuetext") or ""
    assert "came so far 10" in before and "forecast 12" in before, "the window is not over"
    await page.keyboard.press("ArrowLeft")
    assert "came 11" in (await cursor.get_attribute("aria-valuetext") or "")
    await page.keyboard.press("End")
    assert "forecast 15" in (await cursor.get_attribute("aria-valuetext") or "")
    await page.get_by_text("As a table").click()
    await expect(page.locator(".chart-table tbody tr")).to_have_count(13)
    await expect(page.locator(".facts")).to_contain_text("21 %")
    await page.get_by_role("button", name="3 ahead").click()
    assert page.url.endswith("ahead=3")
    await expect(page.locator(".chart-legend")).to_contain_text("forecast 3 windows before, 10 % to 90 %")
    await expect(page.locator(".chart-table td").filter(has_text=re.compile("^30$"))).to_have_count(2)
    await page.get_by_role("button", name="tokens").click()
    await expect(page.locator(".chart-key")).to_have_count(4)


async def test_without_a_placer_the_prices_of_a_gpu_say_so(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/gpu/node-2%2F0")
    await expect(page.locator("h1")).to_have_text("GPU node-2/0")
    await expect(page.locator(".gpu-view [role=status]")).to_contain_text(
        "The placer cannot be read: no placer address"
    )
    await expect(page.locator(".prices-panel .empty")).to_have_text("No prices while the placer does not answer.")


async def test_without_a_predictor_the_forecasts_say_so(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/forecasts/model=smol-chat")
    await expect(page.locator(".forecasts-view .note")).to_contain_text("the predictor cannot be read")
    await expect(page.locator(".forecast-chart")).to_contain_text("Nothing to draw")
