"""REST API of the router: its queues, its live requests and the last finished ones."""

import time
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Query

from glowplug.domain.access import ApiKey, Role, find_key
from glowplug.runtime.rest import admin, make_app
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.reports import Reports
from glowplug.services.router.request_table import RequestTable
from glowplug.services.router.settings import RouterSettings


def make(settings: RouterSettings, table: RequestTable[Exchange], reports: Reports) -> FastAPI:
    app = make_app(
        "router",
        settings.service_id,
        ready=table.not_ready,
        policies=lambda: {"routing": settings.policy_routing, "fairness": settings.policy_fairness},
        description="The queue and the requests of one router. The OpenAI API is on the data port.",
    )

    async def find(presented: str) -> ApiKey | None:
        return find_key(table.keys.rows, presented, time.time())

    viewers = Depends(admin(settings.admin_token, least=Role.VIEWER, find=find))
    routes = APIRouter(prefix="/v1", tags=["requests"], dependencies=[viewers])

    @routes.get("/queue")
    async def queue() -> dict[str, Any]:
        """Depth of each model's queue, with when its next request should go on."""
        return {"object": "list", "data": [_queue_row(table, key) for key in sorted(table.controller.fleet.models)]}

    @routes.get("/requests")
    async def requests(limit: int = Query(200, ge=1, le=10_000)) -> dict[str, Any]:
        """Live requests, oldest first, then those that finished or were refused, newest first. No prompts."""
        return {"object": "list", "data": reports.rows(limit)}

    app.include_router(routes)
    return app


def _queue_row(table: RequestTable[Exchange], key: str) -> dict[str, Any]:
    controller = table.controller
    model, load = controller.fleet.models[key], controller.load(key)
    queue = controller.queues.get(key)
    oldest = queue.oldest() if queue else None
    return {
        "model": model.name,
        "model_key": key,
        "state": controller.fleet.temperature(key).value,
        "num_waiting": load.num_waiting,
        "num_in_flight": load.num_in_flight,
        "max_queue": model.max_queue,
        "max_wait_s": model.max_wait_s,
        "oldest_waiting_s": table.clock() - oldest.arrived_at if oldest else 0.0,
        "eta_s": table.eta_s(key),
        "in_flight_by_instance": load.in_flight_by_instance,
    }
