"""Accessibility: every view by axe's rules, by Tab alone, in both themes, on a narrow screen.

Lane: fast; long (the colours of the light theme).

One browser walks all the views and reports every fault of a run.
"""

import dataclasses
import time
from typing import Any

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect

from glowplug.domain.instance import InstanceState
from glowplug.events.facts import InstanceStopped
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.complains("503")]

VIEWS = (
    *("fleet", "models", "charts", "requests", "traces", "decisions", "forecasts", "events", "logs", "playground"),
    *("usage", "access"),
)
INSIDE = {  # a view of one thing -> the sign that it has loaded
    f"trace/{story.trace_id(0)}": "[role=treegrid] [role=row]",
    f"trace/{story.trace_id(8)}": ".phase-line",
    "model/smol-chat": ".starts-panel",
    "gpu/node-2%2F0": "tr.next",
    "decision/d-3": ".because",
    "decision/d-9": ".decision-outcome .gaps",
    "event/e-decision": ".payload",
    "forecasts/model=smol-chat": ".forecast-chart canvas",
}
RULES = {
    "runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "resultTypes": ["violations"],
}
COLOURS = {**RULES, "runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
JUDGE = "(options) => axe.run(options)"
FOCUS = """window.focused = () => {
  const at = document.activeElement;
  const style = getComputedStyle(at);
  const box = at.getBoundingClientRect();
  window.places ??= new Map();
  if (!window.places.has(at)) window.places.set(at, window.places.size);
  return {
    place: window.places.get(at),
    what: `${at.tagName} ${at.id || at.getAttribute("aria-label") || at.textContent.trim().slice(0, 40)}`,
    outlined: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0,
    inside: document.getElementById("main").contains(at),
    sized: box.width > 0 && box.height > 0,
  };
}"""
TABBED = "window.walked = []; document.addEventListener('focusin', () => window.walked.push(window.focused()))"
TABBABLE = """[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")].filter(
  (at) => at.tabIndex >= 0 && !at.disabled && at.checkVisibility({ visibilityProperty: true })
    && !at.closest("dialog:not([open])") && !(at.type === "radio" && !at.checked)).length"""


@pytest_asyncio.fixture(loop_scope="session")
async def shown(at: ConsoleUnderTest, page: Page, forecast: None, prices: None) -> ConsoleUnderTest:
    *steps, ready = story.placement(time.time())
    over = dataclasses.replace(ready.data.instance, state=InstanceState.STOPPED, revision=9)
    await at.publish(*steps, ready)
    await at.tell(InstanceStopped(instance=over))
    await at.publish(*story.cold_trace(0, time.time() - 5, "smol-chat", "req-0000"))
    await at.publish(*story.predicted_trace(8, time.time() - 10))
    await page.goto(at.url)
    await until(page, "document.getElementById('status').textContent.startsWith('live')")
    await page.evaluate(FOCUS)
    return at


async def go(page: Page, address: str) -> None:
    await page.evaluate(f"location.hash = '#/{address}'")
    await until(page, "document.querySelector('main').innerText.length > 40")
    if address in INSIDE:
        await page.locator(INSIDE[address]).first.wait_for(state="attached")
    else:
        await page.wait_for_timeout(300)  # lists ask for their rows, with no common sign of it
    await page.locator("main h1").first.wait_for(state="attached")


@pytest.mark.parametrize(
    ("scheme", "rules", "views"),
    [
        pytest.param("dark", RULES, VIEWS, id="dark"),
        pytest.param("dark", RULES, tuple(INSIDE), id="dark, one thing"),
        pytest.param("light", COLOURS, (*VIEWS, *INSIDE), id="light", marks=pytest.mark.long),
    ],
)
async def test_axe_finds_nothing(
    shown: ConsoleUnderTest, page: Page, scheme: Any, rules: dict[str, Any], views: tuple[str, ...]
) -> None:
    """The light theme is checked only for colour: it differs in nothing else."""
    await page.evaluate(Axe().axe_script)
    await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    wrong: list[str] = []
    for address in views:
        await go(page, address)
        judged = await page.evaluate(JUDGE, rules)
        assert "color-contrast" in {rule["id"] for rule in judged["passes"]}
        assert len(judged["passes"]) > 15 or rules is COLOURS
        wrong += [f"{address}: {fault}" for fault in faults(judged)]
    assert wrong == [], "\n".join(wrong)


def faults(found: dict[str, Any]) -> list[str]:
    return [
        f"{rule['id']}: {node['target']} {(node['any'] or [{'message': rule['help']}])[0]['message']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


async def test_tab_reaches_everything_and_shows_where_it_is(shown: ConsoleUnderTest, page: Page) -> None:
    wrong: list[str] = []
    await page.evaluate(TABBED)
    for address in VIEWS:
        await go(page, address)
        await page.evaluate("window.places = new Map(); document.activeElement.blur(); window.getSelection().empty()")
        await page.locator("body").evaluate(
            "(body) => { body.tabIndex = -1; body.focus(); body.removeAttribute('tabindex'); }"
        )
        await page.evaluate("window.walked = []")
        wanted = await page.evaluate(TABBABLE)
        for _ in range(wanted + 10):
            await page.keyboard.press("Tab")
        walked = [focus for focus in await page.evaluate("window.walked") if not focus["what"].startswith("BODY")]
        wrong += [
            f"{address}: focus does not show on {focus['what']}"
            for focus in walked
            if not (focus["outlined"] and focus["sized"])
        ]
        places = {focus["place"] for focus in walked}
        if len(places) < wanted or not any(focus["inside"] for focus in walked):
            wrong.append(f"{address}: Tab reaches {len(places)} of {wanted}")
    assert wrong == [], "\n".join(wrong)


async def test_the_skip_link_leads_past_the_bar(shown: ConsoleUnderTest, page: Page) -> None:
    await page.keyboard.press("Tab")
    assert "Skip to content" in (await page.evaluate("window.focused()"))["what"]
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "main"
    assert await page.evaluate("location.hash") == ""
    await page.keyboard.press("Tab")
    assert (await page.evaluate("window.focused()"))["inside"]


async def test_another_view_is_announced_and_takes_the_focus(shown: ConsoleUnderTest, page: Page) -> None:
    await page.keyboard.press("g")
    await page.keyboard.press("t")
    await expect(page.locator("#announcer")).to_have_text("Traces")
    await expect(page).to_have_title("Traces · Glowplug")
    assert await page.evaluate("document.activeElement.id") == "main"
    assert await page.locator("nav a[aria-current=page]").text_content() == "Traces"


async def test_keys_are_explained_and_do_not_steal_what_is_typed(shown: ConsoleUnderTest, page: Page) -> None:
    await page.keyboard.press("?")
    help_ = page.get_by_role("dialog", name="Keyboard shortcuts")
    await expect(help_).to_be_visible()
    for name in VIEWS:
        await expect(help_).to_contain_text(name.capitalize())
    await page.keyboard.press("Escape")
    await expect(help_).to_be_hidden()
    await page.keyboard.press("/")
    await page.keyboard.type("gt?")
    await expect(page.locator("#node-filter")).to_have_value("gt?")
    assert await page.evaluate("location.hash") == ""


async def test_a_narrow_window_does_not_scroll_sideways(shown: ConsoleUnderTest, page: Page) -> None:
    await page.set_viewport_size({"width": 380, "height": 760})
    wide = []
    for address in (*VIEWS, *INSIDE):
        await go(page, address)
        if (width := await page.evaluate("document.documentElement.scrollWidth")) > 380:
            wide.append(f"{address}: {width}")
        assert await page.evaluate("document.querySelector('nav a[aria-current]').getBoundingClientRect().right") <= 380
    assert wide == []


async def test_motion_stops_for_those_who_ask(shown: ConsoleUnderTest, page: Page) -> None:
    await page.emulate_media(reduced_motion="reduce")
    moving = "document.getAnimations().filter((a) => a.playState === 'running').length"
    await until(page, "document.querySelector('.state.loading .dot') !== null")
    assert await page.evaluate(moving) == 0
    await page.emulate_media(reduced_motion="no-preference")
    await until(page, f"{moving} > 0")
