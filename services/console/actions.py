"""Operator actions, passed on unchanged to whoever owns the thing: models to the autoscaler, nodes to the placer.

The console looks at neither the token nor the answer. What the owner says, well or badly, goes back as it is.
"""

from enum import StrEnum
from typing import Annotated, Final
from urllib.parse import quote

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from services.console.upstream import Upstream, read_answer

ANSWER_LIMIT_BYTES: Final = 256 << 10
_PASSED: Final = ("authorization", "traceparent", "tracestate", "x-request-id")
_RETURNED: Final = ("content-type", "retry-after", "www-authenticate", "x-request-id")
Id = Annotated[str, Path(min_length=1, max_length=256)]


class ModelVerb(StrEnum):
    LOAD = "load"
    UNLOAD = "unload"
    DRAIN = "drain"
    PIN = "pin"
    UNPIN = "unpin"


class NodeVerb(StrEnum):
    DRAIN = "drain"
    UNDRAIN = "undrain"


def routes(upstream: Upstream, timeout_s: float) -> APIRouter:
    """`timeout_s` is how long the owner may think about one action."""
    router = APIRouter(prefix="/api/v1", tags=["actions"])
    said: dict[int | str, dict[str, object]] = {
        202: {"description": "taken by the owner"},
        401: {"description": "the admin token is missing or wrong"},
        403: {"description": "asked for by a page of another origin"},
        404: {"description": "no such model or node"},
        502: {"description": "the owner does not answer"},
        503: {"description": "the owner's address is not known, or it is still connecting"},
        504: {"description": "the owner took it and was silent; look before asking again"},
    }

    async def pass_to(request: Request, service: str, path: str) -> Response:
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        answer = await upstream.open(service, "POST", path, headers=headers, silence_s=timeout_s)
        body = await read_answer(answer, ANSWER_LIMIT_BYTES)
        returned = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
        return Response(body, answer.status_code, returned | {"Cache-Control": "no-store"})

    @router.post("/models/{key}/{verb}", response_class=Response, responses=said, status_code=202)
    async def on_model(request: Request, key: Id, verb: ModelVerb) -> Response:
        """load, unload, drain (unload and stay so until load), pin, unpin: asked of the autoscaler."""
        return await pass_to(request, "autoscaler", f"/v1/models/{quote(key, safe='')}/{verb.value}")

    @router.post("/nodes/{node_id}/{verb}", response_class=Response, responses=said, status_code=202)
    async def on_node(request: Request, node_id: Id, verb: NodeVerb) -> Response:
        """drain (place nothing there, drain what runs there) or undrain: asked of the placer."""
        return await pass_to(request, "placer", f"/v1/nodes/{quote(node_id, safe='')}/{verb.value}")

    return router
