"""The console over real HTTP: over in-memory doubles, over real NATS and Valkey, and with neither."""

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.bus.nats_bus import NatsBus
from glowplug.events.envelope import to_json
from glowplug.events.facts import ModelDeployed, NodeBeat
from glowplug.services.console.app import PAGE_HEADERS, Console
from glowplug.services.console.main import Feed
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.settings import ConsoleSettings
from glowplug.state.memory_store import MemoryStore
from glowplug.state.redis_store import RedisStore
from tests import console_story as story
from tests.console_server import ConsoleUnderTest, serving
from tests.servers import NatsProcess, ValkeyProcess
from tests.waiting import WAIT_S, until

NOW = time.time()


@pytest.fixture
async def at() -> AsyncIterator[ConsoleUnderTest]:
    async with serving() as console:
        yield console


async def test_a_trace_is_found_by_its_id_and_by_its_request(at: ConsoleUnderTest) -> None:
    await at.publish(*story.cold_trace(1, time.time() - 5, "m", "r-1"))
    one = await at.read("/api/v1/requests/r-1/trace")
    assert (one["name"], one["request_ids"], len(one["rows"])) == ("router.request", ["r-1"], 12)
    assert await at.read(f"/api/v1/traces/{story.trace_id(1)}") == one
    assert await at.read("/api/v1/traces/2") == one, "the short form of its id"


async def test_what_is_not_there_is_a_404(at: ConsoleUnderTest) -> None:
    for path in ("/api/v1/traces/beef", "/api/v1/requests/unknown/trace"):
        answer = await at.get(path)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    assert (await at.get("/api/v1/traces?limit=0")).status_code == 400


async def test_the_list_is_filtered_and_bounded() -> None:
    async with serving(requests_shown=5) as at:
        for seed in range(8):
            await at.publish(*story.warm_trace(seed, time.time(), f"model-{seed % 2}", f"r-{seed}"))
        page = (await at.get("/api/v1/traces?q=MODEL-1")).json()
        assert [line["request_ids"] for line in page["traces"]] == [["r-7"], ["r-5"], ["r-3"]]
        assert (page["num_kept"], page["num_evicted"]) == (5, 3)


async def test_snapshot_has_models_nodes_and_decisions(at: ConsoleUnderTest) -> None:
    await at.publish(*story.fleet_events(time.time()))
    await until(lambda: len(at.console.view.decisions) == 6, "six decisions")
    answer = await at.get("/api/v1/fleet")
    fleet = answer.json()
    assert answer.headers["cache-control"] == "no-store"
    assert next(row["value"]["key"] for row in fleet["models"]) == "big-emulated"
    assert {row["joined"]["state"] for row in fleet["models"]} == {"ready", "loading", "cold", "failed"}
    assert len(fleet["nodes"]) == 3 and len(fleet["decisions"]) == 6
    assert len(answer.content) < 100_000


async def test_stream_sends_the_fleet_then_patches_then_traces(at: ConsoleUnderTest) -> None:
    await at.publish(*story.fleet_events(time.time()))
    stream = at.messages("/api/v1/stream")
    name, fleet = await anext(stream)
    assert name == "fleet" and len(fleet["models"]) == 6
    await at.tell(ModelDeployed(model=story.model("new", "new-model", 10)))
    await at.publish(*story.warm_trace(40, time.time(), "new", "r-9"))
    seen: dict[str, Any] = {}
    async with asyncio.timeout(WAIT_S):
        async for name, data in stream:
            traces = [line for line in data.get("traces", ()) if line["request_ids"] == ["r-9"]]
            if traces or any(row["value"]["key"] == "new" for row in data.get("models", ())):
                seen[name] = data
            if len(seen) == 2:
                break
    assert set(seen) == {"traces", "patch"}
    await stream.aclose()
    await until(lambda: not at.console.hub.clients, "the page's place is free again")


async def test_too_many_pages_get_a_time_to_wait() -> None:
    async with serving(stream_max_clients=1) as at:
        stream = at.messages("/api/v1/stream")
        await anext(stream)
        refused = await at.get("/api/v1/stream")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
        await stream.aclose()


async def test_page_and_its_files_are_self_contained(at: ConsoleUnderTest) -> None:
    async with httpx.AsyncClient(base_url=at.url) as client:
        page = await client.get("/")
        assert page.status_code == 200 and "text/html" in page.headers["content-type"]
        for name, value in PAGE_HEADERS.items():
            assert page.headers[name] == value
        assert "unsafe" not in page.headers["content-security-policy"]
        for path in ("main.js", "live.js", "waterfall.js", "base.css", "favicon.svg"):
            asset = await client.get(f"/page/{path}")
            assert asset.status_code == 200, path
            outside = asset.text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in outside and "https://" not in outside and "innerHTML" not in outside
        assert (await client.get("/page/../app.py")).status_code == 404
        assert (await client.get("/page/app.py")).status_code == 404
        assert (await client.head("/")).status_code == 200
        again = await client.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert page.text.count('rel="modulepreload"') > 10, "modules are asked for at once"


async def test_the_console_changes_nothing_itself(at: ConsoleUnderTest) -> None:
    """Every route that accepts input, including those passed on to the service that owns them."""
    document = await at.read("/openapi.json")
    mutating = {path for path, item in document["paths"].items() if set(item) & {"post", "put", "patch", "delete"}}
    passed_on = {"/api/v1/models/{key}/{verb}", "/api/v1/nodes/{node_id}/{verb}", "/playground/v1/chat/completions"}
    passed_on |= {f"/api/v1/{path}" for path in ("tenants/{name}", "keys", "keys/{key_id}", "keys/{key_id}/rotate")}
    passed_on |= {f"/api/v1/{path}" for path in ("models", "models/{key}", "model_files", "logs")}
    assert mutating == {"/login", "/logout", *passed_on}


async def test_it_lives_without_bus_and_store_and_says_since_when(at: ConsoleUnderTest) -> None:
    await at.publish(*story.fleet_events(time.time()))
    await until(lambda: all(s.is_up for s in at.console.view.sources.values()), "both sources")
    at.broker.down = at.store.down = True
    await until(lambda: not any(s.is_up for s in at.console.view.sources.values()), "both sources down")
    fleet = await at.read("/api/v1/fleet")
    assert fleet["sources"]["bus"]["stale_since"] > 0 and fleet["sources"]["store"]["stale_since"] > 0
    assert len(fleet["models"]) == 6
    assert (await at.get("/ready")).status_code == 200
    at.broker.down = at.store.down = False
    await until(lambda: all(s.is_up for s in at.console.view.sources.values()), "both sources back")


async def test_real_bus_and_store_come_go_and_come_back(
    own_nats: NatsProcess, own_valkey: ValkeyProcess, tmp_path: Path
) -> None:
    console = Console(ConsoleSettings(resync_s=0.1, state_dir=tmp_path), ConsoleMetrics(CollectorRegistry()))
    bus, writer = NatsBus(own_nats.url, "console-1"), NatsBus(own_nats.url, "writer-1")
    store, revisions = RedisStore(own_valkey.url), itertools.count(1)
    feed = Feed(console, bus, store, bus.connect)

    async def beats_come() -> None:
        """Telemetry is not stored: send beats until one arrives."""
        seen_before = console.view.node_table.moved_at("node-9")
        async with asyncio.timeout(WAIT_S):
            while console.view.node_table.moved_at("node-9") == seen_before:
                node = story.node("node-9", time.time(), (), revision=next(revisions))
                with contextlib.suppress(Exception):
                    await writer.publish(story.fact(NodeBeat(node=node), time.time()))
                await asyncio.sleep(0.1)

    def answer() -> list[bool]:
        return [source.is_up for source in console.view.sources.values()]

    async with contextlib.AsyncExitStack() as stack:
        for end in (store.close, writer.close, bus.close, feed.stop):  # the last is called first
            stack.push_async_callback(end)
        feed.start()
        await asyncio.wait_for(writer.connect(), WAIT_S)
        await until(lambda: all(answer()), "both sources")
        await store.put("models", "m1", to_json(story.model("m1", "from-the-table", 10)))
        await store.put("models", "broken", b"{not json")
        await until(lambda: "m1" in console.view.models, "a row of the store")
        await beats_come()
        await writer.publish(story.fact(ModelDeployed(model=story.model("m2", "from-a-fact", 10)), time.time()))
        await until(lambda: "m2" in console.view.models, "a fact")

        own_nats.kill()
        own_valkey.kill()
        await until(lambda: not any(answer()), "both down")
        own_nats.start()
        own_valkey.start()
        await until(lambda: all(answer()), "both back")
        await beats_come()


async def test_a_bus_that_was_never_reached_is_closed_without_a_word() -> None:
    bus = NatsBus("nats://127.0.0.1:1", "console-1")
    await bus.close()
    assert not bus.connected


async def test_stopping_ends_even_when_a_cancellation_is_swallowed(tmp_path: Path) -> None:
    """asyncio.wait_for of Python 3.11 can lose one, typically while the bus is unreachable."""
    swallowed = []

    async def stubborn() -> None:
        while len(swallowed) < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed.append(True)
        await asyncio.sleep(60)

    console = Console(ConsoleSettings(state_dir=tmp_path), ConsoleMetrics(CollectorRegistry()))
    feed = Feed(console, MemoryBus(), MemoryStore(), stubborn)
    feed.start()
    await asyncio.sleep(0.01)
    await asyncio.wait_for(feed.stop(), WAIT_S)
    assert len(swallowed) == 2
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_an_event_leads_to_its_causes_and_effects(at: ConsoleUnderTest) -> None:
    await at.publish(*story.placement(NOW))
    latest = await at.read("/api/v1/events/latest")
    assert [row["seen"]["kind"] for row in latest["rows"]][-4:] == [
        "request.waiting", "placer.place", "decision.made", "instance.ready",
    ]  # fmt: skip
    assert latest["command"] == "glowplug tap" and "instance.ready" in latest["types"]
    found = await at.read("/api/v1/events/e-decision")
    assert [row["event_id"] for row in found["chain"]] == ["e-place", "e-waiting"]
    assert found["event"]["data"]["decision"]["reason"].startswith("first GPU with 301 MiB free")
    assert [row["event_id"] for row in (await at.read("/api/v1/events/e-place"))["effects"]] == ["e-decision"]
    assert (await at.get("/api/v1/events/none")).status_code == 404
    refused = await at.get("/api/v1/events/latest", plane="odd")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "plane"


async def test_the_stream_filters_on_the_server_and_counts_what_it_leaves_out() -> None:
    async with serving(events_per_beat=5) as at:
        await at.publish(*story.placement(NOW))
        url = "/api/v1/events?plane=evt&model=smol-poet&type=request.&q=REQ-W"
        stream = at.messages(url)
        name, opening = await anext(stream)
        assert name == "events" and [row["event_id"] for row in opening["rows"]] == ["e-waiting"]
        assert opening["command"] == "glowplug tap --plane evt --type request. --model smol-poet --grep REQ-W"
        waiting = story.placement(NOW)[0]
        flood = [dataclasses.replace(waiting, event_id=f"e-{n}") for n in range(200)]
        await at.publish(*flood, *story.placement(NOW)[1:])
        rows, skipped = [], 0
        async with asyncio.timeout(WAIT_S):
            async for name, batch in stream:
                assert name == "more" and len(batch["rows"]) <= 5
                rows += [row["event_id"] for row in batch["rows"]]
                skipped += batch["num_skipped"]
                if len(rows) + skipped >= 200:
                    break
        assert len(rows) + skipped == 200 and rows[-1] == "e-199", "every event is shown or counted"
        await stream.aclose()
        await until(lambda: not at.console.events.watchers)


async def test_views_of_events_are_few_and_end_with_the_console() -> None:
    async with serving(events_max_watchers=1) as at:
        stream = at.messages("/api/v1/events")
        await anext(stream)
        refused = await at.get("/api/v1/events")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
    async with asyncio.timeout(WAIT_S):
        rest = [name async for name, _ in stream]
    assert set(rest) <= {"more"}, "it ended by itself"


async def test_decisions_of_before_the_console_come_from_the_store(at: ConsoleUnderTest) -> None:
    for number in range(3):
        await at.store.append("decisions", to_json(story.decisions(NOW)[number]), keep=10)
    await until(lambda: len(at.console.view.decisions) == 3, "three decisions")
    found = (await at.read("/api/v1/decisions"))["decisions"]
    assert [row["value"]["decision_id"] for row in found] == ["d-2", "d-1", "d-0"]


@pytest.mark.parametrize("trace_disk", [True, False])
async def test_traces_outlive_their_console(tmp_path: Path, trace_disk: bool) -> None:
    async with serving(state_dir=tmp_path, trace_disk=trace_disk) as first:
        first.console.open_disk()
        await first.publish(*story.cold_trace(0, NOW - 5, "m", "r-0"))
        before = await first.read("/api/v1/requests/r-0/trace")
        if first.console.disk is not None:
            first.console.disk.write()
    async with serving(state_dir=tmp_path, trace_disk=trace_disk) as second:
        second.console.open_disk()
        if trace_disk:
            assert await second.read("/api/v1/requests/r-0/trace") == before
        else:
            assert (await second.read("/api/v1/traces"))["num_kept"] == 0
