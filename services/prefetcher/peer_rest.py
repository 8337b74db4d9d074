"""What other nodes' prefetchers read here: which pieces of weights have landed, and their bytes."""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import StreamingResponse

from glowplug.domain.errors import BadRequest, Conflict, NoCapacity, NotFound
from glowplug.runtime.rest import admin
from glowplug.services.prefetcher.fetch_rest import DIGEST
from glowplug.services.prefetcher.metrics import PrefetcherMetrics
from glowplug.services.prefetcher.settings import PrefetcherSettings
from glowplug.weights.inventory import is_whole
from glowplug.weights.link import SERVING, LinkMeter
from glowplug.weights.pieces import Layout, read_landed, read_layout, read_piece_digests
from glowplug.weights.region import Region
from glowplug.weights.source import SourceFile, checked_relative
from glowplug.weights.sources.peer import holding_json, peer_token
from glowplug.weights.transfer import Holding

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


def holding(region: Region, layout: Layout, *, with_digests: bool = True) -> Holding:
    """What lies in a region. Raises NotFound for one that says too little of itself."""
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
        return Holding(files=files, landed=b"\1" * layout.num_pieces, sha256=sha256, digests=digests)
    return Holding(files=files, landed=read_landed(region.directory, layout))


def peer_routes(settings: PrefetcherSettings, link: LinkMeter, metrics: PrefetcherMetrics) -> APIRouter:
    """The routes below /v1/regions."""
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
        """What of these weights other nodes can read here: `files` with the validators of their source, `landed` one
        mark per piece, and `pieces`, a checksum of each, where they are complete (`sha256`)."""

        def look() -> dict[str, Any]:
            there, layout = found(digest)
            return holding_json(holding(there, layout, with_digests=digests), layout)

        return await asyncio.to_thread(look)

    @router.get(
        "/v1/regions/{digest}/bytes",
        status_code=206,
        response_class=StreamingResponse,
        responses={409: {"description": "not all of it has landed"}, 503: {"description": "too many read already"}},
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
        chunks = _read(there, layout, first, last, settings.fetch_chunk_bytes)
        body = serving.passed(chunks, link, metrics)
        headers = {
            "Content-Range": f"bytes {first}-{last - 1}/{layout.num_bytes}",
            "Content-Length": str(last - first),
        }
        return StreamingResponse(body, 206, headers, media_type="application/octet-stream")

    return router


class _Serving:
    """How many nodes read at once."""

    def __init__(self, max_reads: int) -> None:
        self._max_reads, self._num_reads = max_reads, 0

    def check(self) -> None:
        """Raises NoCapacity."""
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
    """Ends early where a file has gone: the reader counts."""
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
            return  # begun anew since: these may be files whose bytes have not landed
        for fd, start, end in opened:
            while start < end:
                chunk = await asyncio.to_thread(os.pread, fd, min(chunk_bytes, end - start), start)
                if not chunk:
                    return
                yield chunk
                start += len(chunk)
