"""The fleet as JSON and as a stream of what changes in it."""

from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from glowplug.domain.errors import Contended
from services.console.fleet_view import FleetView
from services.console.stream import Client, Hub, TooManyClients
from services.console.trace_api import json_response


def routes(view: FleetView, hub: Hub, clock: Callable[[], float]) -> APIRouter:
    """`clock` gives epoch seconds."""
    router = APIRouter(prefix="/api/v1", tags=["fleet"])

    @router.get("/fleet")
    async def fleet() -> Response:
        """Models, instances, nodes, latest decisions and requests, and whether bus and store answer."""
        return json_response(view.snapshot(clock()))

    @router.get("/stream", response_class=StreamingResponse)
    async def stream() -> Response:
        """Server-sent events: `fleet` first, then `patch` and `traces`; `dropped` when this reader was too slow."""
        try:
            client = hub.join(view, clock())
        except TooManyClients as error:
            raise Contended("too many open pages", retry_after_s=5.0) from error
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_until_gone(hub, client), media_type="text/event-stream", headers=headers)

    return router


async def _until_gone(hub: Hub, client: Client) -> AsyncIterator[bytes]:
    try:
        async for raw in client.messages():
            yield raw
    finally:
        hub.leave(client)
