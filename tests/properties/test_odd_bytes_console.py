"""A console over odd rows and odd events: it goes on reading, beats on, and every view of it is JSON."""

import asyncio
import contextlib
import itertools
import json
from typing import Any

import httpx
from hypothesis import given, settings
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.events.envelope import MalformedEvent, decode
from glowplug.state.memory_store import MemoryStore
from services.console.app import Console, build_app
from services.console.handlers import Feed
from services.console.metrics import ConsoleMetrics
from services.console.settings import ConsoleSettings
from tests.odd_rows import NOW, event_bytes, key_of, steps

VIEWS = (
    "fleet",
    "requests",
    "decisions",
    "events/latest?plane=evt&plane=tel&plane=cmd",
    "models/m",
    "requests?q=x&state=ended",
)


async def connected() -> None:
    """The bus in memory needs no connecting."""


async def expect_shown(drawn: list[Any]) -> None:
    now_s, ids = NOW, itertools.count(1)
    store = MemoryStore()
    console = Console(ConsoleSettings(), ConsoleMetrics(CollectorRegistry()), clock=lambda: now_s)
    feed = Feed(console, MemoryBus(), store, connected)
    console.hub.join(console.view, now_s)
    for step in drawn:
        if isinstance(step, float):
            now_s += step
        elif len(step) == 2:
            table, rows = step
            store.tables[table] = {key_of(table, row): json.dumps(row).encode() for row in rows}
        else:
            with contextlib.suppress(MalformedEvent):
                await feed._on_event(decode(event_bytes(next(ids), *step)))
        await feed.resync()
        feed.beat()
    transport = httpx.ASGITransport(build_app(console))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        paths = [f"/api/v1/{view}" for view in VIEWS]
        paths += [f"/api/v1/events/e-{number}" for number in range(1, next(ids))]
        for path in paths:
            answer = await client.get(path)
            assert answer.status_code in (200, 404), (path, answer.text)
            answer.json()


@settings(max_examples=40)
@given(drawn=steps)
def test_a_console_shows_whatever_decodes(drawn: list[Any]) -> None:
    asyncio.run(expect_shown(drawn))
