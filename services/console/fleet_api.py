"""The fleet as JSON and as a stream of what changes in it; the requests that match a filter, and one model in full."""

from collections.abc import AsyncIterator, Callable

from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse
from starlette.responses import Response

from glowplug.domain.errors import Contended, ModelNotFound
from glowplug.services.console.fleet_view import FleetView
from glowplug.services.console.model_detail import ModelDetail, coming, declared, starts, why_so
from glowplug.services.console.records import json_response, streamed
from glowplug.services.console.request_log import RequestLog
from glowplug.services.console.stream import Client, Hub, TooManyClients

MAX_LINES = 500


def routes(
    view: FleetView,
    hub: Hub,
    requests: RequestLog,
    clock: Callable[[], float],
) -> APIRouter:
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
        return streamed(_until_gone(hub, client))

    @router.get("/requests")
    async def matching(
        model: str = Query("", max_length=256),
        state: str = Query("", max_length=32),
        q: str = Query("", max_length=200),
        limit: int = Query(200, ge=1, le=MAX_LINES),
    ) -> Response:
        """Requests held and under way, oldest first, then those that ended, newest first. `state` is one state, "live"
        or "ended"; every word of `q` must stand in an id, the model key, the error code or the status."""
        return json_response(requests.page(clock(), model=model, state=state, text=q, limit=limit))

    @router.get("/models/{key}")
    async def model(key: str) -> Response:
        """One model: its row, its instances, what its owner declared, its latest starts and the one under way."""
        now_s = clock()
        snapshot = view.snapshot(now_s)
        row = next((row for row in snapshot.models if row.key == key), None)
        if row is None:
            raise ModelNotFound(f"no model {key[:256]!r} is deployed", param="key")
        mine = list(view.fleet.of(key).values())
        detail = ModelDetail(
            now=snapshot.now,
            model=row,
            instances=[line for line in snapshot.instances if line.model_key == key],
            declared=declared(view.models[key]),
            starts=starts(view.decisions.instances_of(key)),
            coming=coming(mine, view.fetches, now_s),
            why=why_so(key, mine, view.decisions),
        )
        return json_response(detail)

    return router


async def _until_gone(hub: Hub, client: Client) -> AsyncIterator[bytes]:
    try:
        async for raw in client.messages():
            yield raw
    finally:
        hub.leave(client)
