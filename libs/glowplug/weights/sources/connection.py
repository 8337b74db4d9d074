"""HTTP/1.1 for large bodies: persistent connections, each read by a thread of its own.

The kernel wakes the thread when enough bytes are there (SO_RCVLOWAT), and the event loop runs once the buffer is full,
or after `TICK_S`. A gigabyte takes the loop a thousand steps, and connections are received and decrypted on several
cores. A thread writes only to its connection's buffer, so a cancelled reader leaves at once.
"""

import asyncio
import base64
import http.client
import os
import select
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.request import getproxies, proxy_bypass

import httpx

from glowplug.weights.window import ReceiveWindow, WindowOf, of_socket

T = TypeVar("T")
TICK_S = 0.1  # a partly filled buffer is handed over after this
KEPT_S = 5.0  # servers and middleboxes drop connections idle for longer
SMALL_BYTES = 64 << 10  # of an unwanted body: read, to keep its connection
ENOUGH_BYTES = 256 << 10  # wake the thread: small packets are left to the kernel
RECORD_BYTES = 17 << 10
QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)
_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "glowplug"}
_PORTS = {"http": 80, "https": 443}


def problem_of(error: Exception) -> str:
    """Return the system's own words, else the error's type and text."""
    return getattr(error, "strerror", None) or f"{type(error).__name__} {error}".rstrip()


class RequestImpossible(Exception):
    """HTTP forbids one of its headers, or its proxy's kind is unsupported: no retry helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Seconds to connect, and without a byte; bytes of a connection's buffer; its window."""

    connect_s: float
    stall_s: float
    buffer_bytes: int
    window: WindowOf | None = None


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """`fill` waits for more of the body; it gives an empty view at the end."""

    status: int
    reason: str
    headers: httpx.Headers
    fill: Callable[[], Awaitable[memoryview]]

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    async def chunks(self) -> AsyncGenerator[memoryview, None]:
        """A chunk is valid until the next request."""
        while chunk := await self.fill():
            yield chunk


class Connections:
    """Connections kept for reuse, to any number of servers. Proxies come from the environment (HTTP_PROXY,
    HTTPS_PROXY, NO_PROXY); certificates are checked as by httpx. Raises OSError, http.client.HTTPException and
    RequestImpossible."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._kept: defaultdict[_Route, list[_Connection]] = defaultdict(list)
        self._all: set[_Connection] = set()
        self._proxies = getproxies()

    @asynccontextmanager
    async def ask(self, method: str, url: httpx.URL, headers: Mapping[str, str]) -> AsyncIterator[HttpAnswer]:
        """Send one request, with user and password of `url`; the caller handles redirects."""
        route = _Route.to(url, self._proxies)
        connection = self._taken(route)
        is_kept = False
        try:
            answer = await connection.ask(method, url, {**_HEADERS, **headers, **_basic("Authorization", url)})
            yield answer
            is_kept = await connection.is_done()
        finally:
            if is_kept and connection in self._all:  # unless all were closed meanwhile
                self._kept[route].append(connection)
            else:
                self._drop(connection)

    def _taken(self, route: "_Route") -> "_Connection":
        kept = self._kept[route]
        while kept:
            if (connection := kept.pop()).is_alive:
                return connection
            self._drop(connection)
        connection = _Connection(_Line(route, self._limits))
        self._all.add(connection)
        return connection

    def _drop(self, connection: "_Connection") -> None:
        self._all.discard(connection)
        connection.end()

    async def close(self) -> None:
        """Close at once, even during reads."""
        self._kept.clear()
        for connection in list(self._all):
            self._drop(connection)


@dataclass(frozen=True, slots=True)
class _Route:
    """URLs without path."""

    url: httpx.URL
    proxy: httpx.URL | None

    @classmethod
    def to(cls, url: httpx.URL, proxies: Mapping[str, str]) -> "_Route":
        server = url.copy_with(raw_path=b"/", fragment=None, userinfo=b"")
        proxy = proxies.get(url.scheme) or proxies.get("all", "")
        if not proxy or proxy_bypass(url.host):
            return cls(server, None)
        found = httpx.URL(proxy if "://" in proxy else f"http://{proxy}")
        if found.scheme != "http":
            raise RequestImpossible(f"a proxy of {found.scheme} is not supported")
        return cls(server, found)

    def connection(self, limits: ConnectionLimits) -> http.client.HTTPConnection:
        """Return it unconnected. The first TLS one blocks."""
        nearest = self.proxy or self.url
        host, port = nearest.raw_host.decode("ascii"), nearest.port or _PORTS[nearest.scheme]
        if self.url.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=limits.connect_s)
        secure = http.client.HTTPSConnection(host, port, timeout=limits.connect_s, context=tls_context())
        if self.proxy:
            own = _basic("Proxy-Authorization", self.proxy)
            secure.set_tunnel(self.url.raw_host.decode("ascii"), self.url.port or _PORTS["https"], own)
        return secure

    def target(self, url: httpx.URL) -> tuple[str, dict[str, str]]:
        path = url.raw_path.decode("ascii")
        if self.proxy is None or self.url.scheme == "https":
            return path, {}
        return f"{url.scheme}://{url.netloc.rpartition(b'@')[2].decode('ascii')}{path}", _basic(
            "Proxy-Authorization", self.proxy
        )


class _Connection:
    """One connection for the event loop. Used by one task at a time."""

    def __init__(self, line: "_Line") -> None:
        self._line, self._caller = line, CallThread("weights connection")
        self._used_at = 0.0

    @property
    def is_alive(self) -> bool:
        return time.monotonic() - self._used_at < KEPT_S and self._line.is_quiet()

    async def ask(self, method: str, url: httpx.URL, headers: Mapping[str, str]) -> HttpAnswer:
        response = await self._caller.run(lambda: self._line.ask(method, url, headers))
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.getheaders()]
        return HttpAnswer(response.status, response.reason, httpx.Headers(raw), self._fill)

    async def _fill(self) -> memoryview:
        return await self._caller.run(self._line.fill)

    async def is_done(self) -> bool:
        """Return whether it can be reused, after reading the rest of a small body."""
        self._used_at = time.monotonic()
        if 0 < self._line.num_bytes_left <= SMALL_BYTES:
            await self._caller.run(self._line.drain)
        return self._line.is_done

    def end(self) -> None:
        """Wake all waiters at once."""
        self._line.shut()
        self._caller.end(self._line.close)


class _Line:
    """One connection for its thread: all methods block, except `shut`, `is_quiet` and the attributes."""

    def __init__(self, route: _Route, limits: ConnectionLimits) -> None:
        self._route, self._limits = route, limits
        self._http: http.client.HTTPConnection | None = None
        self._socket: Any = None
        self._poll = select.poll()
        self._window: ReceiveWindow | None = None
        self._response: http.client.HTTPResponse | None = None
        self._is_read_ahead = False  # http.client may hold the beginning of the body
        self._buffer = memoryview(bytearray(limits.buffer_bytes))
        self._closing = threading.Lock()  # guards against shutting a reused descriptor
        self._is_shut = False
        self.num_bytes_left = 0  # of the body; -1: until the server ends it
        self.is_done = False

    def ask(self, method: str, url: httpx.URL, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        if self._http is None:
            self._connect()
        assert self._http is not None
        self.is_done = False
        self._socket.settimeout(self._limits.stall_s)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        target, own = self._route.target(url)
        try:
            self._send(method, target, {**headers, **own})
            self._acknowledge()
            self._response = response = self._http.getresponse()
            self._is_read_ahead = True
            self.num_bytes_left = _body_bytes(response)
            if not self.num_bytes_left:
                self._end_answer()
            elif not response.fp.peek(1):
                raise http.client.RemoteDisconnected("the server closed the connection before it sent the body")
        except TimeoutError:
            raise self._stalled() from None
        return response

    def _send(self, method: str, target: str, headers: Mapping[str, str]) -> None:
        assert self._http is not None
        try:
            self._http.request(method, target, headers=headers)
        except ValueError as error:  # it quotes the header, which may be a token
            raise RequestImpossible(
                f"a header holds a character that HTTP does not allow ({type(error).__name__})"
            ) from None

    def _stalled(self) -> TimeoutError:
        return TimeoutError(f"no byte within {self._limits.stall_s:g} s")

    def _connect(self) -> None:
        connection = self._route.connection(self._limits)
        connection.connect()
        with self._closing:
            self._http, self._socket = connection, connection.sock
        if self._is_shut:
            raise ConnectionAbortedError("the connection was closed before it was established")
        self._poll.register(self._socket, select.POLLIN)
        self._window = of_socket(self._socket, self._limits.window)

    def fill(self) -> memoryview:
        """A full buffer, or the bytes of `TICK_S`; nothing at the body's end. Raises TimeoutError without a byte,
        http.client.IncompleteRead, and ConnectionAbortedError where it was shut before an end that only the
        server tells."""
        if self.num_bytes_left == 0 or self._response is None:
            return self._buffer[:0]
        if self._window is not None:
            self._window.follow()
        view = self._buffer if self.num_bytes_left < 0 else self._buffer[: self.num_bytes_left]
        num_bytes = self._read_chunked(view) if self._response.chunked else self._read(view)
        if self.num_bytes_left > 0:
            if not num_bytes:
                raise http.client.IncompleteRead(b"", self.num_bytes_left)
            self.num_bytes_left -= num_bytes
        if not num_bytes and self._is_shut:
            raise ConnectionAbortedError("the connection was closed before the end of the body")
        if not num_bytes or self.num_bytes_left == 0:
            self._end_answer()
        return view[:num_bytes]

    def drain(self) -> None:
        while self.num_bytes_left > 0:
            self.fill()

    def _end_answer(self) -> None:
        assert self._response is not None
        self.num_bytes_left = 0
        self.is_done = not self._response.will_close
        if self.is_done:  # any byte that arrives now rules out a reuse
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._response.close()
        self._response = None

    def _read_chunked(self, view: memoryview) -> int:
        assert self._response is not None
        began_at, num_bytes = time.monotonic(), 0
        try:
            while num_bytes < len(view) and (content := self._response.read1(len(view) - num_bytes)):
                view[num_bytes : num_bytes + len(content)] = content
                num_bytes += len(content)
                if time.monotonic() - began_at >= TICK_S:
                    break
        except TimeoutError:
            raise self._stalled() from None
        return num_bytes

    def _read(self, view: memoryview) -> int:
        num_bytes = 0
        if self._is_read_ahead:
            assert self._response is not None
            ahead = self._response.fp.peek(1)
            num_bytes = self._response.fp.readinto(view[: len(ahead)])
            self._is_read_ahead = num_bytes < len(ahead)
            if self._is_read_ahead:
                return num_bytes
            self._socket.setblocking(False)
        began_at = time.monotonic()
        while num_bytes < len(view):
            try:
                came = self._socket.recv_into(view[num_bytes:])
            except (BlockingIOError, ssl.SSLWantReadError):
                waited_s = time.monotonic() - began_at
                if num_bytes and waited_s >= TICK_S:
                    break
                if waited_s >= self._limits.stall_s:
                    raise self._stalled() from None
                self._wait(len(view) - num_bytes, TICK_S - waited_s if num_bytes else TICK_S)
                continue
            num_bytes += came
            if not came:
                break
        return num_bytes

    def _wait(self, num_bytes: int, timeout_s: float) -> None:
        """Wait for that many bytes, `ENOUGH_BYTES`, or half of the window (no more arrive unread). Of TLS a record
        may be half read already."""
        window_bytes = self._window.num_bytes if self._window is not None else 0
        enough = min(num_bytes, ENOUGH_BYTES, window_bytes // 2 or ENOUGH_BYTES)
        enough -= RECORD_BYTES if isinstance(self._socket, ssl.SSLSocket) else 0
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, enough))
        self._acknowledge()
        self._poll.poll(timeout_s * 1e3)

    def _acknowledge(self) -> None:
        """Acknowledge at once: some servers hold small packets until the last one is acknowledged (Nagle)."""
        if QUICK_ACK is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)

    def is_quiet(self) -> bool:
        """Return whether the server neither closed it nor sent unrequested bytes."""
        with self._closing:
            if self._is_shut or self._socket is None:
                return False
            return not self._poll.poll(0)

    def shut(self) -> None:
        with self._closing:
            self._is_shut = True
            if self._socket is not None:
                with suppress(OSError):
                    socket.socket.shutdown(
                        self._socket, socket.SHUT_RDWR
                    )  # of TLS too, whose own would only forget its keys

    def close(self) -> None:
        with self._closing:
            if self._response is not None:
                self._response.close()
            if self._http is not None:
                self._http.close()
            if self._socket is not None:
                self._socket.close()
            self._socket = None


class CallThread:
    """A thread for an event loop's blocking calls. The process's end does not wait for it: a lookup or a connect may
    be slow."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], bool]] = SimpleQueue()
        self._is_ending = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while self._calls.get()():
            continue

    def run(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Raises ConnectionAbortedError after `end`. Cancelling it stops nothing."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._is_ending:
            future.set_exception(ConnectionAbortedError("it was closed"))
            return future

        def call() -> bool:
            result, failure = None, None
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it is raised again where the caller waits
                failure = error
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, future, result, failure)
            return True

        self._calls.put(call)
        return future

    def end(self, last: Callable[[], None]) -> None:
        """End the thread after its present call, and `last`."""

        def call() -> bool:
            last()
            return False

        self._is_ending = True
        self._calls.put(call)


def _settle(future: "asyncio.Future[Any]", result: Any, failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is not None:
        future.set_exception(failure)
    else:
        future.set_result(result)


_making_tls = threading.Lock()


def tls_context() -> ssl.SSLContext:
    """Read the certificates once per process, which takes 26 ms. Blocks."""
    with _making_tls:
        return _tls_context(os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", ""))


@cache
def _tls_context(cert_file: str, cert_dir: str) -> ssl.SSLContext:
    """The arguments are cache keys: httpx reads both from the environment."""
    context = httpx.create_ssl_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _body_bytes(response: http.client.HTTPResponse) -> int:
    """-1: until the server ends it. A bodiless answer (to HEAD, 204, 304) may still name an encoding."""
    if response.length == 0:
        return 0
    return -1 if response.chunked or response.length is None else response.length


def _basic(header: str, url: httpx.URL) -> dict[str, str]:
    """The header with an address's user and password, if any."""
    if not url.userinfo:
        return {}
    shown = base64.b64encode(f"{url.username}:{url.password}".encode()).decode("ascii")
    return {header: f"Basic {shown}"}
