"""The Models view in a real browser."""

import asyncio
import dataclasses

import pytest
import pytest_asyncio
from playwright.async_api import Page, expect

from glowplug.events.facts import ModelDeployed
from tests import console_story as story
from tests.browser import until
from tests.console_server import ADMIN_TOKEN, ConsoleUnderTest, FakeOwner, addresses

pytestmark = pytest.mark.asyncio(loop_scope="session")

LINES = "document.querySelectorAll('.models-grid .model-line[data-key]')"
NAMES = f"[...{LINES}].map((line) => line.querySelector('a').textContent)"


@pytest.fixture
def settings(owner: FakeOwner) -> dict[str, str]:
    return addresses(owner)


@pytest_asyncio.fixture(loop_scope="session")
async def page(at: ConsoleUnderTest, page: Page) -> Page:
    await page.goto(f"{at.url}/#/models")
    await until(page, f"{LINES}.length === 6")
    return page


async def has_token(page: Page) -> None:
    await page.evaluate(f"sessionStorage.setItem('glowplug.admin-token', '{ADMIN_TOKEN}')")


async def test_filter_temperature_and_order(at: ConsoleUnderTest, page: Page) -> None:
    assert await page.evaluate(NAMES) == sorted(await page.evaluate(NAMES), key=str.lower)
    await page.get_by_role("button", name="Queue").click()
    assert (await page.evaluate(NAMES))[0] == "smol-coder", "seven wait for it"
    assert await page.get_by_role("columnheader", name="Queue").get_attribute("aria-sort") == "descending"
    await page.get_by_role("button", name="ready 3").click()
    await until(page, f"{LINES}.length === 3")
    await page.get_by_label("Filter models").fill("qwen emulated")
    assert await page.evaluate(NAMES) == ["Qwen/Qwen3-8B"]
    await expect(page.get_by_text("1 of 6 models")).to_be_visible()
    await page.get_by_label("Filter models").fill("no such thing")
    await expect(page.get_by_text("No model matches.")).to_be_visible()


async def test_a_line_follows_the_fleet_and_keeps_its_element(at: ConsoleUnderTest, page: Page) -> None:
    await page.evaluate(f"window.kept = [...{LINES}]")
    pinned = dataclasses.replace(story.model("smol-poet", "smol-poet", 139), pinned=True, revision=9)
    await at.tell(ModelDeployed(model=pinned))
    await expect(page.get_by_role("button", name="Unpin smol-poet")).to_be_visible()
    assert await page.evaluate(f"[...{LINES}].every((line) => window.kept.includes(line))")


@pytest.mark.complains("responded with a status of")
async def test_loading_asks_for_the_token_once(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    await page.get_by_role("button", name="Load smol-tutor").click()
    token = page.get_by_label("Admin token")
    await expect(token).to_be_focused()
    await token.fill("wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("That is not this fleet's admin token.")).to_be_visible()
    await page.get_by_label("Admin token").fill(ADMIN_TOKEN)
    await page.keyboard.press("Enter")
    await expect(page.locator(".notes .good")).to_contain_text("smol-tutor is told to load")
    await page.get_by_role("button", name="Pin smol-tutor").click()
    await expect(page.locator(".notes .good").first).to_contain_text("smol-tutor is pinned")
    assert owner.paths == ["/v1/models/smol-tutor/load"] * 3 + ["/v1/models/smol-tutor/pin"]
    assert await page.evaluate("localStorage.length") == 0


async def test_what_ends_work_asks_first_and_can_be_called_off(
    at: ConsoleUnderTest, owner: FakeOwner, page: Page
) -> None:
    await has_token(page)
    unload = page.get_by_role("button", name="Unload smol-chat")
    await unload.click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("3 running requests finish first.")
    await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(dialog).to_be_hidden()
    assert owner.asked == []
    await unload.click()
    await dialog.get_by_role("button", name="Unload").click()
    await expect(page.locator(".notes .good")).to_contain_text("smol-chat is told to unload")
    assert owner.paths == ["/v1/models/smol-chat/unload"]


async def test_buttons_wait_while_an_action_is_under_way(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    owner.hold = asyncio.Event()
    await has_token(page)
    load = page.get_by_role("button", name="Load smol-tutor")
    await load.click()
    await expect(load).to_be_disabled()
    changed = dataclasses.replace(story.model("smol-tutor", "smol-tutor", 200), revision=9)
    await at.tell(ModelDeployed(model=changed))
    await expect(page.locator("[data-key=smol-tutor]")).to_contain_text("264 MiB")
    await expect(load).to_be_disabled()
    owner.hold.set()
    await expect(load).to_be_enabled()
    assert owner.paths == ["/v1/models/smol-tutor/load"]


@pytest.mark.complains("responded with a status of")
async def test_a_failure_stays_until_it_is_dismissed(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    at.console.upstream.addresses._given.pop("autoscaler")
    await has_token(page)
    await page.get_by_role("button", name="Load smol-tutor").click()
    note = page.locator(".notes .bad")
    await expect(note).to_contain_text("set GLOWPLUG_AUTOSCALER_URL for the console (503 no_address)")
    await expect(page.get_by_role("alert")).to_contain_text("no_address")
    await note.get_by_role("button", name="Dismiss").click()
    await expect(note).to_have_count(0)


async def test_one_model_shows_its_starts_against_what_was_predicted(at: ConsoleUnderTest, page: Page) -> None:
    await page.get_by_role("link", name="smol-chat", exact=True).click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("smol-chat")
    await expect(page.locator(".model-why")).to_contain_text("the decision that placed it is no longer on record")
    starts = page.get_by_role("region", name="Latest starts").get_by_role("row")
    await expect(starts).to_have_count(2)
    await expect(starts.nth(1)).to_contain_text("load580 mspredicted 638 ms, as predicted")
    await expect(page.locator(".declared")).to_contain_text("file:/models/smol-chat.gguf")
    await expect(page.get_by_role("button", name="Unpin smol-chat")).to_be_visible()
    assert "predicted 638 ms" in str(await page.locator(".starts-panel .phases").get_attribute("aria-label"))


async def test_a_start_under_way_shows_what_is_over_and_what_goes_on(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/model/smol-coder")
    await expect(page.get_by_text("Starting on node-1")).to_be_visible()
    await expect(page.locator(".stages li.over")).to_have_text(["fetch1.73 s"])
    await expect(page.locator(".stages li.now")).to_have_text(
        ["launchnow or next", "loadnow or next", "warmupnow or next"]
    )


@pytest.mark.complains("responded with a status of")
async def test_an_unknown_model_is_said_to_be_unknown(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/model/unknown")
    await expect(page.get_by_text("no model 'unknown' is deployed")).to_be_visible()


async def test_five_hundred_models_are_drawn_once_and_patched(at: ConsoleUnderTest, page: Page) -> None:
    many = [story.model(f"m-{i:03}", f"m-{i:03}", 100) for i in range(500)]
    await at.tell(*(ModelDeployed(model=m) for m in many))
    await until(page, f"{LINES}.length === 506")
    await page.evaluate(f"window.kept = new Set({LINES})")
    for changed in (dataclasses.replace(m, pinned=True, revision=9) for m in many[:20]):
        await at.tell(ModelDeployed(model=changed))
    await until(page, f"[...{LINES}].filter((line) => line.textContent.includes('pinned')).length === 21")
    assert await page.evaluate(f"[...{LINES}].every((line) => window.kept.has(line))")
    await page.get_by_label("Filter models").fill("m-49")
    await until(page, f"{LINES}.length === 10")
