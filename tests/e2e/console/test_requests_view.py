"""The Requests view in a real browser."""

import dataclasses

import pytest
from playwright.async_api import Page, expect

from glowplug.domain.snapshot import LiveRequest
from glowplug.events.facts import RequestRejected, RouterRequestsReported
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest

pytestmark = pytest.mark.asyncio(loop_scope="session")

ROWS = "document.querySelectorAll('.requests-view tbody tr')"


def report(*rows: LiveRequest) -> RouterRequestsReported:
    return RouterRequestsReported(router_id="router-1", num_live=len(rows), requests=rows)


def held(number: int, position: int, now_s: float) -> LiveRequest:
    return LiveRequest(
        request_id=f"held-{number}", model_key="smol-coder", state="held", arrived_at=now_s - 2, position=position,
        eta_s=3.5, trace_id=story.trace_id(90 + number),
    )  # fmt: skip


async def test_a_request_goes_from_held_to_finished_in_one_row(at: ConsoleUnderTest, page: Page) -> None:
    now_s = at.clock.stop()
    await page.goto(f"{at.url}/#/requests")
    await until(page, f"{ROWS}.length === 13")
    await at.tell(report(held(1, 1, now_s), held(2, 2, now_s)))
    row = page.locator("tr", has_text="held-1")
    await expect(row).to_contain_text("number 1 in the queue, dispatched in about 3.50 s")
    await expect(page.get_by_role("button", name="held 2")).to_be_visible()
    await expect(row.get_by_role("link", name="held-1")).to_have_attribute("href", f"#/trace/{story.trace_id(91)}")
    done = dataclasses.replace(
        story.request_finished(1, now_s), request_id="held-1", stream=True, error_code="", response_tokens=11
    )
    await at.tell(done, report(held(2, 1, now_s)))
    await expect(row).to_contain_text("finished")
    await expect(row).to_contain_text("80 ms")  # 0.8 s over ten gaps
    await expect(row).to_have_count(1)


async def test_filters_stand_in_the_address_and_come_back_from_it(at: ConsoleUnderTest, page: Page) -> None:
    refused = RequestRejected(
        model_key="smol-chat", request_id="req-full", router_id="router-1", status=429, code="queue_full",
        retry_after_s=9,
    )  # fmt: skip
    await at.tell(refused)
    await page.goto(f"{at.url}/#/requests")
    await until(page, f"{ROWS}.length === 14")
    await page.get_by_label("Model").select_option("smol-chat")
    await page.get_by_role("button", name="refused").click()
    await until(page, f"{ROWS}.length === 1")
    await expect(page.locator("tbody tr")).to_contain_text("queue_full")
    await expect(page.locator("tbody .badge.bad")).to_have_attribute("title", "refused, 429, try again in 9.00 s")
    assert await page.evaluate("location.hash") == "#/requests/model=smol-chat&state=refused"
    await page.get_by_label("Filter requests").fill("full 429")
    await page.reload()
    await until(page, f"{ROWS}.length === 1")
    assert await page.get_by_label("Filter requests").input_value() == "full 429"
    assert await page.get_by_label("Model").input_value() == "smol-chat"
    await expect(page.get_by_role("button", name="refused 1")).to_have_attribute("aria-pressed", "true")


async def test_pause_holds_the_list_still(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/requests")
    await until(page, f"{ROWS}.length === 13")
    pause = page.get_by_role("button", name="Pause")
    await pause.click()
    await at.tell(dataclasses.replace(story.request_finished(2, at.clock()), request_id="late"))
    await page.wait_for_timeout(900)
    assert await page.evaluate(f"{ROWS}.length") == 13
    await page.get_by_role("button", name="Go on").click()
    await until(page, f"{ROWS}.length === 14")
