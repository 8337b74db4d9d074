"""A console over a memory bus and store, served on a real port inside the test's own loop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

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


@dataclass
class Hands:
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
    clock: Hands

    async def tell(self, *events: object) -> None:
        """Publish events and let the console's handler run."""
        bus = MemoryBus(self.broker)
        for event in events:
            await bus.publish(event)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)

    async def export(self, request: ExportTraceServiceRequest) -> None:
        """Send spans as a service does."""
        headers = {"Content-Type": "application/x-protobuf"}
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{self.url}/v1/traces", content=request.SerializeToString(), headers=headers)
        assert answer.status_code == 200, answer.text


@contextlib.asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[ConsoleUnderTest]:
    """A console on a port of its own, fed by memory twins."""
    registry, broker, store = CollectorRegistry(), MemoryBroker(), MemoryStore()
    told = ConsoleSettings(**{"resync_s": 0.1, "stream_beat_s": 0.05, **settings})  # type: ignore[arg-type]
    clock = Hands()
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
