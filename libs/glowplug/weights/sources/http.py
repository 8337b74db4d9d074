"""Weights from a web server, by ranges where it has them (RFC 9110 sections 13 and 14)."""

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import (
    MAX_REDIRECTS,
    STATUSES,
    UNKNOWN_BYTES,
    SourceChanged,
    SourceFile,
    SourceInfo,
    SourceInterrupted,
    SourceOptions,
    next_url,
    redacted,
)

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_PASSING = frozenset({408, 425, 429})  # worth another try, as every 5xx is


class HttpSource:
    """One file at `http(s)://...`. Redirects are followed at every call, so that signed targets may expire, and only to
    where `next_url` allows."""

    scheme = "http"

    def __init__(self, uri: str, options: SourceOptions = SourceOptions()) -> None:
        self._uri, self._shown = uri, redacted(uri)
        self._chunk_bytes, self._redirect_hosts = options.chunk_bytes, options.redirect_hosts
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            timeout=httpx.Timeout(options.stall_timeout_s, connect=options.connect_timeout_s),
            headers={"Accept-Encoding": "identity"},
        )

    async def probe(self) -> SourceInfo:
        """One byte by range gives size, validator and whether ranges work; a HEAD is refused by too many servers."""
        async with _translated(self._shown), self._get(_range(0, 1)) as response:
            headers = response.headers
            if response.status_code == 206:
                whole = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
                if whole and whole[3] != "*":
                    file = SourceFile(path="", num_bytes=int(whole[3]), validator=_validator(headers))
                    return SourceInfo(files=(file,), ranges=True)
                raise WeightsUnavailable(f"{self._shown}: the server's Content-Range names no size")
            if response.status_code == 416:
                raise WeightsUnavailable(f"{self._shown}: the file is empty")
            self._check(response)
            encoded = headers.get("content-encoding", "identity") != "identity"
            num_bytes = UNKNOWN_BYTES if encoded else int(headers.get("content-length", UNKNOWN_BYTES))
            file = SourceFile(path="", num_bytes=num_bytes, validator=_validator(headers))
            return SourceInfo(files=(file,), ranges=False)

    async def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[bytes, None]:
        headers: dict[str, str] = {}
        if first_byte or last_byte:
            headers = _range(first_byte, last_byte)
            if file.validator and not file.validator.startswith("W/"):
                headers["If-Range"] = file.validator
        async with _translated(self._shown), self._get(headers) as response:
            if headers:
                self._check_part(response, file, first_byte)
            else:
                self._check(response)
            if _validator(response.headers) != file.validator:
                raise SourceChanged(f"{self._shown} changed while it was being read")
            async for chunk in response.aiter_bytes(self._chunk_bytes):
                yield chunk

    @asynccontextmanager
    async def _get(self, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """The first answer that is no redirect."""
        url = httpx.URL(self._uri)
        for _ in range(MAX_REDIRECTS + 1):
            async with self._client.stream("GET", url, headers=headers) as response:
                location = response.headers.get("location")
                if response.status_code not in STATUSES or location is None:
                    yield response
                    return
            url = next_url(url, location, self._redirect_hosts, self._shown)
        raise WeightsUnavailable(f"{self._shown}: more than {MAX_REDIRECTS} redirects")

    def _check_part(self, response: httpx.Response, file: SourceFile, first_byte: int) -> None:
        if response.status_code in (200, 416):
            raise SourceChanged(f"{self._shown} changed, or its server stopped serving ranges")
        self._check(response)
        stated = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if not stated or int(stated[1]) != first_byte or stated[3] not in ("*", str(file.num_bytes)):
            raise SourceChanged(f"{self._shown}: asked for bytes from {first_byte}, got {stated and stated[0]}")

    def _check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status in _PASSING or status >= 500:
            raise SourceInterrupted(f"{self._shown}: HTTP {status}")
        if not 200 <= status < 300:
            raise WeightsUnavailable(f"{self._shown}: HTTP {status} {response.reason_phrase}")

    async def close(self) -> None:
        await self._client.aclose()


@asynccontextmanager
async def _translated(shown: str) -> AsyncIterator[None]:
    """Turns httpx's errors into ours; `shown` is the address without secrets."""
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise WeightsUnavailable(f"{shown}: {error}") from error
    except httpx.HTTPError as error:
        raise SourceInterrupted(f"{shown}: {type(error).__name__} {error}".rstrip()) from error


def _range(first_byte: int, last_byte: int) -> dict[str, str]:
    return {"Range": f"bytes={first_byte}-{last_byte - 1 if last_byte else ''}"}


def _validator(headers: Mapping[str, str]) -> str:
    etag = headers.get("etag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("last-modified", "") or etag
