"""The playground in a real browser: streams and errors."""

import asyncio

import pytest
from playwright.async_api import Page, expect

from glowplug.domain.instance import InstanceState
from glowplug.events.facts import InstanceLoading
from tests import console_story as story
from tests.console_server import API_KEY, DONE, ConsoleUnderTest, FakeOwner, addresses, event, piece, serving
from tests.waiting import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

ANSWER = ".turn.model .text:not(.thought)"
FOOT = ".turn.model .foot"


@pytest.fixture
def settings(owner: FakeOwner) -> dict[str, str]:
    return addresses(owner)


async def say(page: Page, text: str) -> None:
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    await page.get_by_label("Message").fill(text)
    await page.keyboard.press("Enter")


async def test_a_talk_of_two_turns(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    gate = asyncio.Event()
    owner.script = [piece("Hello"), gate, piece(", there"), DONE]
    await page.goto(f"{at.url}/#/playground/smol-chat")
    await expect(page.get_by_label("Message")).to_be_focused()
    await page.get_by_label("System prompt").fill("Be kind.")
    await page.get_by_label("Temperature").fill("0.3")
    await page.get_by_label("Longest answer").fill("64")
    await say(page, "Hi & <b>hello</b>")
    await expect(page.locator(ANSWER)).to_have_text("Hello")
    await expect(page.locator(".turn.model")).to_have_attribute("aria-busy", "true")
    await expect(page.get_by_role("button", name="Send")).to_be_disabled()
    gate.set()
    await expect(page.locator(FOOT)).to_contain_text("3 tokens")
    await expect(page.locator(ANSWER)).to_have_text("Hello, there")
    for word in ("first token", "per token", "total", "queue"):
        await expect(page.locator(FOOT)).to_contain_text(word)
    await expect(page.locator(FOOT).get_by_role("link", name="trace")).to_have_attribute(
        "href", f"#/trace/{story.trace_id(1)}"
    )
    await expect(page.locator(".turn.model h2 .emulated")).to_be_visible()
    await expect(page.get_by_role("status").filter(has_text="smol-chat has answered")).to_have_count(1)
    owner.script = [piece("Again"), DONE]
    await say(page, "And now?")
    await expect(page.locator(FOOT).nth(1)).to_contain_text("total")
    first, second = owner.chats
    assert first["model"] == "smol-chat" and first["stream"] is True
    assert (first["temperature"], first["max_tokens"]) == (0.3, 64)
    assert second["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi & <b>hello</b>"},
        {"role": "assistant", "content": "Hello, there"},
        {"role": "user", "content": "And now?"},
    ]
    assert await page.locator(".turn.user b").count() == 0


async def test_a_talk_survives_a_look_at_another_view(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    gate = asyncio.Event()
    owner.script = [piece("One"), gate, piece(" two"), DONE]
    await page.goto(f"{at.url}/#/playground/smol-chat")
    await say(page, "Count")
    await expect(page.locator(ANSWER)).to_have_text("One")
    await page.get_by_role("link", name="Models").click()
    await expect(page.get_by_role("table", name="Models")).to_be_visible()
    gate.set()
    await page.get_by_role("link", name="Playground").click()
    await expect(page.locator(ANSWER)).to_have_text("One two")
    await page.get_by_role("button", name="New talk").click()
    await expect(page.locator(".turn")).to_have_count(0)


async def test_a_cold_model_is_seen_waking(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    waking, ready = asyncio.Event(), asyncio.Event()
    comment = b": glowplug ready queue;dur=1760.0, fetch;dur=610.0, load;dur=580.0, router;dur=0.2\n\n"
    owner.emulated = False
    waits = b": glowplug waiting model=smol-tutor eta_s=4.2\n\n"
    owner.script = [waits, waking, ready, comment, piece("Good morning"), DONE]
    await page.goto(f"{at.url}/#/playground/smol-tutor")
    await expect(page.locator(".model-card")).to_contain_text("cold")
    await say(page, "Wake up")
    wait = page.locator(".waking")
    await expect(wait).to_contain_text("about 4.20 s to go")
    loading = story.instance("i-new", "smol-tutor", "node-3", InstanceState.LOADING, at.clock() - 0.9)
    await at.tell(InstanceLoading(instance=loading))
    await expect(wait).to_contain_text("Starting on node-3")
    await expect(wait.locator("li.over").first).to_contain_text("fetch")
    waking.set()
    ready.set()
    await expect(page.locator(ANSWER)).to_have_text("Good morning")
    await expect(wait).to_be_empty()
    await expect(page.locator(FOOT)).to_contain_text("queue 1.76 s")
    await expect(page.locator(FOOT)).to_contain_text("load 580 ms")
    await expect(page.locator(".turn.model h2 .emulated")).to_have_count(0)


async def test_stop_ends_the_generation_and_keeps_what_came(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    owner.script = [piece("Once upon"), asyncio.Event()]
    await page.goto(f"{at.url}/#/playground/smol-chat")
    await say(page, "A long story")
    await expect(page.locator(ANSWER)).to_have_text("Once upon")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator(".turn.model")).to_contain_text("Stopped.")
    async with asyncio.timeout(WAIT_S):
        await owner.left.wait()
    await expect(page.get_by_role("button", name="Stop")).to_be_disabled()


@pytest.mark.complains("responded with a status of")
async def test_errors_stand_as_the_router_says_them_and_can_be_tried_again(
    at: ConsoleUnderTest, owner: FakeOwner, page: Page
) -> None:
    owner.refuses = {"status": 503, "message": "smol-broken has no room on any GPU", "code": "no_capacity"}
    await page.goto(f"{at.url}/#/playground/broken")
    await say(page, "Hello?")
    refusal = page.locator(".refusal")
    await expect(refusal).to_contain_text("smol-broken has no room on any GPU")
    await expect(refusal).to_contain_text("503 no_capacity · try again in 7 s")
    owner.refuses = None
    await refusal.get_by_role("button", name="Try again").click()
    await expect(page.locator(ANSWER).last).to_have_text("Hello, there")
    assert [len(chat["messages"]) for chat in owner.chats] == [1, 1], "what failed is no part of the talk"


@pytest.mark.parametrize("end", [event(error={"message": "the engine died", "code": "engine_failed"}), b""])
async def test_an_answer_that_breaks_off_says_so(
    at: ConsoleUnderTest, owner: FakeOwner, page: Page, end: bytes
) -> None:
    owner.script = [piece("Half"), end] if end else [piece("Half")]
    await page.goto(f"{at.url}/#/playground/smol-chat")
    await say(page, "Go")
    await expect(page.locator(".refusal")).to_contain_text("the engine died" if end else "the answer ended early")
    await expect(page.locator(ANSWER)).to_have_text("Half")


@pytest.mark.complains("responded with a status of")
async def test_the_key_is_asked_for_when_the_router_wants_one(
    at: ConsoleUnderTest, owner: FakeOwner, page: Page
) -> None:
    owner.api_key = API_KEY
    await page.goto(f"{at.url}/#/playground/smol-chat")
    await expect(page.get_by_text("The router asks for its API key.")).to_be_visible()
    await page.get_by_label("API key").fill(API_KEY)
    await page.get_by_label("API key").press("Tab")
    await expect(page.get_by_text("The router asks for its API key.")).to_be_hidden()
    await say(page, "Hello")
    await expect(page.locator(ANSWER)).to_have_text("Hello, there")


@pytest.mark.own_tab  # its permissions
async def test_the_request_as_curl(at: ConsoleUnderTest, owner: FakeOwner, page: Page) -> None:
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await page.goto(f"{at.url}/#/playground/smol-chat")
    await say(page, "It's")
    await expect(page.locator(FOOT)).to_contain_text("total")
    await page.get_by_role("button", name="Copy as curl").click()
    await expect(page.get_by_role("button", name="Copied")).to_be_visible()
    text = await page.evaluate("navigator.clipboard.readText()")
    assert text.startswith(f"curl -N '{owner.url}/v1/chat/completions'")
    assert "It'\\''s" in text and '"stream":true' in text


@pytest.mark.complains("responded with a status of")
async def test_no_router_address_is_said_at_once(page: Page) -> None:
    async with serving() as at:
        await at.publish(*story.fleet_events(at.clock.stop()))
        await page.goto(f"{at.url}/#/playground")
        await expect(page.get_by_text("no router address known: set GLOWPLUG_DATA_URL")).to_be_visible()
        await page.goto("about:blank")  # else it complains of the lost console


async def test_text_of_a_talk_stays_out_of_logs_and_memory(
    at: ConsoleUnderTest, owner: FakeOwner, page: Page, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    await page.goto(f"{at.url}/#/playground/smol-chat")
    await say(page, "my very secret words")
    await expect(page.locator(FOOT)).to_contain_text("total")
    assert "secret words" in owner.asked[-1][3].decode()
    assert "secret" not in caplog.text
    assert await page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})") == "{}"
