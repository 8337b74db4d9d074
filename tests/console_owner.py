"""A router, an autoscaler and a placer in one, for tests of what the console passes on: it notes what reaches it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from glowplug.runtime.rest import error_body
from glowplug.runtime.service import serve_rest
from glowplug.runtime.settings import ServiceSettings
from tests import console_story as story

ADMIN_TOKEN, API_KEY = "gpa-right", "gpk-right"
SILENCE_S = 20.0


def event(**data: object) -> bytes:
    """One SSE event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def piece(text: str) -> bytes:
    """One chunk of a streamed answer."""
    return event(choices=[{"index": 0, "delta": {"content": text}}])


DONE = event(choices=[], usage={"completion_tokens": 3}) + b"data: [DONE]\n\n"


@dataclass
class FakeOwner:
    """It answers chats with `script`, bytes as they stand and an Event where it waits; actions as it is told."""

    url: str = ""
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    script: list[bytes | asyncio.Event] = field(default_factory=lambda: [piece("Hello"), piece(", there"), DONE])
    refuses: dict[str, Any] | None = None  # a whole error answer for chats, with its "status"
    api_key: str = ""
    admin_token: str = ADMIN_TOKEN
    hold: asyncio.Event | None = None  # actions are answered only then
    head_at_once: bool = True
    emulated: bool = True
    trace: int = 1
    num_sent: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.post("/v1/chat/completions")(self.chat)
        app.get("/v1/models")(self.models)
        app.post("/{path:path}")(self.act)
        return app

    @property
    def paths(self) -> list[str]:
        return [path for _, path, *_ in self.asked]

    @property
    def chats(self) -> list[dict[str, Any]]:
        """The bodies of the chats asked for."""
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
            "X-Request-Id": f"req-{self.trace}",
            "traceparent": story.traceparent(self.trace),
            "X-Private": "stays inside",
        }
        if self.emulated:
            headers["X-Glowplug-Emulated"] = "1"
        return StreamingResponse(self._play(), media_type="text/event-stream", headers=headers)

    async def models(self, request: Request) -> Response:
        await self._note(request)
        return self._unauthorized(request, self.api_key) or JSONResponse({"object": "list", "data": []})

    async def act(self, request: Request, path: str) -> Response:
        await self._note(request)
        if "slow" in path:
            await asyncio.sleep(SILENCE_S)
        if self.hold:
            await self.hold.wait()
        if refused := self._unauthorized(request, self.admin_token):
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
    """A FakeOwner on a port of its own."""
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
    """Settings of a console that passes everything on to `owner`."""
    return {f"{name}_url": owner.url for name in ("router", "autoscaler", "placer")}
