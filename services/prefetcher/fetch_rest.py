"""Fetches over REST: those that are under way, how far one is or how it ended, and the beginning of one."""

import asyncio
import re
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from glowplug.controllers.prefetcher.controller import FetchJob, PrefetcherController
from glowplug.controllers.prefetcher.messages import FetchAsked
from glowplug.domain.errors import BadRequest, NotFound, WeightsUnavailable
from glowplug.domain.model import MAX_BYTES, WeightsRef, model_key
from glowplug.runtime.control import ControlService
from glowplug.runtime.rest import admin
from glowplug.services.prefetcher.settings import PrefetcherSettings
from glowplug.weights.region import Region, RegionStatus, region_digest
from glowplug.weights.source import check_reference, file_uri, hub_address, local_path, scheme_of

DIGEST = re.compile(r"[0-9a-f]{64}")
UNNAMED = "weights"  # the name of weights whose address has no letter or digit in its last part


class WantedWeights(BaseModel):
    """Weights by address, as a model file has them; a path is one of this node."""

    model_config = ConfigDict(extra="forbid")

    uri: str = Field(min_length=1, max_length=4096)
    sha256: str = Field("", pattern=r"^([0-9a-fA-F]{64})?$")
    num_bytes: int = Field(0, ge=0, le=MAX_BYTES)

    def to_ref(self) -> WeightsRef:
        """Raises BadRequest for an address that no source reads."""
        try:
            check_reference(self.uri)
        except WeightsUnavailable as error:
            raise BadRequest(error.message, param="weights.uri") from error
        path = local_path(self.uri)
        if path is not None and not path.is_absolute():
            raise BadRequest(f"{self.uri[:200]}: a path of the node begins with a slash", param="weights.uri")
        uri = file_uri(path) if path else hub_address(self.uri).uri if scheme_of(self.uri) == "hf" else self.uri
        return WeightsRef(uri=uri, num_bytes=self.num_bytes, sha256=self.sha256.lower())


class FetchBody(BaseModel):
    """`model_key` is the key of the deployed model that the weights are of; "" makes one of their address."""

    model_config = ConfigDict(extra="forbid")

    weights: WantedWeights
    model_key: str = Field("", pattern=r"^[a-z0-9-]*$", max_length=200)


def key_of(uri: str) -> str:
    """A model key for weights that no model names: of the repository, or of the last part of the address."""
    parts = urlsplit(uri)
    name = hub_address(uri).repo if scheme_of(uri) == "hf" else PurePosixPath(unquote(parts.path)).stem
    try:
        return model_key(name)
    except ValueError:
        return UNNAMED


def job_row(job: FetchJob) -> dict[str, Any]:
    """One fetch that is queued or runs."""
    return {
        "digest": job.digest,
        "stage": job.stage.value,
        "model_keys": sorted({want.model_key for want in job.wants}),
        "instance_ids": list(job.instance_ids),
        "num_bytes": job.num_bytes,
        "num_bytes_done": job.num_bytes_done,
        "first_byte": job.first_byte,
        "last_byte": job.last_byte,
        "pipeline_stage": job.pipeline_stage,
        "num_stages": job.num_stages,
        "urgency": job.urgency,
        "started_at": job.started_at,
        "from_disk": job.from_disk,
    }


def end_row(digest: str, status: RegionStatus) -> dict[str, Any]:
    """Weights that no fetch brings now: `stage` is complete, failed (with `code` and `message`), fetching for bytes
    that an earlier fetch left, or absent."""
    row: dict[str, Any] = {"digest": digest, "stage": status.state.value, "num_bytes_done": status.num_bytes_done}
    if status.info is not None:
        row |= {"num_bytes": status.info.num_bytes, "source": status.info.source, "seconds": status.info.seconds}
    if status.failure is not None:
        row |= {"code": status.failure.code, "message": status.failure.message}
    return {"num_bytes": 0, "code": "", "message": ""} | row


def fetch_routes(service: ControlService, settings: PrefetcherSettings) -> APIRouter:
    """The routes below /v1/fetches."""
    router = APIRouter(tags=["fetches"])

    @router.get("/v1/fetches")
    async def fetches() -> dict[str, Any]:
        """Fetches queued and running, the most urgent first."""
        jobs = sorted(service.controller(PrefetcherController).jobs.values(), key=lambda j: (-j.urgency, j.order))
        return {
            "object": "list",
            "node_id": settings.node_id,
            "data": [job_row(j) for j in jobs],
        }

    @router.get("/v1/fetches/{digest}", responses={404: {"description": "no digest"}})
    async def fetch(digest: str) -> dict[str, Any]:
        """One fetch that is queued or runs; else what there is of the weights: complete, failed and why, or absent."""
        job = service.controller(PrefetcherController).jobs.get(digest)
        if job is not None:
            return job_row(job)
        if not DIGEST.fullmatch(digest):
            raise NotFound(f"{digest[:80]!r} is no digest of weights")
        region = Region.at(settings.shm_dir, settings.node_id, digest)
        return end_row(digest, await asyncio.to_thread(region.read_state))

    @router.post(
        "/v1/fetches",
        status_code=202,
        dependencies=[Depends(admin(settings.admin_token))],
        responses={400: {"description": "an address that no source reads"}},
    )
    async def bring(body: FetchBody) -> dict[str, Any]:
        """Bring weights into host memory, as for a model that will be started; GET .../{digest} says how far it is."""
        ref = body.weights.to_ref()
        await service.ask(FetchAsked(ref, body.model_key or key_of(ref.uri)))
        return await fetch(region_digest(ref))

    return router
