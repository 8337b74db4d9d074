"""The engine side of the data port: HTTP/1.1 connections to instances, pooled while idle.

A connection has one exchange at a time and passes on every read at once. Only the framing is parsed, and not even that
where a read is exactly one chunk of a stream. Engines close idle connections at any time: a request whose reused
connection breaks before the first byte gets a new one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Container
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import httptools

from glowplug.domain.engine_key import engine_key
from glowplug.domain.instance import Instance
from glowplug.services.router import wire
from glowplug.services.router.ends import EngineReader
from glowplug.services.router.exchange_states import ExchangeState
from glowplug.services.router.settings import Limits
from glowplug.telemetry.semconv import HEADER_REFUSED

log = logging.getLogger(__name__)
_monotonic = time.monotonic
# Hop-by-hop headers, the router's own, and `server`, since x-glowplug-instance names the engine.
_DROPPED = frozenset(
    b"connection keep-alive transfer-encoding te trailer upgrade content-length x-request-id traceparent server-timing "
    b"x-glowplug-instance x-glowplug-emulated server".split()
)
_REFUSED = HEADER_REFUSED.encode()
_OF_PAGES = b"access-control-"  # CORS is the data port's decision
FLOWING = ExchangeState.FLOWING
_EVENT_CHUNK_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")


class EngineConnection(asyncio.Protocol):
    """The httptools callbacks collect pieces; `data_received` passes them on."""

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.exchange: EngineReader | None = None
        self.was_idle = False  # pooled before: a close by the engine is not a failure
        self.head_bytes = 0
        self.idle_since = 0.0
        self.heard_at = 0.0
        self.paused = False
        self._pieces: list[bytes] = []
        # Called by the parser, for each chunk.
        self.on_chunk_header = partial(setattr, self, "_in_chunk", True)
        self.on_body = self._pieces.append
        self.on_chunk_complete = partial(setattr, self, "_in_chunk", False)
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[bytes] = []
        self.length: int | None = None
        self.is_framed = False  # it has a length or chunks; else it ends with the connection
        self.is_sse = False
        self.has_head = self.is_refusal = False
        self._complete = self._keep = False
        self._in_chunk = self._between_chunks = False  # between: all is parsed, and the next byte begins a chunk

    # -- asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._write = wire.writer(self.transport)

    def send(self, exchange: EngineReader) -> None:
        if self.transport.is_closing():  # no callback would follow, and writes would be dropped
            exchange.engine_lost("the engine closed the connection", stale=self.was_idle)
            return
        self.exchange, self.head_bytes = exchange, 0
        self.heard_at = _monotonic()
        self._write(exchange.engine_request(self.pool.credentials))
        exchange.attach(self)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self.transport.abort()
            return
        self.heard_at = _monotonic()
        if self._between_chunks and exchange.state is FLOWING and data.endswith(_EVENT_CHUNK_ENDS):
            end = data.find(b"\r\n")
            if data.startswith(b"%x\r\n" % (len(data) - end - 4)):
                exchange.pass_on(data[end + 2 : -2], data)
                return
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self.give_up(f"the engine's answer is not HTTP: {error}")
            return
        if self.is_refusal:
            self._refused()
            return
        pieces = self._pieces
        self._between_chunks = not self._in_chunk and data.endswith(b"\r\n")
        if not self.has_head:
            self.head_bytes += len(data)
            if self.head_bytes > self.pool.limits.engine_head_bytes:
                self.give_up(f"the engine's answer has more than {self.pool.limits.engine_head_bytes} bytes of headers")
            return
        if not pieces:
            body = b""
        else:
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
        if self._complete:
            keep = self._keep and self.is_framed
            self.exchange = None
            exchange.engine = None
            exchange.engine_data(self, body, True)
            self._release(keep)
            exchange.engine_over()
        elif body:
            exchange.engine_data(self, body, False)

    def _release(self, keep: bool) -> None:
        if self.paused:
            self.resume()
        self._reset()
        if keep and not self.transport.is_closing():
            self.pool.put(self)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.forget(self)
        del self._parser, self._feed, self.on_chunk_header, self.on_chunk_complete  # all refer to this connection
        exchange = self.exchange
        if exchange is None:
            return
        if self.has_head and not self.is_framed and exc is None:
            self.exchange = None
            exchange.engine = None
            exchange.engine_data(self, b"", True)
            exchange.engine_over()
            return
        self.give_up(f"the engine closed the connection{f': {exc}' if exc else ''}")

    def give_up(self, reason: str) -> None:
        exchange, self.exchange = self.exchange, None
        self.transport.abort()
        if exchange is not None:
            exchange.engine = None
            exchange.engine_lost(reason, stale=self.was_idle and not self.has_head)

    def _refused(self) -> None:
        exchange, self.exchange = self.exchange, None
        self.transport.abort()
        if exchange is not None:
            exchange.engine = None
            exchange.engine_refused("the engine sleeps, and refuses the request")

    def abandon(self) -> None:
        self.exchange = None
        self.transport.abort()

    def pause(self) -> None:
        if not self.paused and not self.transport.is_closing():
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.heard_at = _monotonic()
            if not self.transport.is_closing():
                self.transport.resume_reading()

    # -- httptools ----------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if self.has_head:
            return  # a trailer
        if lower == _REFUSED:
            self.is_refusal = True
        elif lower not in _DROPPED and not lower.startswith(_OF_PAGES):
            self.headers.append(b"%b: %b\r\n" % (name, value))
            if lower == b"content-type":
                self.is_sse = value.startswith(b"text/event-stream")
        elif lower == b"content-length":
            self.length = int(value)
            self.is_framed = True
        elif lower == b"transfer-encoding":
            self.is_framed = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.has_head = self.status >= 200
        if self.status in (204, 304):
            self.length, self.is_framed = None, True

    def on_message_complete(self) -> None:
        if self.has_head:
            self._complete = True
            self._keep = self._parser.should_keep_alive()
        else:
            self._reset()  # 1xx: the real answer follows


class Pool:
    """Idle connections of one instance, last used first out."""

    def __init__(self, instance: Instance, limits: Limits, engine_secret: str = "") -> None:
        self.instance_id, self.url, self.key_id = instance.instance_id, instance.url, instance.key_id
        api_key = engine_key(engine_secret, instance.key_id)
        if instance.key_id and not api_key:
            log.error(
                "the engine of %s asks for a key: set GLOWPLUG_ENGINE_SECRET to its agent's value", self.instance_id
            )
        self.credentials = f"authorization: Bearer {api_key}\r\n".encode() if api_key else b""
        url = urlsplit(instance.url)
        self._host, self._port = url.hostname or "", url.port or 0
        self.limits = limits
        self._idle: list[EngineConnection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self.closed = False

    def acquire(self, exchange: EngineReader, *, fresh: bool) -> None:
        oldest = _monotonic() - self.limits.engine_idle_s
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.idle_since < oldest:  # missed by a late sweep: the engine has closed it or will soon
                connection.transport.close()
            elif not connection.transport.is_closing():
                connection.send(exchange)
                return
        task = asyncio.get_running_loop().create_task(self._connect(exchange, exchange.wanted()))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, exchange: EngineReader, is_wanted: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.limits.connect_s):
                _, connection = await loop.create_connection(lambda: EngineConnection(self), self._host, self._port)
        except Exception as error:  # of any kind, else the exchange would wait for ever
            if not isinstance(error, OSError):  # TimeoutError is one
                log.exception("failed to connect to the engine at %s", self.url)
            if is_wanted():
                exchange.engine_unreachable(f"cannot connect to the engine: {error}")
            return
        if is_wanted():
            connection.send(exchange)
        else:
            self.put(connection)

    def put(self, connection: EngineConnection) -> None:
        if self.closed or len(self._idle) >= self.limits.num_pooled:
            connection.transport.close()
            return
        connection.idle_since, connection.was_idle = _monotonic(), True
        self._idle.append(connection)

    def forget(self, connection: EngineConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def sweep(self, now: float) -> None:
        old = [c for c in self._idle if now - c.idle_since > self.limits.engine_idle_s]
        for connection in old:
            self._idle.remove(connection)
            connection.transport.close()

    def close(self) -> None:
        """Close the idle connections; running exchanges finish."""
        self.closed = True
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()


class Engines:
    """The pools of all instances. The engines' keys derive from `engine_secret`."""

    def __init__(self, limits: Limits, engine_secret: str = "") -> None:
        self.pools: dict[str, Pool] = {}
        self._limits, self._engine_secret = limits, engine_secret

    def connect(self, exchange: EngineReader, instance: Instance, fresh: bool) -> None:
        """Send an exchange to its instance; `fresh`: on a new connection."""
        pool = self.pools.get(instance.instance_id)
        if pool is None or pool.url != instance.url or pool.key_id != instance.key_id:
            if pool is not None:
                pool.close()
            pool = self.pools[instance.instance_id] = Pool(instance, self._limits, self._engine_secret)
        pool.acquire(exchange, fresh=fresh)

    def sweep(self, now: float, known: Container[str]) -> None:
        """Close long-idle connections, and the pools of unknown instances."""
        for instance_id, pool in list(self.pools.items()):
            pool.sweep(now)
            if instance_id not in known:
                pool.close()
                del self.pools[instance_id]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
