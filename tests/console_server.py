"""A console over a memory bus and store, served on a real port inside the test's own loop."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.runtime.service import serve_rest
from glowplug.state.memory_store import MemoryStore
from services.console.app import Console, build_app
from services.console.handlers import Feed
from services.console.metrics import ConsoleMetrics
from services.console.settings import ConsoleSettings
from tests.waiting import WAIT_S


@dataclass
class StoppableClock:
    """The console's clock: the real one until it is stopped; then it stands still but for `forward`."""

    stopped_at: float = 0.0

    def __call__(self) -> float:
        return self.stopped_at or time.time()

    def stop(self) -> float:
        self.stopped_at = time.time()
        return self.stopped_at

    def forward(self, seconds: float) -> float:
        self.stopped_at += seconds
        return self.stopped_at


@dataclass
class ConsoleUnderTest:
    console: Console
    url: str
    broker: MemoryBroker
    store: MemoryStore
    registry: CollectorRegistry
    clock: StoppableClock

    async def tell(self, *events: object) -> None:
        """Publish events and let the console's handler run."""
        bus = MemoryBus(self.broker)
        for event in events:
            await bus.publish(event)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)

    async def get(self, path: str, **query: str) -> httpx.Response:
        """What the console answers, whatever its status."""
        async with httpx.AsyncClient() as client:
            return await client.get(self.url + path, params=query or None)

    async def read(self, path: str, **query: str) -> Any:
        """The JSON of an answer with status 200."""
        answer = await self.get(path, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def export(self, request: ExportTraceServiceRequest) -> None:
        """Send spans as a service does."""
        headers = {"Content-Type": "application/x-protobuf"}
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{self.url}/v1/traces", content=request.SerializeToString(), headers=headers)
        assert answer.status_code == 200, answer.text


async def messages(client: httpx.AsyncClient, url: str) -> AsyncIterator[tuple[str, Any]]:
    """Name and data of each server-sent event at `url`."""
    async with client.stream("GET", url, timeout=WAIT_S) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                yield name, json.loads(line[6:])


@contextlib.asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[ConsoleUnderTest]:
    """A console on a port of its own, fed by memory twins."""
    registry, broker, store = CollectorRegistry(), MemoryBroker(), MemoryStore()
    told = ConsoleSettings(**{"resync_s": 0.1, "stream_beat_s": 0.05, **settings})  # type: ignore[arg-type]
    clock = StoppableClock()
    console = Console(told, ConsoleMetrics(registry), clock=clock)

    async def connect() -> None:
        return None

    feed = Feed(console, MemoryBus(broker), store, connect)
    server, url = await serve_rest(build_app(console), told)
    feed.start()
    while len(broker.subscriptions) < 3:  # facts, telemetry and commands
        await asyncio.sleep(0)
    try:
        yield ConsoleUnderTest(console, url, broker, store, registry, clock)
    finally:
        await feed.stop()
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
