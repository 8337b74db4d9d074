"""Weights from a web server, by ranges where it has them (RFC 9110 sections 13 and 14)."""

import http.client
import ipaddress
import re
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import httpx

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import (
    UNKNOWN_BYTES,
    Chunk,
    SourceChanged,
    SourceFile,
    SourceInfo,
    SourceInterrupted,
    SourceOptions,
    redacted,
)
from glowplug.weights.sources.connection import (
    ConnectionLimits,
    Connections,
    HttpAnswer,
    RequestImpossible,
    problem_of,
)

# Allowed redirects of a web server.

MAX_REDIRECTS: Final = 5
STATUSES: Final = frozenset({301, 302, 303, 307, 308})
_PORTS: Final = {"http": 80, "https": 443}


def next_url(current: httpx.URL, location: str, hosts: tuple[str, ...], shown: str) -> httpx.URL:
    """`hosts` are patterns of host names; `shown` is the source without its secrets. Raises WeightsUnavailable where
    the redirect must not be followed.

    User and password go only to the source's own host. Certificates catch a name in `hosts` that resolves to an
    internal address: other hosts are read by https only.
    """
    try:
        target = current.join(location)
    except httpx.InvalidURL as error:
        raise WeightsUnavailable(f"{shown}: redirected to an invalid address: {error}") from error
    where = f"{target.scheme}://{target.netloc.rpartition(b'@')[2].decode('ascii', 'replace')}"
    if target.scheme not in _PORTS or (current.scheme == "https" and target.scheme != "https"):
        raise WeightsUnavailable(f"{shown}: a redirect to {where} is not followed: it leaves https")
    if is_same_server(current, target):
        return target
    if target.scheme != "https" or _is_inside(target.host) or not _is_allowed(target.host, hosts):
        hint = "GLOWPLUG_REDIRECT_HOSTS lists the https hosts that may be"
        raise WeightsUnavailable(f"{shown}: a redirect to {where} is not followed; {hint}")
    return target.copy_with(userinfo=b"")


def is_same_server(current: httpx.URL, target: httpx.URL) -> bool:
    """Return whether host and port agree, or differ by the step from http to https between their usual ports."""
    if current.host != target.host:
        return False
    ports = [url.port or _PORTS[url.scheme] for url in (current, target)]
    return ports == [80, 443] or (ports[0] == ports[1] and current.scheme == target.scheme)


def _is_allowed(host: str, hosts: tuple[str, ...]) -> bool:
    return any(fnmatchcase(host.lower(), pattern.lower()) for pattern in hosts)


def _is_inside(host: str) -> bool:
    """Return whether the address is internal, which no pattern allows."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_global
    except ValueError:
        return False


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
PASSING = frozenset({408, 425, 429})  # worth another try, as every 5xx is
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
_INFLATED_BYTES = 1 << 20
_LINKED = "x-linked-etag"  # the object's own etag, if a hub redirects to a store that names it otherwise


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """`linked_etag`: the object's, from a redirect on the way, or ""."""

    response: HttpAnswer
    linked_etag: str = ""


class WebReader:
    """Redirects are followed at every call, since signed targets may expire, and only as `next_url` allows. Only the
    first address's server gets the token of `bearer`. `shown` is the source without its secrets."""

    def __init__(
        self,
        shown: str,
        options: SourceOptions,
        *,
        hosts: tuple[str, ...] = (),
        bearer: Callable[[], str] = lambda: "",
        connections: Connections | None = None,
    ) -> None:
        self._shown, self._bearer = shown, bearer
        self._hosts = (*options.redirect_hosts, *hosts)
        self._connections = connections or Connections(
            ConnectionLimits(
                connect_s=options.connect_timeout_s,
                stall_s=options.stall_timeout_s,
                buffer_bytes=options.chunk_bytes,
                window=options.window,
            )
        )

    @asynccontextmanager
    async def ask(self, method: str, address: str, headers: Mapping[str, str]) -> AsyncIterator[WebAnswer]:
        """Send a request and follow redirects. Raises WeightsUnavailable; SourceInterrupted for network errors."""
        linked, token = "", self._bearer()
        async with translated(self._shown):
            first = url = httpx.URL(address)
            for _ in range(MAX_REDIRECTS + 1):
                own = {"Authorization": f"Bearer {token}"} if token and is_same_server(first, url) else {}
                async with self._connections.ask(method, url, {**headers, **own}) as response:
                    linked = linked or response.headers.get(_LINKED, "")
                    location = response.headers.get("location")
                    if response.status not in STATUSES or location is None:
                        yield WebAnswer(response, linked)
                        return
                url = next_url(url, location, self._hosts, self._shown)
            raise WeightsUnavailable(f"{self._shown}: more than {MAX_REDIRECTS} redirects")

    async def read(
        self,
        address: str,
        headers: Mapping[str, str],
        check: Callable[[WebAnswer], None],
    ) -> AsyncGenerator[Chunk, None]:
        """A chunk is valid until the next request."""
        async with self.ask("GET", address, headers) as answer:
            check(answer)
            is_compressed = answer.response.headers.get("content-encoding", "").lower() in ("gzip", "x-gzip", "deflate")
            chunks: AsyncGenerator[Chunk, None] = answer.response.chunks()
            async with aclosing(inflated(chunks) if is_compressed else chunks) as stored:
                async for chunk in stored:
                    yield chunk

    def check(self, response: HttpAnswer) -> None:
        """Raises SourceInterrupted for a transient status, WeightsUnavailable for another failure."""
        status = response.status
        if status in PASSING or status >= 500:
            raise SourceInterrupted(f"{self._shown}: HTTP {status}")
        if not 200 <= status < 300:
            raise WeightsUnavailable(f"{self._shown}: HTTP {status} {response.reason}")

    def check_part(self, response: HttpAnswer, num_bytes: int, first_byte: int) -> None:
        """Raises as `check`; SourceChanged for another part."""
        if response.status in (200, 416):
            raise SourceChanged(f"{self._shown} changed, or its server stopped serving ranges")
        self.check(response)
        stated = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if not stated or int(stated[1]) != first_byte or stated[3] not in ("*", str(num_bytes)):
            raise SourceChanged(f"{self._shown}: asked for bytes from {first_byte}, got {stated and stated[0]}")

    async def close(self) -> None:
        await self._connections.close()


class HttpSource:
    scheme = "http"

    def __init__(self, uri: str, options: SourceOptions = SourceOptions()) -> None:
        self._uri, self._shown = uri, redacted(uri)
        self._web = WebReader(self._shown, options)

    async def measure(self) -> SourceInfo:
        """Ask by HEAD, else by `probe`."""
        return await self._by_head() or await self.probe()

    async def _by_head(self) -> SourceInfo | None:
        try:
            async with self._web.ask("HEAD", self._uri, {}) as answer:
                headers = answer.response.headers
                ranges = headers.get("accept-ranges", "").lower() == "bytes"
                num_bytes = _length(headers) if answer.response.is_success else UNKNOWN_BYTES
                return _one_file(num_bytes, headers, ranges=True) if ranges and num_bytes else None
        except SourceInterrupted:  # some servers cut a HEAD off; `probe` decides
            return None

    async def probe(self) -> SourceInfo:
        """Request one byte by range for size, validator and range support; too many servers refuse a HEAD."""
        async with self._web.ask("GET", self._uri, byte_range(0, 1)) as answer:
            response, headers = answer.response, answer.response.headers
            if response.status == 206:
                whole = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
                if whole and whole[3] != "*":
                    return _one_file(int(whole[3]), headers, ranges=True)
                raise WeightsUnavailable(f"{self._shown}: the server's Content-Range names no size")
            if response.status == 416:
                raise WeightsUnavailable(f"{self._shown}: the file is empty")
            self._web.check(response)
            return _one_file(_length(headers), headers, ranges=False)

    async def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[Chunk, None]:
        headers: dict[str, str] = {}
        if first_byte or last_byte:
            headers = byte_range(first_byte, last_byte)
            if file.validator and not file.validator.startswith("W/"):
                headers["If-Range"] = file.validator

        def check(answer: WebAnswer) -> None:
            if headers:
                self._web.check_part(answer.response, file.num_bytes, first_byte)
            else:
                self._web.check(answer.response)
            if _validator(answer.response.headers) != file.validator:
                raise SourceChanged(f"{self._shown} changed while it was being read")

        async with aclosing(self._web.read(self._uri, headers, check)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def close(self) -> None:
        await self._web.close()


@asynccontextmanager
async def translated(shown: str) -> AsyncIterator[None]:
    """Translate connection errors into those of sources."""
    try:
        yield
    except (httpx.InvalidURL, http.client.InvalidURL) as error:
        raise WeightsUnavailable(f"{shown}: the address is not valid ({type(error).__name__})") from error
    except RequestImpossible as error:
        raise WeightsUnavailable(f"{shown}: {error}") from error
    except (OSError, http.client.HTTPException, UnicodeError, zlib.error) as error:
        raise SourceInterrupted(f"{shown}: {problem_of(error)}") from error


async def inflated(chunks: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    """Undo unrequested compression: gzip, of any number of members (RFC 1952 section 2.2), or zlib's own. Zero bytes
    after a member are padding, as in Python's gzip. Raises zlib.error, also for truncated data."""
    inflate = zlib.decompressobj(wbits=_GZIP_OR_ZLIB)
    async with aclosing(chunks):
        async for chunk in chunks:
            rest: Chunk = chunk
            while rest:
                if inflate.eof:
                    rest = bytes(rest).lstrip(b"\0")
                    if not rest:
                        break
                    inflate = zlib.decompressobj(wbits=_GZIP_OR_ZLIB)
                if content := inflate.decompress(rest, _INFLATED_BYTES):
                    yield content
                rest = inflate.unconsumed_tail or inflate.unused_data
    if not inflate.eof:
        raise zlib.error("the compressed body ends early")


def byte_range(first_byte: int, last_byte: int) -> dict[str, str]:
    """[first_byte, last_byte); `last_byte` 0 means to the end."""
    return {"Range": f"bytes={first_byte}-{last_byte - 1 if last_byte else ''}"}


def _one_file(num_bytes: int, headers: Mapping[str, str], *, ranges: bool) -> SourceInfo:
    file = SourceFile(path="", num_bytes=num_bytes, validator=_validator(headers))
    return SourceInfo(files=(file,), ranges=ranges)


def _length(headers: Mapping[str, str]) -> int:
    """Return UNKNOWN_BYTES for an encoded body."""
    length = headers.get("content-length", "")
    is_encoded = headers.get("content-encoding", "identity") != "identity"
    return UNKNOWN_BYTES if is_encoded or not length.isdigit() else int(length)


def _validator(headers: Mapping[str, str]) -> str:
    etag = headers.get("etag", "")
    return etag if etag and not etag.startswith("W/") else headers.get("last-modified", "") or etag
