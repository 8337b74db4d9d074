"""What the page's script makes of the fleet's own values, in a real browser."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from playwright.async_api import Page

from glowplug.domain.hardware import Gpu, Grant, GrantOwner, SharedWeights
from glowplug.domain.instance import InstanceState, Phase, PhaseName
from glowplug.services.console.fleet_rows import TimedStart, timed_start
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest

pytestmark = pytest.mark.asyncio(loop_scope="session")

AT = 1000.0
DECIDE = Phase(name=PhaseName.DECIDE, started_at=AT, ended_at=AT + 0.5)
LOAD = Phase(name=PhaseName.LOAD, started_at=AT + 2.0, ended_at=AT + 3.0, predicted_s=0.8)
LAUNCH = Phase(name=PhaseName.LAUNCH, started_at=AT + 1.5, ended_at=0.0, predicted_s=2.0)
Reckoned = Callable[[str, Any], Awaitable[Any]]


@pytest_asyncio.fixture(loop_scope="session")
async def reckoned(at: ConsoleUnderTest, page: Page) -> Reckoned:
    """Calls a function of the page's module of values."""
    await page.goto(at.url)
    await until(page, "document.querySelectorAll('.node').length === 3")
    call = "async ([name, value]) => (await import('/page/values.js'))[name](value)"
    return lambda name, value: page.evaluate(call, [name, msgspec.to_builtins(value)])


async def test_a_sleeping_engine_has_the_bytes_that_it_keeps_of_the_host(reckoned: Reckoned) -> None:
    awake = story.instance("i-1", "chat", "node-1", InstanceState.READY, AT)
    asleep = replace(awake, state=InstanceState.SWAPPED_OUT, host_bytes=60)
    assert await reckoned("bytesOf", awake) == sum(worker.num_bytes for worker in awake.workers)
    assert await reckoned("bytesOf", asleep) == 60


def start(state: InstanceState, **changes: Any) -> TimedStart:
    made = story.instance("i-1", "chat", "node-1", state, AT)
    return timed_start(replace(made, **{"created_at": AT + 1.0, "changed_at": AT + 3.0, "ready_at": 0.0, **changes}))


async def test_a_start_is_counted_from_the_decision_with_what_was_predicted(reckoned: Reckoned) -> None:
    ready = start(InstanceState.READY, ready_at=AT + 4.0, phases=(LOAD, DECIDE))
    assert await reckoned("secondsOf", ready) == 4.0
    assert await reckoned("phasesOf", ready) == [
        {"name": "decide", "offset_s": 0.0, "duration_s": 0.5, "predicted_s": 0.0},
        {"name": "load", "offset_s": 2.0, "duration_s": 1.0, "predicted_s": 0.8},
    ]
    going = start(InstanceState.STARTING, phases=(LAUNCH,))
    assert await reckoned("secondsOf", going) == 0
    unfinished = {"name": "launch", "offset_s": 0.5, "duration_s": -1, "predicted_s": 2.0}
    assert await reckoned("phasesOf", going) == [unfinished], "it has no length yet"


async def test_a_start_that_failed_says_why_and_an_engine_that_died_later_is_none(reckoned: Reckoned) -> None:
    failed = start(InstanceState.FAILED, reason="no kernel image")
    assert await reckoned("failureOf", failed) == "no kernel image"
    assert await reckoned("secondsOf", failed) == 2.0
    assert await reckoned("failureOf", start(InstanceState.FAILED)) == "no reason given"
    assert await reckoned("failureOf", start(InstanceState.FAILED, reason="killed", ready_at=AT + 2.0)) == ""


async def test_weights_that_several_read_stand_once_with_all_who_read_them(reckoned: Reckoned) -> None:
    grants = tuple(Grant(holder=holder, owner=GrantOwner.WEIGHTS, num_bytes=0) for holder in ("i-33f0", "i-0a9e"))
    kv = Grant(holder="i-none", owner=GrantOwner.KV, num_bytes=7)
    asleep = Grant(holder="i-s", owner=GrantOwner.SLEEPER, num_bytes=50)
    shared = SharedWeights(key="k", num_bytes=90, holders=("i-33f0", "i-0a9e"))
    alone = SharedWeights(key="l", num_bytes=5, holders=("i-0a9e",))
    gpu = Gpu(gpu_id="n/0", total_bytes=100, grants=(*grants, kv), sleepers=(asleep,), shared=(shared, alone))
    found = await reckoned("slicesOf", gpu)
    assert [(one["holder"], one["owner"], one["num_bytes"], one["model_key"], one["emulated"]) for one in found] == [
        ("i-none", "kv", 7, "", False),
        ("i-s", "sleeper", 50, "", False),
        ("i-33f0, i-0a9e", "shared", 90, "big-emulated", True),
    ]
    assert await reckoned("usedBytes", gpu) == gpu.used_bytes == 97
    assert await reckoned("usedBytes", replace(gpu, total_bytes=80)) == 80, "no GPU shows more than it has"
