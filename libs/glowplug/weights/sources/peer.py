"""Weights held by another node's prefetcher, whole or in part, over its REST port.

    GET /v1/regions/{digest}         its holding: files with validators, landed pieces, checksums
    GET /v1/regions/{digest}/bytes   bytes [first, last) of the region, by a Range header

Both require a token derived from the fleet's admin token, so that the admin token itself is never sent; without an
admin token they are open, as the loopback is (ADR 7).
"""

import hashlib
import hmac
import http.client
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import msgspec

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.pieces import Layout, piece_digests_json, piece_digests_of
from glowplug.weights.source import Chunk, SourceFile, SourceInterrupted, checked_relative
from glowplug.weights.sources.connection import (
    ConnectionLimits,
    Connections,
    HttpAnswer,
    RequestImpossible,
    problem_of,
)
from glowplug.weights.transfer import PeerBusy, PeerFiles
from glowplug.weights.window import WindowOf

MAX_ANSWER_BYTES = 64 << 20
STALL_S = 3.0  # another holder is asked
CONNECT_S = 1.0


def peer_token(admin_token: str) -> str:
    """Return the token for other nodes' weights, "" without an admin token."""
    return (
        hmac.new(admin_token.encode(), b"glowplug: weights of peers", hashlib.sha256).hexdigest() if admin_token else ""
    )


def holding_json(holding: PeerFiles, layout: Layout) -> dict[str, Any]:
    return {
        "files": [[file.path, file.num_bytes, file.validator] for file in holding.files],
        "sha256": holding.sha256,
        "landed": "".join("1" if mark else "0" for mark in holding.landed),
        "pieces": piece_digests_json(layout, holding.digests),
    }


def holding_of(answer: Any) -> PeerFiles | None:
    """Return None for a malformed answer, files outside of the region, or duplicate names."""
    try:
        files = tuple(SourceFile(path=str(p), num_bytes=int(n), validator=str(v)) for p, n, v in answer["files"])
        marks, sha256, pieces = str(answer["landed"]), str(answer["sha256"]), answer["pieces"]
        names = {checked_relative(file.path) if len(files) > 1 or file.path else "" for file in files}
    except (KeyError, TypeError, ValueError, OverflowError, WeightsUnavailable):
        return None
    if len(names) != len(files):
        return None
    layout = Layout.of([(file.path, file.num_bytes) for file in files])
    if len(marks) != layout.num_pieces or any(file.num_bytes < 0 for file in files):
        return None
    landed = bytes(mark == "1" for mark in marks)
    return PeerFiles(files=files, landed=landed, sha256=sha256, digests=piece_digests_of(pieces, layout))


class PeerRegion:
    """One set of weights on another node; `url` is its prefetcher's."""

    def __init__(
        self,
        url: str,
        digest: str,
        token: str,
        chunk_bytes: int = 1 << 20,
        *,
        stall_s: float = STALL_S,
        window: WindowOf | None = None,
    ) -> None:
        self.name = url
        self._path = f"/v1/regions/{digest}"
        self._url, self._token = url, {"Authorization": f"Bearer {token}"} if token else {}
        self._connections = Connections(
            ConnectionLimits(connect_s=CONNECT_S, stall_s=stall_s, buffer_bytes=chunk_bytes, window=window)
        )

    async def look(self, *, again: bool = False) -> PeerFiles | None:
        asked = f"{self._path}?digests={str(not again).lower()}"
        async with self._ask(asked, {}) as answer:
            if answer.status == 404:
                return None
            _check(self.name, answer, 200)
            raw = bytearray()
            async for chunk in answer.chunks():
                raw += chunk
                if len(raw) > MAX_ANSWER_BYTES:
                    raise SourceInterrupted(f"{self.name}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
        try:
            return holding_of(msgspec.json.decode(raw))
        except msgspec.DecodeError as error:
            raise SourceInterrupted(f"{self.name}: {problem_of(error)}") from error

    async def read(self, first: int, last: int) -> AsyncGenerator[Chunk, None]:
        asked = {"Range": f"bytes={first}-{last - 1}"}
        async with self._ask(f"{self._path}/bytes", asked) as answer:
            _check(self.name, answer, 206)
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk

    @asynccontextmanager
    async def _ask(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[HttpAnswer]:
        try:
            url = httpx.URL(self._url).join(path)
            async with self._connections.ask("GET", url, {**headers, **self._token}) as answer:
                yield answer
        except (httpx.InvalidURL, http.client.HTTPException, OSError, UnicodeError, RequestImpossible) as error:
            raise SourceInterrupted(f"{self.name}: {problem_of(error)}") from error

    async def close(self) -> None:
        await self._connections.close()


def _check(name: str, answer: HttpAnswer, status: int) -> None:
    if answer.status != status:
        kind = PeerBusy if answer.status in (409, 503) else SourceInterrupted
        raise kind(f"{name}: HTTP {answer.status} {answer.reason}")
