"""REST of the prefetcher: weights in host memory and on disk, and their fetches."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from glowplug.controllers.prefetcher.cache import Cached, HostCache
from glowplug.controllers.prefetcher.controller import FetchJob, PrefetcherController
from glowplug.controllers.prefetcher.disk import DiskTier
from glowplug.controllers.prefetcher.messages import DropAsked, FetchAsked
from glowplug.domain.errors import BadRequest, Conflict, NoCapacity, NotFound, WeightsUnavailable
from glowplug.domain.model import MAX_BYTES, WeightsRef, model_key
from glowplug.runtime.clock import CLOCK
from glowplug.runtime.control import ControlService
from glowplug.runtime.rest import admin, make_app
from glowplug.services.prefetcher.metrics import PrefetcherMetrics
from glowplug.services.prefetcher.settings import PrefetcherSettings
from glowplug.weights.inventory import is_whole
from glowplug.weights.link import SERVING, LinkMeter
from glowplug.weights.pieces import Layout, read_landed, read_layout, read_piece_digests
from glowplug.weights.region import Region, RegionStatus, region_digest
from glowplug.weights.source import (
    SourceFile,
    check_reference,
    checked_relative,
    file_uri,
    hub_address,
    local_path,
    scheme_of,
)
from glowplug.weights.sources.peer import holding_json, peer_token
from glowplug.weights.transfer import PeerFiles

DIGEST = re.compile(r"[0-9a-f]{64}")
UNNAMED = "weights"  # for addresses whose last part has no letter or digit


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
    parts = urlsplit(uri)
    name = hub_address(uri).repo if scheme_of(uri) == "hf" else PurePosixPath(unquote(parts.path)).stem
    try:
        return model_key(name)
    except ValueError:
        return UNNAMED


def job_row(job: FetchJob) -> dict[str, Any]:
    return {
        "digest": job.digest,
        "stage": job.stage.value,
        "model_keys": sorted({want.command.model_key for want in job.wants}),
        "instance_ids": list(job.instance_ids),
        "num_bytes": job.num_bytes,
        "num_bytes_done": job.num_bytes_done,
        "first_byte": job.part.first_byte,
        "last_byte": job.part.last_byte,
        "pipeline_stage": job.part.stage,
        "num_stages": job.part.num_stages,
        "urgency": job.urgency,
        "started_at": job.started_at,
        "from_disk": job.from_disk,
    }


def end_row(digest: str, status: RegionStatus) -> dict[str, Any]:
    """Describe weights without a running fetch. `stage`: complete, failed (with `code` and `message`), fetching (left
    by an earlier fetch), or absent."""
    row: dict[str, Any] = {"digest": digest, "stage": status.state.value, "num_bytes_done": status.num_bytes_done}
    if status.info is not None:
        row |= {"num_bytes": status.info.num_bytes, "source": status.info.source, "seconds": status.info.seconds}
    if status.failure is not None:
        row |= {"code": status.failure.code, "message": status.failure.message}
    return {"num_bytes": 0, "code": "", "message": ""} | row


def fetch_routes(service: ControlService, settings: PrefetcherSettings) -> APIRouter:
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
        """One fetch that is queued or runs; else the state of the weights: complete, failed and why, or absent."""
        job = service.controller(PrefetcherController).jobs.get(digest)
        if job is not None:
            return job_row(job)
        if not DIGEST.fullmatch(digest):
            raise NotFound(f"{digest[:80]!r} is not a digest of weights")
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


# Reads by other nodes' prefetchers: landed pieces and their bytes.

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


def holding(region: Region, layout: Layout, *, with_digests: bool = True) -> PeerFiles:
    """Raises NotFound if the region's files are not known."""
    entries = region.read_meta().get("files")
    try:
        files = tuple(SourceFile(path=str(p), num_bytes=int(n), validator=str(v)) for p, n, v in entries or ())
    except (TypeError, ValueError):
        files = ()
    if [(f.path, f.num_bytes) for f in files] != [(f.path, f.num_bytes) for f in layout.files]:
        raise NotFound(f"this node does not know which files {region.digest[:12]} has")
    if is_whole(region):
        info = region.read_state().info
        digests = read_piece_digests(region.directory, layout) if with_digests else ()
        sha256 = info.sha256 if info else ""
        return PeerFiles(files=files, landed=b"\1" * layout.num_pieces, sha256=sha256, digests=digests)
    return PeerFiles(files=files, landed=read_landed(region.directory, layout))


def peer_routes(settings: PrefetcherSettings, link: LinkMeter, metrics: PrefetcherMetrics) -> APIRouter:
    only_nodes = admin(peer_token(settings.admin_token), "the token of the fleet's nodes is missing or wrong")
    router = APIRouter(tags=["peers"], dependencies=[Depends(only_nodes)])
    serving = _Serving(settings.max_peer_reads)

    def found(digest: str) -> tuple[Region, Layout]:
        region = Region.at(settings.shm_dir, settings.node_id, digest)
        layout = read_layout(region.directory) if DIGEST.fullmatch(digest) else None
        if layout is None:
            raise NotFound(f"no weights {digest[:80]} on {settings.node_id}")
        return region, layout

    @router.get("/v1/regions/{digest}", responses={404: {"description": "not here"}})
    async def region(digest: str, digests: bool = True) -> dict[str, Any]:
        """The part of these weights that other nodes can read here: `files` with the validators of their source,
        `landed`, one mark per piece, and `pieces`, a checksum of each, where they are complete (`sha256`)."""

        def look() -> dict[str, Any]:
            there, layout = found(digest)
            return holding_json(holding(there, layout, with_digests=digests), layout)

        return await asyncio.to_thread(look)

    @router.get(
        "/v1/regions/{digest}/bytes",
        status_code=206,
        response_class=StreamingResponse,
        responses={409: {"description": "not all of it has arrived"}, 503: {"description": "too many others read it"}},
    )
    async def content(digest: str, request: Request) -> StreamingResponse:
        """Bytes of the weights by a Range header, `bytes=first-last`: offsets over all files, end to end. Starts of
        this node's own go before it."""
        there, layout = await asyncio.to_thread(found, digest)
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        first, last = (int(asked[1]), int(asked[2]) + 1) if asked else (0, 0)
        if not first < last <= layout.num_bytes:
            raise BadRequest(f"the Range header names no bytes of these {layout.num_bytes}", param="range")
        if not is_whole(there):
            landed, pieces = read_landed(there.directory, layout), layout.touched(first, last)
            if landed.find(b"\0", pieces.start, pieces.stop) >= 0:
                raise Conflict(f"bytes {first} to {last} of {digest[:12]} have not all landed here")
        serving.check()
        chunks = _read(there, layout, first, last, settings.sources.chunk_bytes)
        body = serving.passed(chunks, link, metrics)
        headers = {
            "Content-Range": f"bytes {first}-{last - 1}/{layout.num_bytes}",
            "Content-Length": str(last - first),
        }
        return StreamingResponse(body, 206, headers, media_type="application/octet-stream")

    return router


class _Serving:
    def __init__(self, max_reads: int) -> None:
        self._max_reads, self._num_reads = max_reads, 0

    def check(self) -> None:
        if self._num_reads >= self._max_reads:
            raise NoCapacity(f"{self._num_reads} other nodes already read from this one", retry_after_s=1)

    async def passed(
        self, chunks: AsyncIterator[bytes], link: LinkMeter, metrics: PrefetcherMetrics
    ) -> AsyncIterator[bytes]:
        self._num_reads += 1
        try:
            async for chunk in chunks:
                await link.wait(len(chunk), SERVING)
                metrics.peer_served_bytes.inc(len(chunk))
                yield chunk
        finally:
            self._num_reads -= 1


async def _read(region: Region, layout: Layout, first: int, last: int, chunk_bytes: int) -> AsyncIterator[bytes]:
    """Ends early if a file is gone: the reader counts."""
    spans = [(file, max(first, file.start), min(last, file.start + file.num_bytes)) for file in layout.files]
    with ExitStack() as files:
        opened = []
        for file, start, end in spans:
            if start < end:
                path = region.files / checked_relative(file.path) if file.path else region.blob
                try:
                    fd = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    return
                files.callback(os.close, fd)
                opened.append((fd, start - file.start, end - file.start))
        if await asyncio.to_thread(read_layout, region.directory) != layout:
            return  # begun anew: bytes of these files may not have landed
        for fd, start, end in opened:
            while start < end:
                chunk = await asyncio.to_thread(os.pread, fd, min(chunk_bytes, end - start), start)
                if not chunk:
                    return
                yield chunk
                start += len(chunk)


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
        controller, now_s = service.controller(PrefetcherController), CLOCK.now_s()
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
        """The tiers of this node that have each model's weights, the fastest first: `memory`, `disk`, or `remote` alone
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
