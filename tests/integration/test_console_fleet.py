"""The fleet's snapshot and stream: over memory twins, over real NATS and Valkey, and with neither."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.bus.nats_bus import NatsBus
from glowplug.events.envelope import to_json
from glowplug.events.facts import ModelDeployed, NodeBeat
from glowplug.state.memory_store import MemoryStore
from glowplug.state.redis_store import RedisStore
from services.console.app import PAGE_HEADERS, Console, build_app
from services.console.handlers import Feed
from services.console.metrics import ConsoleMetrics
from services.console.settings import ConsoleSettings
from tests import console_story as story
from tests.console_server import serving
from tests.servers import NatsProcess, ValkeyProcess
from tests.waiting import until

PATIENCE_S = 20.0


async def messages(client: httpx.AsyncClient, url: str) -> AsyncIterator[tuple[str, Any]]:
    async with client.stream("GET", f"{url}/api/v1/stream", timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, json.loads(line[6:])


async def test_snapshot_has_models_nodes_decisions_and_requests() -> None:
    async with serving() as at:
        await at.tell(*story.fleet_events(time.time()))
        async with httpx.AsyncClient() as client:
            await until(lambda: len(at.console.view.decisions) == 6, "six decisions")
            answer = await client.get(f"{at.url}/api/v1/fleet")
        fleet = answer.json()
        assert answer.headers["cache-control"] == "no-store"
        assert next(model["key"] for model in fleet["models"]) == "big-emulated"
        assert {model["state"] for model in fleet["models"]} == {"ready", "loading", "cold", "failed"}
        assert len(fleet["nodes"]) == 3 and len(fleet["decisions"]) == 6 and len(fleet["requests"]) == 13
        assert len(answer.content) < 100_000


async def test_stream_sends_the_fleet_then_patches_then_traces() -> None:
    async with serving() as at, httpx.AsyncClient() as client:
        await at.tell(*story.fleet_events(time.time()))
        stream = messages(client, at.url)
        name, fleet = await anext(stream)
        assert name == "fleet" and len(fleet["models"]) == 6
        await at.tell(story.fact(ModelDeployed(model=story.model("new", "new-model", 10)), time.time()))
        body = story.warm_trace(0, time.time(), "new", "r-9").SerializeToString()
        headers = {"Content-Type": "application/x-protobuf"}
        await client.post(f"{at.url}/v1/traces", content=body, headers=headers)
        seen: dict[str, Any] = {}
        async with asyncio.timeout(PATIENCE_S):
            async for name, data in stream:
                if name == "traces" or any(model["key"] == "new" for model in data.get("models", ())):
                    seen[name] = data
                if len(seen) == 2:
                    break
        assert seen["traces"]["traces"][0]["request_ids"] == ["r-9"]
        await stream.aclose()
        await until(lambda: not at.console.hub.clients, "the page's place is free again")


async def test_too_many_pages_are_told_to_wait() -> None:
    async with serving(stream_max_clients=1) as at, httpx.AsyncClient() as client:
        stream = messages(client, at.url)
        await anext(stream)
        refused = await client.get(f"{at.url}/api/v1/stream")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "5"
        await stream.aclose()


async def test_page_and_its_files_are_self_contained() -> None:
    async with serving() as at, httpx.AsyncClient() as client:
        page = await client.get(at.url)
        assert page.status_code == 200 and "text/html" in page.headers["content-type"]
        for name, value in PAGE_HEADERS.items():
            assert page.headers[name] == value
        assert "unsafe" not in page.headers["content-security-policy"]
        for path in ("main.js", "live.js", "waterfall.js", "base.css", "favicon.svg"):
            asset = await client.get(f"{at.url}/page/{path}")
            assert asset.status_code == 200, path
            outside = asset.text.replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in outside and "https://" not in outside and "innerHTML" not in outside
        assert (await client.get(f"{at.url}/page/../app.py")).status_code == 404
        assert (await client.get(f"{at.url}/page/app.py")).status_code == 404
        assert (await client.head(at.url)).status_code == 200
        again = await client.get(at.url, headers={"If-None-Match": page.headers["etag"]})
        assert again.status_code == 304 and not again.content
        assert page.text.count('rel="modulepreload"') > 10, "modules are asked for at once"


async def test_the_console_changes_nothing_itself() -> None:
    """Every door that takes something in: spans, and what is passed on to the service that owns it."""
    async with serving() as at, httpx.AsyncClient() as client:
        document = (await client.get(f"{at.url}/openapi.json")).json()
        mutating = {path for path, item in document["paths"].items() if set(item) & {"post", "put", "patch", "delete"}}
        passed_on = {"/api/v1/models/{key}/{verb}", "/api/v1/nodes/{node_id}/{verb}", "/playground/v1/chat/completions"}
        assert mutating == {"/v1/traces", "/login", "/logout", *passed_on}


async def test_it_lives_without_bus_and_store_and_says_since_when() -> None:
    async with serving() as at, httpx.AsyncClient() as client:
        await at.tell(*story.fleet_events(time.time()))
        await until(lambda: at.console.view.sources["store"].is_up, "the store")
        at.broker.down = at.store.down = True
        await until(lambda: not any(s.is_up for s in at.console.view.sources.values()), "both sources down")
        fleet = (await client.get(f"{at.url}/api/v1/fleet")).json()
        assert fleet["sources"]["bus"]["stale_since"] > 0 and fleet["sources"]["store"]["stale_since"] > 0
        assert len(fleet["models"]) == 6
        assert (await client.get(f"{at.url}/ready")).status_code == 200
        at.broker.down = at.store.down = False
        await until(lambda: all(s.is_up for s in at.console.view.sources.values()), "both sources back")


@contextlib.asynccontextmanager
async def real_console(nats_url: str, redis_url: str) -> AsyncIterator[Console]:
    """A console on the true bus and store."""
    settings = ConsoleSettings(resync_s=0.1, stream_beat_s=0.05)
    console = Console(settings, ConsoleMetrics(CollectorRegistry()))
    build_app(console)
    bus, store = NatsBus(nats_url, "console-1"), RedisStore(redis_url)
    feed = Feed(console, bus, store, bus.connect)
    feed.start()
    try:
        yield console
    finally:
        await feed.stop()
        await bus.close()
        await store.close()


async def test_real_bus_and_store_come_go_and_come_back(own_nats: NatsProcess, own_valkey: ValkeyProcess) -> None:
    async with real_console(own_nats.url, own_valkey.url) as console:
        writer, store = NatsBus(own_nats.url, "writer-1"), RedisStore(own_valkey.url)
        await asyncio.wait_for(writer.connect(), PATIENCE_S)
        await until(lambda: all(s.is_up for s in console.view.sources.values()), "both sources")
        model, node = story.model("m1", "from-the-table", 10), story.node("node-9", time.time(), ())
        await store.put("models", "m1", to_json(model))
        await store.put("models", "broken", b"{not json")
        await until(lambda: "m1" in console.view.models, "a row of the store")

        async def heard(event: Any, seen: Any, what: str) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not seen():
                    with contextlib.suppress(Exception):
                        await writer.publish(event())
                    await asyncio.sleep(0.1)
            assert seen(), what

        beat = lambda: story.fact(NodeBeat(node=node), time.time())  # noqa: E731
        await heard(beat, lambda: "node-9" in console.view.nodes, "telemetry")
        fact = story.fact(ModelDeployed(model=story.model("m2", "from-a-fact", 10)), time.time())
        await writer.publish(fact)
        await until(lambda: "m2" in console.view.models, "a fact")

        own_nats.kill()
        own_valkey.kill()
        await until(lambda: not any(s.is_up for s in console.view.sources.values()), "both down")
        own_nats.start()
        own_valkey.start()
        await until(lambda: all(s.is_up for s in console.view.sources.values()), "both back")
        seen_before = console.view._seen_at["node-9"]
        await heard(beat, lambda: console.view._seen_at["node-9"] > seen_before, "telemetry after the restart")
        await writer.close()
        await store.close()


async def test_a_bus_that_was_never_reached_is_closed_without_a_word() -> None:
    bus = NatsBus("nats://127.0.0.1:1", "console-1")
    await bus.close()
    assert not bus.connected


async def test_stopping_ends_even_when_a_cancellation_is_swallowed() -> None:
    """asyncio.wait_for of Python 3.11 can lose one; a bus that cannot be reached is where that happens."""
    swallowed = []

    async def stubborn() -> None:
        while len(swallowed) < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                swallowed.append(True)
        await asyncio.sleep(60)

    console = Console(ConsoleSettings(), ConsoleMetrics(CollectorRegistry()))
    feed = Feed(console, MemoryBus(), MemoryStore(), stubborn)
    feed.start()
    await asyncio.sleep(0.01)
    await asyncio.wait_for(feed.stop(), PATIENCE_S)
    assert len(swallowed) == 2
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
