"""A console over a memory bus and store on a real port; a fake router, autoscaler and placer in one."""

import asyncio
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.events import Event
from glowplug.runtime.key_reader import KeyReader
from glowplug.runtime.rest import error_body
from glowplug.runtime.service import serve_rest
from glowplug.runtime.settings import ServiceSettings
from glowplug.services.console.app import Console, build_app
from glowplug.services.console.main import Feed
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.settings import ConsoleSettings
from glowplug.state.memory_store import MemoryStore
from tests import console_story as story
from tests.waiting import WAIT_S

ADMIN_TOKEN, API_KEY = "gpa-right", "gpk-right"
SILENCE_S = 20.0
_numbers = itertools.count(1000)


@dataclass
class StoppableClock:
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

    async def publish(self, *events: Event) -> None:
        bus = MemoryBus(self.broker)
        for event in events:
            await bus.publish(event)
        await asyncio.sleep(0.01)

    async def tell(self, *payloads: object) -> None:
        await self.publish(*(story.fact(data, self.clock(), next(_numbers)) for data in payloads))

    async def get(self, path: str, **query: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            return await client.get(self.url + path, params=query or None)

    async def read(self, path: str, **query: str) -> Any:
        answer = await self.get(path, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def messages(self, path: str) -> AsyncGenerator[tuple[str, Any], None]:
        async with httpx.AsyncClient(timeout=WAIT_S) as client, client.stream("GET", self.url + path) as answer:
            assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
            name = ""
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    yield name, json.loads(line[6:])


@contextlib.asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[ConsoleUnderTest]:
    """Serve a console with in-memory doubles, and a temporary `state_dir` unless one is given."""
    with tempfile.TemporaryDirectory(prefix="gp-console-", ignore_cleanup_errors=True) as folder:
        async with _serving(**{"state_dir": Path(folder), **settings}) as console:
            yield console


@contextlib.asynccontextmanager
async def _serving(**settings: object) -> AsyncIterator[ConsoleUnderTest]:
    registry, broker, store = CollectorRegistry(), MemoryBroker(), MemoryStore()
    given = ConsoleSettings(**{"resync_s": 0.1, "stream_beat_s": 0.05, **settings})  # type: ignore[arg-type]
    clock = StoppableClock()
    console = Console(given, ConsoleMetrics(registry), clock=clock, keys=KeyReader(store, clock))

    async def connect() -> None:
        return None

    feed = Feed(console, MemoryBus(broker), store, connect)
    server, url = await serve_rest(build_app(console), given)
    feed.start()
    while len(broker.subscriptions) < 3:
        await asyncio.sleep(0)
    try:
        yield ConsoleUnderTest(console, url, broker, store, registry, clock)
    finally:
        await feed.stop()
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


@contextlib.asynccontextmanager
async def visited(**settings: object) -> AsyncIterator[tuple[ConsoleUnderTest, httpx.AsyncClient]]:
    async with serving(**settings) as at, httpx.AsyncClient(base_url=at.url, timeout=SILENCE_S) as client:
        yield at, client
        await at.console.upstream.close()


Visit = contextlib.AbstractAsyncContextManager[tuple[ConsoleUnderTest, httpx.AsyncClient]]


def event(**data: object) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}}])


DONE = event(choices=[], usage={"completion_tokens": 3}) + b"data: [DONE]\n\n"


@dataclass
class FakeOwner:
    """Answers chats with `script` (bytes to send, Events to wait for), actions with 202."""

    url: str = ""
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    script: list[bytes | asyncio.Event] = field(default_factory=lambda: [piece("Hello"), piece(", there"), DONE])
    refuses: dict[str, Any] | None = None  # an error answer for chats, with its "status"
    api_key: str = ""
    prices: dict[str, Any] = field(default_factory=dict)  # by GPU
    hold: asyncio.Event | None = None  # actions wait until it is set
    head_at_once: bool = True
    emulated: bool = True
    num_sent: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.post("/v1/chat/completions")(self.chat)
        app.get("/v1/models")(self.models)
        app.get("/v1/gpus/{gpu_id:path}/worth")(self.worth)
        app.post("/{path:path}")(self.act)
        return app

    @property
    def paths(self) -> list[str]:
        return [path for _, path, *_ in self.asked]

    @property
    def chats(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, path, _, body in self.asked if path == "/v1/chat/completions"]

    async def chat(self, request: Request) -> Response:
        await self._note(request)
        if refused := self._unauthorized(request, self.api_key):
            return refused
        if self.refuses:
            status = int(self.refuses.pop("status", 503))
            return JSONResponse({"error": self.refuses}, status_code=status, headers={"Retry-After": "7"})
        if not self.head_at_once:
            await self._until_left(request)
        headers = {
            "Server-Timing": "queue;dur=1.0",
            "X-Request-Id": "req-1",
            "traceparent": story.traceparent(1),
            "X-Private": "stays inside",
        }
        if self.emulated:
            headers["X-Glowplug-Emulated"] = "1"
        return StreamingResponse(self._play(), media_type="text/event-stream", headers=headers)

    async def models(self, request: Request) -> Response:
        await self._note(request)
        return self._unauthorized(request, self.api_key) or JSONResponse({"object": "list", "data": []})

    async def worth(self, request: Request, gpu_id: str) -> Response:
        await self._note(request)
        prices = self.prices.get(gpu_id)
        if prices is None:
            return JSONResponse(error_body("no such GPU", "not_found_error", "not_found"), status_code=404)
        return JSONResponse(prices)

    async def act(self, request: Request, path: str) -> Response:
        await self._note(request)
        if "slow" in path:
            await asyncio.sleep(SILENCE_S)
        if self.hold:
            await self.hold.wait()
        if refused := self._unauthorized(request, ADMIN_TOKEN):
            return refused
        return JSONResponse({"key": path, "state": "starting"}, status_code=202)

    def _unauthorized(self, request: Request, wanted: str) -> Response | None:
        if not wanted or request.headers.get("authorization") == f"Bearer {wanted}":
            return None
        body = error_body("the key or token is missing or wrong", "authentication_error", "invalid_api_key")
        return JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})

    async def _note(self, request: Request) -> None:
        self.asked.append((request.method, request.url.path, dict(request.headers), await request.body()))

    async def _until_left(self, request: Request) -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        self.left.set()

    async def _play(self) -> AsyncIterator[bytes]:
        try:
            for part in self.script:
                if isinstance(part, bytes):
                    self.num_sent += 1
                    yield part
                    await asyncio.sleep(0)
                else:
                    await part.wait()
        finally:
            self.left.set()


@contextlib.asynccontextmanager
async def owning() -> AsyncIterator[FakeOwner]:
    owner = FakeOwner()
    server, owner.url = await serve_rest(owner.app(), ServiceSettings())
    try:
        yield owner
    finally:
        for part in owner.script:
            if isinstance(part, asyncio.Event):
                part.set()
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


def addresses(owner: FakeOwner) -> dict[str, str]:
    return {f"{name}_url": owner.url for name in ("data", "autoscaler", "placer")}
