"""REST of the prefetcher: what is in this node's host memory, what is on its way, bringing and dropping it."""

import asyncio
import re
import time
from typing import Any

from fastapi import Depends, FastAPI

from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.messages import DropAsked, FetchAsked
from glowplug.domain.errors import NotFound
from glowplug.runtime.control import ControlService
from glowplug.runtime.rest import admin, make_app
from glowplug.weights.region import Region, region_digest
from services.prefetcher.fetch_rest import FetchBody, end_row, job_row, key_of
from services.prefetcher.settings import PrefetcherSettings

DIGEST = re.compile(r"[0-9a-f]{64}")


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

    @app.get("/v1/fetches", tags=["fetches"])
    async def fetches() -> dict[str, Any]:
        """Fetches queued and running, the most urgent first."""
        jobs = sorted(service.controller(PrefetcherController).jobs.values(), key=lambda j: (-j.urgency, j.order))
        return {
            "object": "list",
            "node_id": settings.node_id,
            "data": [job_row(j) for j in jobs],
        }

    @app.get("/v1/fetches/{digest}", tags=["fetches"], responses={404: {"description": "no digest"}})
    async def fetch(digest: str) -> dict[str, Any]:
        """One fetch that is queued or runs; else what there is of the weights: complete, failed and why, or absent."""
        job = service.controller(PrefetcherController).jobs.get(digest)
        if job is not None:
            return job_row(job)
        if not DIGEST.fullmatch(digest):
            raise NotFound(f"{digest[:80]!r} is no digest of weights")
        region = Region.at(settings.shm_dir, settings.node_id, digest)
        return end_row(digest, await asyncio.to_thread(region.read_state))

    @app.post(
        "/v1/fetches",
        tags=["fetches"],
        status_code=202,
        dependencies=[Depends(admin(settings.admin_token))],
        responses={400: {"description": "an address that no source reads"}},
    )
    async def bring(body: FetchBody) -> dict[str, Any]:
        """Bring weights into host memory, as for a model that will be started; GET .../{digest} says how far it is."""
        service.controller(PrefetcherController)
        assert service.shell is not None
        ref = body.weights.to_ref()
        await service.shell.ask(FetchAsked(ref, body.model_key or key_of(ref.uri)))
        return await fetch(region_digest(ref))

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

    return app
