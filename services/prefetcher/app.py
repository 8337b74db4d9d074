"""REST of the prefetcher: what lies in this node's host memory and on its disk, what is on its way, bringing and
dropping it."""

import time
from dataclasses import asdict
from typing import Any

from fastapi import Depends, FastAPI

from glowplug.controllers.prefetcher.cache import Cached, HostCache
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.disk import DiskTier
from glowplug.controllers.prefetcher.messages import DropAsked
from glowplug.runtime.control import ControlService
from glowplug.runtime.rest import admin, make_app
from glowplug.services.prefetcher.fetch_rest import fetch_routes
from glowplug.services.prefetcher.metrics import PrefetcherMetrics
from glowplug.services.prefetcher.peer_rest import peer_routes
from glowplug.services.prefetcher.settings import PrefetcherSettings
from glowplug.weights.link import LinkMeter


def make(service: ControlService, settings: PrefetcherSettings, link: LinkMeter, metrics: PrefetcherMetrics) -> FastAPI:
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
            "data": [{**_cached_row(c), "held": controller.held(c.digest, now_s)} for c in rows],
        }

    @app.get("/v1/tiers", tags=["cache"])
    async def tiers() -> dict[str, Any]:
        """Where the weights of each model lie on this node, the fastest tier first: `memory`, `disk`, or `remote` alone
        where the node has none of it. `expected_s` is what a start would wait for them from each slower tier, `moves`
        what the last moves between tiers took. `reason` of the disk says why nothing is written to it at present."""
        controller = service.controller(PrefetcherController)
        memory, disk = controller.cache, controller.disk
        return {
            "object": "list",
            "node_id": settings.node_id,
            "tiers": [
                {"tier": "memory", **_sizes(memory), "directory": str(settings.shm_dir)},
                {
                    "tier": "disk",
                    **_sizes(disk),
                    "directory": str(settings.disk_dir) if settings.disk_cache_bytes else "",
                    "reason": disk.trouble,
                },
            ],
            "data": [{**asdict(one), "tier": one.tiers[0].value} for one in controller.placed()],
        }

    @app.post(
        "/v1/cache/{digest}/drop",
        tags=["cache"],
        dependencies=[Depends(admin(settings.admin_token))],
        responses={404: {"description": "not here"}, 409: {"description": "in use"}},
    )
    async def drop(digest: str) -> dict[str, Any]:
        """Remove weights from host memory and disk, or cancel their fetch."""
        await service.ask(DropAsked(digest, "asked for over REST"))
        return {"digest": digest, "dropped": True}

    app.include_router(fetch_routes(service, settings))
    app.include_router(peer_routes(settings, link, metrics))
    return app


def _sizes(tier: HostCache | DiskTier) -> dict[str, int]:
    return {"capacity_bytes": tier.capacity_bytes, "used_bytes": tier.used_bytes}


def _cached_row(entry: Cached) -> dict[str, Any]:
    return {
        "digest": entry.digest,
        "num_bytes": entry.num_bytes,
        "complete": entry.complete,
        "last_used_at": entry.last_used_at,
        "model_keys": sorted(entry.model_keys),
    }
