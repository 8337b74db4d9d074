"""Chat through the console: the router's own answer, byte for byte, on the page's own origin. Nothing of it is kept.

Only `/v1/models` and `/v1/chat/completions` are passed on. The answer streams with backpressure, and a reader who
leaves ends the generation.
"""

from collections.abc import AsyncIterator, Callable
from typing import Final

import httpx
import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from glowplug.domain.errors import Contended
from glowplug.runtime.rest import error_body
from glowplug.runtime.web import UnsupportedMediaType
from services.console.login import BY_SESSION
from services.console.upstream import ClientGone, Upstream, read_answer, read_body, unless_gone

CHAT: Final = "/v1/chat/completions"
MODELS_LIMIT_BYTES: Final = 8 << 20
MODELS_SILENCE_S: Final = 10.0
_PASSED: Final = ("authorization", "traceparent", "tracestate", "x-request-id", "content-type", "accept")
_RETURNED: Final = ("content-type", "retry-after", "server-timing", "traceparent", "www-authenticate", "x-request-id")
_OWN_PREFIX: Final = "x-glowplug-"
_NOT_KEPT: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
CLIENT_LEFT: Final = 499


class Passing(StreamingResponse):
    """An answer on its way through. Whatever ends it, the router's connection is given back or closed."""

    def __init__(self, answer: httpx.Response, over: Callable[[], None]) -> None:
        super().__init__(_body(answer), answer.status_code, _returned(answer.headers))
        self._answer, self._over = answer, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()
            await self._answer.aclose()


def routes(
    upstream: Upstream, *, max_body_bytes: int, max_chats: int, silence_s: float, router_key: str = ""
) -> APIRouter:
    """`silence_s`: how long the router may send nothing at all, held streams get comments meanwhile. `router_key` is
    the router's API key where readers log in with that very key: they need not give it again."""
    router = APIRouter(prefix="/playground", tags=["playground"])
    under_way: set[object] = set()

    def chosen(request: Request) -> dict[str, str]:
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        if router_key and BY_SESSION in request.scope:
            headers.setdefault("authorization", f"Bearer {router_key}")
        return headers | {"accept-encoding": "identity"}

    @router.get("/router")
    async def where() -> dict[str, str]:
        """The address of the OpenAI API, for those who want to talk to it themselves; "" when not known."""
        return {"router": upstream.addresses.find("router")}

    @router.get("/v1/models", response_class=Response)
    async def models(request: Request) -> Response:
        """The router's models."""
        headers = chosen(request)
        answer = await upstream.open("router", "GET", "/v1/models", headers=headers, silence_s=MODELS_SILENCE_S)
        body = await read_answer(answer, MODELS_LIMIT_BYTES)
        return Response(body, answer.status_code, _returned(answer.headers))

    @router.post("/v1/chat/completions", response_class=Response)
    async def chat(request: Request) -> Response:
        """One chat completion, whole or as a stream, exactly as the router gives it."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise UnsupportedMediaType("a chat is application/json", param="Content-Type")
        if len(under_way) >= max_chats:
            raise Contended("too many chats through this console at once", retry_after_s=2.0)
        ticket = object()
        under_way.add(ticket)
        try:
            body = await read_body(request, max_body_bytes)
            headers = chosen(request)
            asked = upstream.open("router", "POST", CHAT, headers=headers, content=body, silence_s=silence_s)
            answer = await unless_gone(request, asked)
        except (ClientGone, ClientDisconnect):
            under_way.discard(ticket)
            return Response(status_code=CLIENT_LEFT)
        except BaseException:
            under_way.discard(ticket)
            raise
        return Passing(answer, lambda: under_way.discard(ticket))

    return router


def _returned(headers: httpx.Headers) -> dict[str, str]:
    return _NOT_KEPT | {k: v for k, v in headers.items() if k in _RETURNED or k.startswith(_OWN_PREFIX)}


async def _body(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The bytes as they come. A stream of events whose sender breaks off ends with an error event, not in silence."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    except httpx.HTTPError:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            raise
        error = error_body("the router broke off", "server_error", "upstream_unreachable")
        yield b"\n\ndata: " + msgspec.json.encode(error) + b"\n\n"
