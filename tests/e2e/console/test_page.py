"""The console's page in a real browser: live updates, and data never becomes markup."""

import asyncio
import dataclasses
import time
from typing import Any

import pytest
from playwright.async_api import Page, Route

from glowplug.domain.instance import InstanceState
from glowplug.events.facts import STAYS, DecisionMade, InstanceReady, ModelDeployed, StreamMove
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest, serving

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVIL = story.MARKUP
NODES = "document.querySelectorAll('.node')"
SPANS = "[...document.querySelectorAll('[role=treegrid] [role=row]')].filter((row) => !row.hidden)"


async def test_a_trace_by_deep_link_with_late_spans(at: ConsoleUnderTest, page: Page) -> None:
    *decided, started, request = story.cold_trace(20, time.time() - 5, "smol-chat", "req-0020")
    await at.publish(*decided)
    await page.goto(f"{at.url}/#/trace/{story.trace_id(20)}")
    await until(page, f"{SPANS}.length === 3")
    await at.publish(started, request)
    await until(page, f"{SPANS}.length === 12")
    phases = await page.evaluate("[...document.querySelectorAll('.phase-line b')].map((b) => b.textContent)")
    assert phases == ["decide", "fetch", "launch", "load", "warmup"]
    first = await page.evaluate(f"{SPANS}.map((row) => [row.querySelector('b').textContent, row.ariaLevel])")
    assert first[:5] == [
        ["request", "1"],
        ["hold", "2"],
        ["scale", "2"],
        ["place", "3"],
        ["await_decision", "4"],
    ]
    bar = await page.evaluate(f"(({SPANS})[11].querySelector('.span-bar').style.left)")
    assert abs(float(bar.rstrip("%")) - 100 * 1.764 / 2.61) < 0.1


async def test_late_spans_stay_though_an_answer_from_before_them_comes_after_them(
    at: ConsoleUnderTest, page: Page
) -> None:
    *decided, started, request = story.cold_trace(20, time.time() - 5, "smol-chat", "req-0020")
    await at.publish(*decided)
    address, read, may_come, came = f"/api/v1/traces/{story.trace_id(20)}", *(asyncio.Event() for _ in range(3))

    async def first_comes_last(route: Route) -> None:
        answer = await route.fetch()
        if not read.is_set():
            read.set()
            await may_come.wait()
            await route.fulfill(response=answer)
            came.set()
        else:
            await route.fulfill(response=answer)

    await page.route(f"**{address}", first_comes_last)
    await page.goto(f"{at.url}/#/trace/{story.trace_id(20)}")
    await read.wait()
    await at.publish(started, request)
    await until(page, f"{SPANS}.length === 12")
    may_come.set()
    await came.wait()
    await page.evaluate(f"fetch('{address}').then((answer) => answer.text())")
    assert await page.evaluate(f"{SPANS}.length") == 12


async def test_the_waterfall_is_walked_by_keys(at: ConsoleUnderTest, page: Page) -> None:
    await at.publish(*story.cold_trace(20, time.time() - 5, "smol-chat", "req-0020"))
    await page.goto(f"{at.url}/#/request/req-0020")
    await until(page, f"{SPANS}.length === 12")
    detail = "document.querySelector('.detail h2').textContent"
    await page.evaluate("document.querySelector('[role=row][tabindex=\"0\"]').focus()")
    assert await page.evaluate(detail) == "router.request"
    await page.keyboard.press("ArrowDown")
    await page.keyboard.press("ArrowDown")
    assert await page.evaluate(detail) == "autoscaler.scale"
    await page.keyboard.press("ArrowLeft")
    assert await page.evaluate(f"{SPANS}.length") == 4
    assert await page.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"
    await page.keyboard.press("ArrowRight")
    assert await page.evaluate(f"{SPANS}.length") == 12
    await page.keyboard.press("End")
    assert await page.evaluate(detail) == "engine.generate"
    assert "gen_ai.usage.output_tokens" in await page.evaluate("document.querySelector('.detail').textContent")
    await page.keyboard.press("ArrowLeft")
    assert await page.evaluate(detail) == "router.request"


async def test_errors_and_emulation_are_marked(at: ConsoleUnderTest, page: Page) -> None:
    await at.publish(*story.failed_trace(27, time.time() - 5, "big-emulated", "req-27"))
    await page.goto(f"{at.url}/#/trace/{story.trace_id(27)}")
    await until(page, f"{SPANS}.length === 3")
    classes = await page.evaluate(f"{SPANS}.map((row) => row.className)")
    assert classes == ["row error", "row error", "row error"]
    head = await page.evaluate("document.querySelector('.trace-head h1').textContent")
    assert "3 errors" in head and "emulated" in head
    assert "engine_failed" in await page.evaluate("document.querySelector('.detail').textContent")


async def test_the_list_filters_and_leads_to_the_trace(at: ConsoleUnderTest, page: Page) -> None:
    now = time.time()
    for seed, model in enumerate(("odd", "even", "odd"), 20):
        await at.publish(*story.warm_trace(seed, now - 5 + seed, model, f"req-{seed}"))
    await at.publish(*story.failed_trace(27, now, "even", "req-27"))
    await page.goto(f"{at.url}/#/traces")
    lines = "document.querySelectorAll('.trace-list tbody tr')"
    await until(page, f"{lines}.length === 20")
    await page.keyboard.press("/")
    await page.keyboard.type("even")
    await until(page, f"{lines}.length === 2")
    await page.evaluate("document.getElementById('errors').click()")
    assert await page.evaluate(f"{lines}.length") == 1
    await page.evaluate("document.querySelector('.trace-list td a').click()")
    await until(page, f"{SPANS}.length === 3")
    assert await page.evaluate("location.hash") == f"#/trace/{story.trace_id(27)}"


@pytest.mark.complains("404")
async def test_a_trace_that_is_not_here_yet_is_waited_for(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(f"{at.url}/#/request/not-yet")
    await until(page, "document.querySelector('.trace-head h1')?.textContent === 'Waiting for its events…'")
    await at.publish(*story.warm_trace(23, time.time(), "smol-chat", "not-yet"))
    await until(page, f"{SPANS}.length === 2")


async def test_data_never_becomes_markup(at: ConsoleUnderTest, page: Page) -> None:
    now = time.time()
    move: dict[str, Any] = {
        "at": now,
        "until": now,
        "reason": EVIL,
        "message": EVIL,
        "from_instance": EVIL,
        "outcome": EVIL,
    }
    moves = (StreamMove(**move), StreamMove(**{**move, "outcome": STAYS}))
    odd: dict[str, Any] = {"status": 502, "error_code": EVIL, "instance_id": EVIL, "operation": EVIL, "moves": moves}
    told = story.finished(EVIL, EVIL, now - 5, 1.0, dispatched_s=0.1, **odd)
    decided = story.a_decision(24, EVIL, EVIL, made_at=now, model_key=EVIL, instance_id=EVIL, service=EVIL)
    decided = dataclasses.replace(decided, decision_id=EVIL, traceparent=story.traceparent(24))
    await at.publish(story.told(told, now, 24), story.told(DecisionMade(decision=decided), now, 24))
    failed = story.instance(EVIL, "evil", EVIL, InstanceState.FAILED, now, reason=EVIL)
    running = dataclasses.replace(failed, state=InstanceState.READY, instance_id=f"{EVIL}2")
    ended = story.request_finished(5, now)
    await at.tell(
        ModelDeployed(model=story.model("evil", EVIL, 10)),
        InstanceReady(instance=failed),
        InstanceReady(instance=running),
        dataclasses.replace(ended, request_id=EVIL, model_key=EVIL, instance_id=EVIL),
    )
    for address, proof in (
        ("#/fleet", ".motion-panel"),
        ("#/traces", ".trace-list"),
        (f"#/trace/{story.trace_id(24)}", ".rows"),
    ):
        await page.goto(f"{at.url}/{address}")
        await until(page, f"document.querySelector('{proof}')?.textContent.includes('onerror')")
        assert await page.evaluate("document.querySelectorAll('main img').length") == 0
        assert "owned" not in await page.evaluate("document.title")


async def test_stale_data_is_called_stale(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(at.url)
    await until(page, f"{NODES}.length === 3")
    at.broker.down = at.store.down = True
    status = "document.getElementById('status').textContent"
    await until(page, f"{status}.includes('bus down, stale since') && {status}.includes('store down')")
    assert await page.evaluate(f"{NODES}.length") == 3
    assert await page.evaluate("document.querySelectorAll('.node.silent').length") == 0
    at.broker.down = at.store.down = False
    await until(page, f"{status} === 'live'")


@pytest.mark.complains("ERR_")  # from the broken connection
async def test_a_dead_console_is_noticed_and_found_again(page: Page) -> None:
    async with serving() as first:
        await first.publish(*story.fleet_events(time.time()))
        await page.goto(first.url)
        await until(page, f"{NODES}.length === 3")
        port = int(first.url.rpartition(":")[2])
    status = "document.getElementById('status').textContent"
    await until(page, f"{status}.includes('unreachable, stale since')")
    assert await page.evaluate(f"{NODES}.length") == 3, "what was known stays on the page"
    async with serving(port=port) as second:
        await second.publish(story.beats(time.time())[1])
        await until(page, f"{status} === 'live' && {NODES}.length === 1")
