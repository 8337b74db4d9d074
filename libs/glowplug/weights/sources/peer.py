"""Weights that the prefetcher of another node holds, whole or in part, over its REST port.

    GET /v1/regions/{digest}         what it holds: files with validators, pieces that have landed, checksums
    GET /v1/regions/{digest}/bytes   bytes [first, last) of the region, by a Range header

Both ask for a token that nodes of a fleet with an admin token derive from it, so that the admin token itself stays
where it is; without an admin token they are open, as the loopback is (ADR 7).
"""

import hashlib
import hmac
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.pieces import Layout, piece_digests_json, piece_digests_of
from glowplug.weights.source import SourceFile, SourceInterrupted, checked_relative
from glowplug.weights.transfer import Holding, PeerBusy
from glowplug.weights.window import WindowOf, followed, of_stream

MAX_ANSWER_BYTES = 64 << 20  # of what a peer says that it holds
STALL_S = 3.0  # without a byte: another holder is asked
CONNECT_S = 1.0


def peer_token(admin_token: str) -> str:
    """What opens another node's weights to this one; "" where the fleet has no admin token."""
    return (
        hmac.new(admin_token.encode(), b"glowplug: weights of peers", hashlib.sha256).hexdigest() if admin_token else ""
    )


def holding_json(holding: Holding, layout: Layout) -> dict[str, Any]:
    """What the first route answers."""
    return {
        "files": [[file.path, file.num_bytes, file.validator] for file in holding.files],
        "sha256": holding.sha256,
        "landed": "".join("1" if mark else "0" for mark in holding.landed),
        "pieces": piece_digests_json(layout, holding.digests),
    }


def holding_of(answer: Any) -> Holding | None:
    """The same, read. None for nonsense, as are files outside of the region and two of one name."""
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
    return Holding(files=files, landed=landed, sha256=sha256, digests=piece_digests_of(pieces, layout))


class PeerRegion:
    """One set of weights on another node. `url` is that of its prefetcher."""

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
        self.name, self._window = url, window
        self._path, self._chunk_bytes = f"/v1/regions/{digest}", chunk_bytes
        self._client = httpx.AsyncClient(
            base_url=url,
            verify=url.startswith("https:"),  # certificates take long to load, and http needs none
            timeout=httpx.Timeout(stall_s, connect=CONNECT_S),
            headers={"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})},
        )

    async def look(self, *, again: bool = False) -> Holding | None:
        try:
            async with self._client.stream("GET", self._path, params={"digests": str(not again).lower()}) as response:
                if response.status_code == 404:
                    return None
                _check(response, 200)
                raw = bytearray()
                async for chunk in response.aiter_bytes():
                    raw += chunk
                    if len(raw) > MAX_ANSWER_BYTES:
                        raise SourceInterrupted(f"{self.name}: the answer is longer than {MAX_ANSWER_BYTES} bytes")
            return holding_of(msgspec.json.decode(raw))
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError) as error:
            raise SourceInterrupted(f"{self.name}: {type(error).__name__} {error}".rstrip()) from error

    async def read(self, first: int, last: int) -> AsyncGenerator[bytes, None]:
        asked = {"Range": f"bytes={first}-{last - 1}"}
        try:
            async with self._client.stream("GET", f"{self._path}/bytes", headers=asked) as response:
                _check(response, 206)
                window = of_stream(response.extensions.get("network_stream"), self._window)
                async for chunk in followed(response.aiter_bytes(), window, self._chunk_bytes):
                    yield chunk
        except httpx.HTTPError as error:
            raise SourceInterrupted(f"{self.name}: {type(error).__name__} {error}".rstrip()) from error

    async def close(self) -> None:
        await self._client.aclose()


def _check(response: httpx.Response, status: int) -> None:
    if response.status_code != status:
        kind = PeerBusy if response.status_code in (409, 503) else SourceInterrupted
        raise kind(f"{response.url.host}: HTTP {response.status_code} {response.reason_phrase}")
