"""REST of the prefetcher: what is in this node's host memory, what is on its way, bringing and dropping it."""

import time
from typing import Any

from fastapi import Depends, FastAPI

from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.messages import DropAsked
from glowplug.runtime.control import ControlService
from glowplug.runtime.rest import admin, make_app
from services.prefetcher.fetch_rest import fetch_routes
from services.prefetcher.settings import PrefetcherSettings


def make(service: ControlService, settings: PrefetcherSettings) -> FastAPI:
    app = make_app(
        "prefetcher",
        settings.service_id,
        ready=service.not_ready,
        policies=lambda: {"caching": settings.policy_caching},
        description=f"Weights in the host memory of {settings.node_id}.",
    )

    @app.get("/v1/cache", tags=["cache"])
    async def cache() -> dict[str, Any]:
        """Weights in host memory, most recently used first. `held` says why one may not leave."""
        controller, now_s = service.controller(PrefetcherController), time.time()
        rows = sorted(controller.cache.entries.values(), key=lambda c: (-c.last_used_at, c.digest))
        return {
            "object": "list",
            "node_id": settings.node_id,
            "capacity_bytes": controller.cache.capacity_bytes,
            "used_bytes": controller.cache.used_bytes,
            "data": [
                {
                    "digest": c.digest,
                    "num_bytes": c.num_bytes,
                    "complete": c.complete,
                    "last_used_at": c.last_used_at,
                    "model_keys": sorted(c.model_keys),
                    "held": controller.held(c.digest, now_s),
                }
                for c in rows
            ],
        }

    @app.post(
        "/v1/cache/{digest}/drop",
        tags=["cache"],
        dependencies=[Depends(admin(settings.admin_token))],
        responses={404: {"description": "not here"}, 409: {"description": "in use"}},
    )
    async def drop(digest: str) -> dict[str, Any]:
        """Remove weights from host memory, or cancel their fetch."""
        service.controller(PrefetcherController)
        assert service.shell is not None
        await service.shell.ask(DropAsked(digest, "asked for over REST"))
        return {"digest": digest, "dropped": True}

    app.include_router(fetch_routes(service, settings))
    return app
