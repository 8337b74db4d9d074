"""Pass operator actions to their owners, chats to the router.

Actions on models, tenants and keys go to the autoscaler, on nodes to the placer; answers, which may hold a new key,
are not inspected. login.py chooses the token. Of the router only `/v1/models` and `/v1/chat/completions` are open; a
departing reader ends the generation."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Final, Literal
from urllib.parse import quote

import httpx
import msgspec
from fastapi import APIRouter, Path, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from glowplug.domain.access import Role
from glowplug.domain.errors import Contended
from glowplug.runtime.rest import ACTOR_HEADER, error_body
from glowplug.runtime.web import UnsupportedMediaType
from glowplug.services.console.roles import who_of
from glowplug.services.console.upstream import ClientGone, Upstream, read_answer, read_body, unless_gone

ANSWER_LIMIT_BYTES: Final = 256 << 10
ROWS_LIMIT_BYTES: Final = 16 << 20  # 10,000 keys
MAX_ACTION_BYTES: Final = 256 << 10
_ACTION_PASSED: Final = ("authorization", ACTOR_HEADER, "traceparent", "tracestate", "x-request-id")
_ACTION_RETURNED: Final = ("content-type", "retry-after", "www-authenticate", "x-request-id")
Id = Annotated[str, Path(min_length=1, max_length=256)]
ModelVerb = Literal["load", "unload", "wake", "sleep", "drain", "pin", "unpin"]
NodeVerb = Literal["drain", "undrain"]
CHAT: Final = "/v1/chat/completions"
MODELS_LIMIT_BYTES: Final = 8 << 20
MODELS_SILENCE_S: Final = 10.0
_PASSED: Final = ("authorization", "traceparent", "tracestate", "x-request-id", "content-type", "accept")
_RETURNED: Final = ("content-type", "retry-after", "server-timing", "traceparent", "www-authenticate", "x-request-id")
_OWN_PREFIX: Final = "x-glowplug-"
_NOT_KEPT: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
CLIENT_LEFT: Final = 499


_SAID: Final[dict[int | str, dict[str, object]]] = {
    202: {"description": "accepted by the owner"},
    401: {"description": "the admin token is missing or wrong"},
    403: {"description": "asked for by a page of another origin"},
    404: {"description": "no such model or node"},
    502: {"description": "the owner does not answer"},
    503: {"description": "the owner's address is not known, or it is still connecting"},
    504: {"description": "the owner accepted it and did not answer in time; check before asking again"},
}


def action_routes(upstream: Upstream, timeout_s: float) -> APIRouter:
    """`timeout_s`: for the owner's answer."""
    router = APIRouter(prefix="/api/v1", tags=["actions"])

    async def pass_to(
        request: Request, service: str, path: str, limit: int = ANSWER_LIMIT_BYTES, *, with_body: bool = False
    ) -> Response:
        headers = {name: request.headers[name] for name in _ACTION_PASSED if name in request.headers}
        content = b""
        if with_body:
            content = await read_body(request, MAX_ACTION_BYTES)
            headers["content-type"] = request.headers.get("content-type", "application/json")
        answer = await upstream.open(
            service, request.method, path, headers=headers, silence_s=timeout_s, content=content
        )
        body = await read_answer(answer, limit)
        returned = {name: answer.headers[name] for name in _ACTION_RETURNED if name in answer.headers}
        return Response(body, answer.status_code, returned | {"Cache-Control": "no-store"})

    @router.post("/models/{key}/{verb}", response_class=Response, responses=_SAID, status_code=202)
    async def on_model(request: Request, key: Id, verb: ModelVerb) -> Response:
        """load or wake, unload, sleep, drain (unload and stay so until load), pin, unpin: asked of the autoscaler."""
        return await pass_to(request, "autoscaler", f"/v1/models/{quote(key, safe='')}/{verb}")

    @router.post("/nodes/{node_id}/{verb}", response_class=Response, responses=_SAID, status_code=202)
    async def on_node(request: Request, node_id: Id, verb: NodeVerb) -> Response:
        """Ask the placer to drain a node (place nothing there, drain its instances) or to undrain it."""
        return await pass_to(request, "placer", f"/v1/nodes/{quote(node_id, safe='')}/{verb}")

    _model_files(router, pass_to)

    @router.get("/tenants", response_class=Response, responses=_SAID)
    @router.get("/keys", response_class=Response, responses=_SAID)
    async def rows(request: Request) -> Response:
        """All tenants, or all keys without their secrets: asked of the autoscaler, with its admin token."""
        return await pass_to(request, "autoscaler", f"/v1/{request.url.path.rpartition('/')[2]}", ROWS_LIMIT_BYTES)

    @router.put("/tenants/{name}", response_class=Response, responses=_SAID)
    async def put_tenant(request: Request, name: Id) -> Response:
        """Create or change a tenant."""
        return await pass_to(request, "autoscaler", f"/v1/tenants/{quote(name, safe='')}", with_body=True)

    @router.delete("/tenants/{name}", response_class=Response, responses=_SAID)
    async def remove_tenant(request: Request, name: Id, with_keys: bool = False) -> Response:
        """Remove a tenant, and revoke its keys where that is asked."""
        query = "?with_keys=true" if with_keys else ""
        return await pass_to(request, "autoscaler", f"/v1/tenants/{quote(name, safe='')}{query}")

    @router.post("/keys", response_class=Response, responses=_SAID)
    async def create_key(request: Request) -> Response:
        """Create a key; the answer alone holds its secret."""
        return await pass_to(request, "autoscaler", "/v1/keys", with_body=True)

    @router.patch("/keys/{key_id}", response_class=Response, responses=_SAID)
    async def change_key(request: Request, key_id: Id) -> Response:
        """Change the rights or the end of a key."""
        return await pass_to(request, "autoscaler", f"/v1/keys/{quote(key_id, safe='')}", with_body=True)

    @router.delete("/keys/{key_id}", response_class=Response, responses=_SAID)
    async def revoke_key(request: Request, key_id: Id) -> Response:
        """Revoke a key."""
        return await pass_to(request, "autoscaler", f"/v1/keys/{quote(key_id, safe='')}")

    @router.post("/keys/{key_id}/rotate", response_class=Response, responses=_SAID)
    async def rotate_key(request: Request, key_id: Id) -> Response:
        """Make a second key with the same rights; the first one ends after an overlap."""
        return await pass_to(request, "autoscaler", f"/v1/keys/{quote(key_id, safe='')}/rotate", with_body=True)

    return router


def _model_files(router: APIRouter, pass_to: Callable[..., Awaitable[Response]]) -> None:
    @router.get("/model_files", response_class=Response, responses=_SAID)
    async def model_form(request: Request) -> Response:
        """The fields of a form for model files: asked of the autoscaler."""
        return await pass_to(request, "autoscaler", "/v1/model_files")

    @router.post("/model_files", response_class=Response, responses=_SAID)
    async def check_model_file(request: Request) -> Response:
        """Check a model file; nothing is deployed."""
        return await pass_to(request, "autoscaler", "/v1/model_files", with_body=True)

    @router.get("/model_files/{key}", response_class=Response, responses=_SAID)
    async def model_file(request: Request, key: Id) -> Response:
        """The model file that declares a deployed model."""
        return await pass_to(request, "autoscaler", f"/v1/model_files/{quote(key, safe='')}")

    @router.post("/models", response_class=Response, responses=_SAID, status_code=201)
    async def deploy(request: Request) -> Response:
        """Deploy a new model: asked of the autoscaler."""
        return await pass_to(request, "autoscaler", "/v1/models", with_body=True)

    @router.put("/models/{key}", response_class=Response, responses=_SAID)
    async def change_model(request: Request, key: Id) -> Response:
        """Change a model: asked of the autoscaler."""
        return await pass_to(request, "autoscaler", f"/v1/models/{quote(key, safe='')}", with_body=True)

    @router.delete("/models/{key}", response_class=Response, responses=_SAID)
    async def undeploy(request: Request, key: Id) -> Response:
        """Undeploy a model and drain its instances: asked of the autoscaler."""
        return await pass_to(request, "autoscaler", f"/v1/models/{quote(key, safe='')}")


class Passing(StreamingResponse):
    """A streamed answer; the router's connection is released however it ends."""

    def __init__(self, answer: httpx.Response, over: Callable[[], None]) -> None:
        super().__init__(_body(answer), answer.status_code, _returned(answer.headers))
        self._answer, self._over = answer, over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()
            await self._answer.aclose()


def chat_routes(
    upstream: Upstream, *, max_body_bytes: int, max_chats: int, silence_s: float, router_key: str = ""
) -> APIRouter:
    """`silence_s`: for the router, which sends comments on held streams. `router_key`: the router's API key if the
    console has no own key; not asked of operators and of those who logged in with it."""
    router = APIRouter(prefix="/playground", tags=["playground"])
    under_way: set[object] = set()

    def chosen(request: Request) -> dict[str, str]:
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        who = who_of(request)
        if router_key and (who.has_api_key or who.role.includes(Role.OPERATOR)):
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
    """Stream the bytes. An event stream that breaks off ends with an error event."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    except httpx.HTTPError:
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            raise
        error = error_body("the router closed the connection early", "server_error", "upstream_unreachable")
        yield b"\n\ndata: " + msgspec.json.encode(error) + b"\n\n"
