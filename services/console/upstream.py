"""The console's HTTP client for other services. It holds no token; addresses are from settings, else announced."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from typing import Final, TypeVar

import httpx
from fastapi import Request

from glowplug.domain.errors import GlowplugError, NoCapacity, TooLarge

CONNECT_S: Final = 5.0
ANSWER_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 8 << 20
SETTINGS: Final = {"router": "data_url", **{name: f"{name}_url" for name in ("autoscaler", "placer", "predictor")}}
KEEP_IDLE_S: Final = 4.0  # servers close idle connections after 5 s
T = TypeVar("T")


class NoAddress(NoCapacity):
    """The service's address is not set (503)."""

    code = "no_address"


class ServiceUnreachable(GlowplugError):
    """The service does not answer (502)."""

    status, type, code = 502, "server_error", "upstream_unreachable"


class TimedOut(GlowplugError):
    """The service accepted the request and did not answer in time (504)."""

    status, type, code = 504, "server_error", "upstream_timeout"


class ClientGone(Exception):
    """The client has left."""


class Addresses:
    """Base URLs by service of SETTINGS; a router's is that of its OpenAI API."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {service: url.rstrip("/") for service, url in given.items() if url}
        self._learned: dict[str, str] = {}
        self._known = frozenset(given)

    def learn(self, service: str, url: str) -> None:
        """Settings take precedence over announced addresses."""
        if service in self._known and url.startswith(("http://", "https://")):
            self._learned[service] = url.rstrip("/")

    def find(self, service: str) -> str:
        return self._given.get(service) or self._learned.get(service, "")

    def url(self, service: str) -> str:
        """Raises NoAddress with the missing setting."""
        if found := self.find(service):
            return found
        raise NoAddress(f"no {service} address known: set GLOWPLUG_{SETTINGS[service].upper()} for the console")


class Upstream:
    """One pool of connections. The caller closes the answers it opens."""

    def __init__(self, addresses: Addresses, *, max_connections: int) -> None:
        self.addresses = addresses
        self._limits = httpx.Limits(max_connections=max_connections, keepalive_expiry=KEEP_IDLE_S)
        self._client: httpx.AsyncClient | None = None

    async def open(
        self,
        service: str,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        silence_s: float,
        content: bytes = b"",
        base: str = "",
    ) -> httpx.Response:
        """Return an answer with its body unread. `silence_s` bounds each wait for bytes; `base`: address of one of
        several services of that name.

        Raises NoAddress, ServiceUnreachable (the request was not accepted) and TimedOut (it may have been)."""
        base = base or self.addresses.url(service)
        url = base + path
        if self._client is None:
            self._client = httpx.AsyncClient(trust_env=False, limits=self._limits, follow_redirects=False)
        timeout = httpx.Timeout(silence_s, connect=CONNECT_S, pool=CONNECT_S)
        request = self._client.build_request(method, url, headers=headers, content=content, timeout=timeout)
        try:
            return await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.InvalidURL) as error:
            raise ServiceUnreachable(f"the {service} does not answer at {base}") from error
        except httpx.TimeoutException as error:
            raise TimedOut(f"the {service} accepted the request and has been silent for {silence_s:g} s") from error
        except httpx.HTTPError as error:
            raise ServiceUnreachable(f"the {service} closed the connection early: {type(error).__name__}") from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()


async def read_chunks(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """Raises TooLarge before yielding more than `max_bytes`."""
    too_large = TooLarge(f"the body is larger than {max_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_large
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large
        yield chunk


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises TooLarge before keeping more than `max_bytes`."""
    return b"".join([chunk async for chunk in read_chunks(request, max_bytes)])


async def read_answer(response: httpx.Response, max_bytes: int) -> bytes:
    """Return the answer cut at `max_bytes`; release the connection."""
    body = bytearray()
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) >= max_bytes:
                break
    except httpx.HTTPError as error:
        raise ServiceUnreachable("the answer ended early") from error
    finally:
        await response.aclose()
    return bytes(body[:max_bytes])


async def read_once(upstream: Upstream, service: str, path: str) -> tuple[int, bytes]:
    """Ask a question of the console's own. Raises as `Upstream.open`."""
    answer = await upstream.open(service, "GET", path, headers={}, silence_s=ANSWER_S)
    return answer.status_code, await read_answer(answer, MAX_ANSWER_BYTES)


async def unless_gone(request: Request, asked: Awaitable[T]) -> T:
    """Await `asked` until the client of `request` (its body read) leaves. Raises ClientGone."""
    work, gone = asyncio.ensure_future(asked), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        return work.result()
    finally:
        for task in (work, gone):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
