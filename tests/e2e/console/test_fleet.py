"""The Fleet view in a real browser."""

import dataclasses
import time
from typing import Any

import pytest
from playwright.async_api import Page, expect

from glowplug.controllers.operator import CORDONS, Cordon
from glowplug.domain.hardware import Gpu, Grant, GrantOwner, Link
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.envelope import to_json
from glowplug.events.facts import (
    InstanceReady,
    InstanceStopped,
    NodeBeat,
    NodeLeft,
    RouterLoadReported,
    WeightsFetched,
    WeightsProgressed,
)
from tests import console_story as story
from tests.browser import until
from tests.console_server import ConsoleUnderTest

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = story.MIB
DIGEST = "a" * 64
GRANTS = (
    "[...document.querySelectorAll('.node')].map((node) => [...node.querySelectorAll('.grant')]"
    ".map((grant) => grant.className.split(' ')[1] + ' ' + Math.round(parseFloat(grant.style.width))))"
)


def progressed(done_mib: int) -> WeightsProgressed:
    return WeightsProgressed(
        node_id="node-3", model_key="smol-tutor", digest=DIGEST, num_bytes_done=done_mib * MIB, num_bytes=139 * MIB
    )


def beat(number: int, grants: tuple[Grant, ...] = (), revision: int = 2, **fields: Any) -> NodeBeat:
    return NodeBeat(node=story.node(f"node-{number}", time.time(), grants, revision=revision, **fields))


async def test_memory_is_drawn_by_owner_and_model(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(at.url)
    await until(page, "document.querySelectorAll('.grant').length === 8")
    assert await page.evaluate(GRANTS) == [
        ["weights 22", "kv 10", "weights 40", "kv 10"],
        ["weights 22", "kv 10", "weights 50", "kv 15"],
        [],
    ]
    node = page.locator(".node[data-node=node-2]")
    await expect(node.locator(".holder")).to_have_text(["Qwen/Qwen3-8B0/8emulated", "smol-poet1/8"])
    await expect(node.get_by_role("img")).to_have_accessible_name(
        "GPU 0, host memory, 619 MiB of 640 MiB used. smol-poet: weights 139 MiB; smol-poet: KV cache 64 MiB; "
        "Qwen/Qwen3-8B: weights 320 MiB; Qwen/Qwen3-8B: KV cache 96 MiB"
    )
    await expect(page.locator("#status")).to_have_text("live")
    figures = await page.locator(".figures dd").all_text_contents()
    assert figures[:6] == ["3 of 3", "1.1 GiB of 1.9 GiB", "3 ready1 loading", "3 of 6", "7", "4"]


async def test_prewarmed_and_reserved_bytes_look_like_what_they_are(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(at.url)
    grants = (
        Grant(holder="r-1", owner=GrantOwner.PREWARM, num_bytes=64 * MIB),
        Grant(holder="r-2", owner=GrantOwner.RESERVATION, num_bytes=128 * MIB),
    )
    await at.tell(beat(3, grants))
    node = page.locator(".node[data-node=node-3]")
    await expect(node.locator(".grant")).to_have_count(2)
    await expect(node.locator(".holder")).to_have_text(["r-1prewarmed", "r-2reserved"])


async def test_what_happens_shows_without_a_reload(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(at.url)
    coder = page.locator(".motion", has_text="smol-coder")
    await expect(coder.locator(".state")).to_contain_text("loading")
    ready = story.instance("i-b7d4", "smol-coder", "node-1", InstanceState.READY, time.time(), revision=6)
    loads = {"smol-coder": ModelLoad(num_in_flight=5, in_flight_by_instance={"i-b7d4": 5})}
    await at.tell(InstanceReady(instance=ready), RouterLoadReported(router_id="router-1", loads=loads))
    await expect(coder.locator(".state")).to_have_class("state ready")
    await expect(coder).to_contain_text("5 running")
    await expect(page.locator(".node[data-node=node-1] .holder", has_text="smol-coder")).to_have_text("smol-coder5/8")


async def test_weights_on_a_link_are_seen_coming(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(at.url)
    link = Link(link_id="node-3/nic", bytes_per_s=100 * MIB, bytes_in_flight=99 * MIB, num_transfers=1)
    await at.tell(beat(3, links=(link,)), progressed(40))
    node = page.locator(".node[data-node=node-3]")
    await expect(node.locator(".link.busy")).to_contain_text("99 MiB in flight")
    await expect(node.locator(".fetch")).to_contain_text("40 MiB of 139 MiB")
    await expect(page.locator(".transfer")).to_contain_text("smol-tutor→ node-3")
    at.clock.forward(0.5)
    await at.tell(progressed(90))
    await expect(node.locator(".fetch")).to_contain_text("90 MiB of 139 MiB")
    await expect(node.locator(".fetch")).to_contain_text("100 MiB/s")
    width = await page.evaluate("document.querySelector('.fetch .thin i').style.width")
    assert abs(float(width.rstrip("%")) - 100 * 90 / 139) < 0.1
    whole = WeightsFetched(
        node_id="node-3", model_key="smol-tutor", digest=DIGEST, num_bytes=139 * MIB, seconds=1.0, source="http"
    )
    idle = dataclasses.replace(link, bytes_in_flight=0, num_transfers=0)
    await at.tell(whole, beat(3, links=(idle,), revision=3))
    await expect(page.locator(".fetch, .transfer")).to_have_count(0)
    await expect(node.locator(".link").first).to_contain_text("idle")


async def test_a_node_that_leaves_is_called_silent_and_one_that_drains_drained(
    at: ConsoleUnderTest, page: Page
) -> None:
    await page.goto(at.url)
    await at.tell(NodeLeft(node_id="node-3", reason="no heartbeat"))
    await expect(page.locator(".node[data-node=node-3] .node-state")).to_contain_text("silent since")
    await expect(page.locator(".figures dd").first).to_have_text("2 of 31 silent")
    await at.store.put(CORDONS, "node-1", to_json(Cordon("node-1", True)))
    head = page.locator(".node[data-node=node-1]")
    await expect(head.locator(".node-state")).to_have_text("drained")
    await expect(head.get_by_role("button")).to_have_text("Undrain")
    await page.locator("#node-state").select_option("draining")
    await expect(page.locator(".node")).to_have_count(1)
    await at.store.delete(CORDONS, "node-1")
    await expect(page.locator(".node")).to_have_count(0)
    await expect(page.locator(".nodes-panel .empty")).to_have_text("No node matches.")


async def test_nodes_are_filtered_by_what_they_hold(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(at.url)
    await expect(page.locator(".node")).to_have_count(3)
    await page.keyboard.press("/")
    await page.keyboard.type("qwen")
    await expect(page.locator(".node h3 b")).to_have_text(["node-2"])
    await expect(page.locator(".nodes-panel .note")).to_have_text("1 of 3 nodes")
    gone = story.instance("i-33f0", "big-emulated", "node-2", InstanceState.STOPPED, time.time(), revision=9)
    await at.tell(InstanceStopped(instance=gone), beat(2, story.grants("i-0a9e", 139, 64)))
    await expect(page.locator(".node")).to_have_count(0)


async def test_a_click_leads_to_the_model_the_decision_and_the_trace(at: ConsoleUnderTest, page: Page) -> None:
    await page.goto(at.url)
    await page.locator(".node[data-node=node-1] .holder a", has_text="smol-chat").click()
    assert await page.evaluate("location.hash") == "#/model/smol-chat"
    await expect(page.locator("h1")).to_contain_text("smol-chat")
    await page.go_back()
    await page.locator(".decisions .kind.place").first.click()
    assert await page.evaluate("location.hash") == "#/decision/d-4"
    await page.go_back()
    await at.publish(*story.cold_trace(0, time.time() - 5, "smol-chat", "req-0000"))
    await page.locator(".decisions .to-trace").first.click()
    assert await page.evaluate("location.hash") == f"#/trace/{story.trace_id(0)}"


async def test_emulated_gpus_are_called_emulated(at: ConsoleUnderTest, page: Page) -> None:
    gpus = tuple(Gpu(gpu_id=f"node-4/{i}", total_bytes=640 * MIB, kind="emulated") for i in range(2))
    await at.tell(beat(4, gpus=gpus, engines=("emulated",)))
    await page.goto(at.url)
    node = page.locator(".node[data-node=node-4]")
    await expect(node.locator(".node-head")).to_contain_text("2 GPUs")
    await expect(node.locator(".node-head .badge")).to_have_text("emulated")
    await expect(node.locator(".node-head")).not_to_contain_text("host memory")
    await expect(node.get_by_role("img").first).to_have_accessible_name("GPU 0, emulated, 0 B of 640 MiB used. ")
