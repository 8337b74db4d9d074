"""Decisions, traces, events and forecasts as a reader of the page meets them."""

import time
from typing import Any

import msgspec
import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.instance import InstanceState
from glowplug.events import Event
from glowplug.events.commands import StopInstance
from glowplug.events.facts import DecisionMade, InstanceReady, RequestWaiting
from glowplug.telemetry import semconv
from services.console.forecasts import ForecastPage, ForecastPoint, WindowPoint
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVIL = "<img src=x onerror=document.title='owned'>"
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
ROWS = "[...document.querySelectorAll('.event-row')]"


def event(id_: str, data: Any, *, cause: str = "", by: str = "placer-1", trace: int | None = None) -> Event:
    traceparent = "" if trace is None else story.traceparent(trace)
    return Event(
        event_id=id_, type=data.TYPE, occurred_at=time.time(), issuer=by, data=data, cause_id=cause,
        traceparent=traceparent,
    )  # fmt: skip


def stop(number: int) -> Event:
    return event(f"e-stop-{number}", StopInstance(target="node-1", instance_id=f"i-{number}", reason="idle"))


def placed() -> list[Event]:
    """A request that waits, the decision it led to, and the instance that came of it."""
    now = time.time()
    waiting = RequestWaiting(
        model_key="smol-poet", request_id="req-w", router_id="router-1", num_waiting=1, waiting_since=now,
        deadline_at=now + 60,
    )  # fmt: skip
    record = DecisionRecord(
        decision_id="d-p-9", kind="place", policy="first_fit", service="placer", reason=f"first GPU with room {EVIL}",
        made_at=now, model_key="smol-poet", instance_id="i-9", node_id="node-2", gpu_id="node-2/0", chosen="node-2/0",
        inputs={"need_bytes": 203 << 20, "waited_s": 0.004, "asked_because": "1 waiting"},
        rivals=(Rival(name="node-1/0", score=1.0 * (16 << 20), why="203 MiB are needed", unit="bytes free"),
                Rival(name="node-2/0", score=1.0 * (301 << 20), why="it is the first with room", unit="bytes free")),
        cause_id="e-waiting", traceparent=story.traceparent(0),
    )  # fmt: skip
    ready = story.instance("i-9", "smol-poet", "node-2", InstanceState.READY, now - 2, emulated=True)
    return [
        event("e-waiting", waiting, cause="req-w", by="router-1", trace=0),
        event("e-decision", DecisionMade(decision=record), cause="e-waiting", trace=0),
        event("e-ready", InstanceReady(instance=ready), cause="e-start", by="agent-node-2", trace=0),
    ]


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
    await at.publish(*placed())
    await expect(rows).to_have_count(7)
    assert await page.title() != "owned"


async def test_a_decision_shows_rule_inputs_rivals_causes_and_outcome(at: ConsoleUnderTest, page: Page) -> None:
    await at.publish(*placed())
    await page.goto(f"{at.url}/#/decision/d-p-9")
    await expect(page.locator("h1")).to_contain_text("place smol-poet")
    await expect(page.locator(".because")).to_contain_text(EVIL)
    await expect(page.locator(".decision-inputs")).to_contain_text("203 MiB")
    await expect(page.locator("tr.chosen")).to_contain_text("node-2/0")
    await expect(page.locator(".decision-rivals")).to_contain_text("16 MiB free")
    await expect(page.locator(".decision-causes")).to_contain_text("request.waiting")
    await expect(page.locator(".decision-outcome")).to_contain_text("ready after 1.73 s")
    await expect(page.locator(".gaps")).to_contain_text("fetch 610 ms, predicted 671 ms: as predicted")
    await expect(page.locator(".command-text")).to_have_text("glowplug why i-9")
    await page.locator(".decision-causes a", has_text="request.waiting").click()
    await expect(page.locator(".event-view h1")).to_contain_text("request.waiting")


async def test_an_event_that_is_gone_is_a_404_and_no_more(
    at: ConsoleUnderTest, page: Page, complaints: list[str]
) -> None:
    await page.goto(f"{at.url}/#/event/none")
    await expect(page.locator(".event-view h1")).to_have_text("No such event")
    await page.goto(f"{at.url}/#/decision/nothing")
    await expect(page.locator("h1")).to_have_text("No such decision")
    assert all("404" in complaint for complaint in complaints)
    complaints.clear()


def cold_trace(predicted_fetch_s: float) -> Any:
    """What the router and an agent really send: hold, phases with one prediction missing, prefill and decode."""
    at, seed = time.time() - 10, 8
    phase = {"decide": (0.0, 0.02, 0.02), "fetch": (0.02, 0.9, predicted_fetch_s), "launch": (0.02, 1.5, 0.0)}
    spans = [
        story.make_span(
            seed, 30 + i, 20, f"engine.{name}", at + offset, took,
            {semconv.ATTR_PHASE: name, semconv.ATTR_PREDICTED_SECONDS: predicted, semconv.ATTR_EMULATED: True},
        )
        for i, (name, (offset, took, predicted)) in enumerate(phase.items())
    ]  # fmt: skip
    about = {semconv.ATTR_MODEL: "smol-poet", semconv.ATTR_REQUEST_ID: "req-8"}
    return story.export(
        {
            "router": [
                story.make_span(seed, 1, 0, "router.request", at, 4.0, about, kind=2),
                story.make_span(seed, 2, 1, "router.hold", at, 1.6),
                story.make_span(seed, 3, 1, "engine.generate", at + 1.6, 2.4, kind=3, events={"first token": 0.4}),
            ],
            "agent": [
                story.make_span(seed, 20, 1, "agent.start", at + 0.02, 1.5, {semconv.ATTR_DECISION_ID: "d-p-9"}),
                *spans,
            ],
        }
    )


async def test_a_cold_start_is_drawn_predicted_behind_actual(at: ConsoleUnderTest, page: Page) -> None:
    await at.export(cold_trace(predicted_fetch_s=0.6))
    await page.goto(f"{at.url}/#/trace/{story.trace_id(8)}")
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


async def test_a_trace_names_its_decisions_and_goes_as_jaegers_json(at: ConsoleUnderTest, page: Page) -> None:
    await at.publish(*placed())
    await at.export(story.cold_trace(0, time.time() - 5, "smol-poet", "req-w"))
    await page.goto(f"{at.url}/#/trace/{story.trace_id(0)}")
    await expect(page.locator(".trace-decisions")).to_contain_text("first GPU with room")
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
    await at.publish(stop(1), *placed())
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


async def forecast(page: Page) -> None:
    """Ten windows that came and six that are forecast, as if the predictor had said so."""
    now = time.time()
    start = now - now % 60
    windows = [
        WindowPoint(started_at=start - 60 * n, is_open=n == 0, requests=10 + n, cold=1, prompt_tokens=100,
                    response_tokens=300, is_exact=True, concurrency=1.5, concurrency_peak=3)
        for n in range(9, -1, -1)
    ]  # fmt: skip
    points = [
        ForecastPoint(metric="requests", target_at=start + 60 * n, window_s=60.0, value=12.0 + n,
                      quantiles=((0.1, 8.0), (0.9, 20.0)), made_at=now - 5, error_ratio=0.21, source="test")
        for n in range(-2, 4)
    ]  # fmt: skip
    known = ForecastPage(
        now=now + 3600, model_key="smol-chat", window_s=60.0, policy="test", windows=windows, forecasts=points,
        why_empty="", problem="",
    )  # fmt: skip
    await page.route("**/api/v1/forecasts?model=smol-chat", lambda route: route.fulfill(json=_plain(known, now)))


async def test_forecasts_are_drawn_against_what_came_and_read_by_keys(at: ConsoleUnderTest, page: Page) -> None:
    await forecast(page)
    await page.goto(f"{at.url}/#/forecasts/model=smol-chat")
    await expect(page.locator(".chart-line")).to_have_count(3)
    await expect(page.locator(".chart-band")).to_have_count(1)
    await expect(page.locator(".chart-legend")).to_contain_text("forecast, 10 % to 90 %")
    cursor = page.get_by_role("slider")
    await cursor.focus()
    before = await cursor.get_attribute("aria-valuetext") or ""
    assert "came 10" in before and "forecast 12" in before
    await page.keyboard.press("ArrowLeft")
    assert "came 11" in (await cursor.get_attribute("aria-valuetext") or "")
    await page.keyboard.press("End")
    assert "forecast 15" in (await cursor.get_attribute("aria-valuetext") or "")
    await page.get_by_text("As a table").click()
    await expect(page.locator(".chart-table tbody tr")).to_have_count(13)
    await expect(page.locator(".facts")).to_contain_text("21 %")
    await page.get_by_role("button", name="tokens").click()
    await expect(page.locator(".chart-line")).to_have_count(2)


def _plain(known: ForecastPage, now: float) -> Any:
    return msgspec.to_builtins(msgspec.structs.replace(known, now=now))


async def test_without_a_predictor_the_forecasts_say_so(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/forecasts/model=smol-chat")
    await expect(page.locator(".forecasts-view .note")).to_contain_text("the predictor cannot be read")
    await expect(page.locator(".forecast-chart")).to_contain_text("Nothing to draw")


@pytest.mark.parametrize(
    "view", ["decisions", "decision/d-p-9", "events", "event/e-decision", "forecasts/model=smol-chat"]
)
async def test_views_need_no_mouse_and_no_sideways_scroll(at: ConsoleUnderTest, page: Page, view: str) -> None:
    await at.publish(*placed())
    await page.set_viewport_size({"width": 390, "height": 780})
    await page.goto(f"{at.url}/#/{view}")
    await until(page, "document.querySelector('h1') !== null")
    assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
    unnamed = await page.evaluate(
        "[...document.querySelectorAll('main button, main a[href], main input, main select')]"
        ".filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).length"
    )
    assert unnamed == 0


@pytest.mark.parametrize("scheme", ["dark", "light"])
async def test_axe_finds_nothing_where_there_is_something_to_see(at: ConsoleUnderTest, page: Page, scheme: str) -> None:
    await at.publish(*placed())
    await at.export(cold_trace(predicted_fetch_s=0.6))
    await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    await forecast(page)
    seen = {
        "decision/d-p-9": ".decision-outcome .gaps",
        "event/e-decision": ".payload",
        f"trace/{story.trace_id(8)}": ".phase-line",
        "forecasts/model=smol-chat": ".chart-line",
    }
    wrong = []
    for view, sign in seen.items():
        await page.goto(f"{at.url}/#/{view}")
        await page.locator(sign).first.wait_for(state="attached")
        found: dict[str, Any] = (await Axe().run(page, options=RULES)).response
        wrong += [f"{view}: {rule['id']} {node['target']}" for rule in found["violations"] for node in rule["nodes"]]
    assert wrong == []
