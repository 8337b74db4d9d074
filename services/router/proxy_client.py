"""The client side of the data port: HTTP/1.1 requests in, one at a time per connection, in order.

Everything a client may do wrong ends here with an answer in OpenAI's shape: heads or bodies that are too large or too
slow, text that is not HTTP, paths and methods that do not exist. Pipelined requests wait their turn.
"""

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, cast

import httptools

from services.router import direct_write, http_text

if TYPE_CHECKING:
    from services.router.proxy import DataPort
    from services.router.proxy_exchange import Exchange

log = logging.getLogger(__name__)
# Not passed to engines: hop-by-hop, the router's own, and the client's credentials.
_NOT_PASSED = frozenset(
    (
        b"host",
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"authorization",
        b"transfer-encoding",
        b"te",
        b"trailer",
        b"upgrade",
        b"expect",
        b"content-length",
        b"x-request-id",
        b"traceparent",
        b"cookie",
        b"origin",
    )
)
IDLE, HEAD, BODY, LINGER = range(4)
_monotonic, _epoch = time.monotonic, time.time


class Parsed:
    """One request as it came."""

    __slots__ = (
        "body",
        "complete",
        "complete_at",
        "headers",
        "is_http11",
        "keep_alive",
        "method",
        "path",
        "request_id",
        "target",
        "ticket",
    )

    def __init__(self) -> None:
        self.method = self.target = self.path = self.body = b""
        self.headers: dict[bytes, bytes] = {}
        self.is_http11 = self.keep_alive = True
        self.complete = self.complete_at = 0.0
        self.ticket = 0
        self.request_id = ""

    def passed_headers(self) -> bytes:
        """The header lines an engine gets."""
        return b"".join([b"%b: %b\r\n" % h for h in self.headers.items() if h[0] not in _NOT_PASSED])


class ClientConnection(asyncio.Protocol):
    """One connection of one client."""

    def __init__(self, port: "DataPort") -> None:
        self.port = port
        self.exchange: Exchange | None = None
        self.write_paused = False
        self.write_paused_at = 0.0
        self.state = IDLE
        self.since = _monotonic()  # when `state` began
        self._waiting: deque[Parsed] = deque()
        self._advancing = False
        self._reads_paused = False
        self._closing = False  # the last answer on this connection is decided
        self._head_bytes = 0
        self._body_bytes = 0
        self._chunks: list[bytes] = []
        self._now = Parsed()
        self._parser = httptools.HttpRequestParser(self)

    # -- asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self.write: direct_write.Write = direct_write.writer(self.transport)
        self.transport.set_write_buffer_limits(high=self.port.limits.write_buffer_bytes)
        self.port.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.state == LINGER:
            return
        if self.state == IDLE:
            self.state, self.since = HEAD, _monotonic()
        if self.state == HEAD:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            log.exception("a request could not be read")
            self.refuse(500, "The router failed to read the request.", "internal_error")
            return
        except httptools.HttpParserUpgrade:
            self.refuse(400, "Protocol upgrades are not supported here; send plain HTTP/1.1.", "bad_request")
            return
        except httptools.HttpParserError as error:
            self._advance()
            if self.state != LINGER and not self._closing:
                self.refuse(400, f"The request is not HTTP/1.1: {error}", "bad_request")
            return
        if self._waiting:
            self._advance()
        if self.state == HEAD and self._head_bytes > self.port.limits.header_bytes:
            self._head_too_large()

    def _advance(self) -> None:
        """Take the next complete requests while none is being answered. One that is answered at once comes back here
        from within: the loop goes on, not deeper."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self._waiting and self.exchange is None and not self.transport.is_closing():
                parsed = self._waiting.popleft()
                if not self.port.take(self, parsed):
                    self.port.buffered_bytes -= len(parsed.body)
        finally:
            self._advancing = False
        full = len(self._waiting) >= self.port.limits.num_pipelined
        if full != self._reads_paused and not self.transport.is_closing():
            self._reads_paused = full
            (self.transport.pause_reading if full else self.transport.resume_reading)()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self.port.buffered_bytes -= sum(len(parsed.body) for parsed in self._waiting)
        self._waiting.clear()
        self._forget_body()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_left()
        self.port.closed(self)

    def pause_writing(self) -> None:
        self.write_paused, self.write_paused_at = True, _monotonic()
        if self.exchange is not None and self.exchange.engine is not None:
            self.exchange.engine.pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.exchange is not None and self.exchange.engine is not None:
            self.exchange.engine.resume()

    # -- httptools ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._now = Parsed()
        self.state, self.since = HEAD, _monotonic()

    def on_url(self, url: bytes) -> None:
        self._now.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._now.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self.state == LINGER or self._closing:
            return
        limits, now = self.port.limits, self._now
        if sum(map(len, now.headers.values())) + len(now.target) > limits.header_bytes:
            self._head_too_large()
            return
        now.is_http11 = self._parser.get_http_version() != "1.0"
        self.state = BODY
        length = now.headers.get(b"content-length")
        if length is not None and int(length) > limits.body_bytes:
            self._body_too_large()
        elif b"expect" in now.headers:
            if now.headers[b"expect"].lower() != b"100-continue":
                self.refuse(417, "Only `Expect: 100-continue` is supported.", "bad_request")
            elif length != b"0" and self.exchange is None and not self._waiting:
                self.write(http_text.CONTINUE)

    def on_body(self, body: bytes) -> None:
        if self.state != BODY:
            return
        self._body_bytes += len(body)
        self.port.buffered_bytes += len(body)
        self._chunks.append(body)
        if self._body_bytes > self.port.limits.body_bytes:
            self._body_too_large()
        elif self.port.buffered_bytes > self.port.limits.buffered_bytes:
            self.refuse(503, "Too many request bodies are being held; try again.", "overloaded", retry_after_s=1.0)

    def on_message_complete(self) -> None:
        if self.state == LINGER or self._closing:
            return
        now, chunks = self._now, self._chunks
        now.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._body_bytes, self._chunks = 0, []  # counted on in `now.body`, until its request is over
        now.method = self._parser.get_method()
        now.keep_alive = now.is_http11 and self._parser.should_keep_alive()
        now.complete, now.complete_at = _monotonic(), _epoch()
        now.path = now.target.partition(b"?")[0]
        self.port.name(now)
        self.state, self.since, self._head_bytes = IDLE, now.complete, 0
        self._waiting.append(now)

    def _forget_body(self) -> None:
        self.port.buffered_bytes -= self._body_bytes
        self._body_bytes = 0
        self._chunks = []

    # -- answers ------------------------------------------------------------------------------------------------

    def respond(
        self,
        parsed: Parsed,
        status: int,
        body: bytes,
        *,
        headers: bytes = b"content-type: application/json\r\n",
        retry_after_s: float = 0.0,
        traceparent: str = "",
    ) -> None:
        """A whole answer of the router's own."""
        headers += b"x-request-id: %b\r\n" % parsed.request_id.encode() + self.port.web.cors(parsed)
        if traceparent:
            headers += b"traceparent: %b\r\n" % traceparent.encode()
        if retry_after_s:
            headers += b"retry-after: %d\r\n" % round(retry_after_s)
        keep_alive = parsed.keep_alive and not self._closing and not self.port.leaving
        head = http_text.head(status, headers, length=len(body), keep_alive=keep_alive)
        self.write(head if parsed.method == b"HEAD" else head + body)
        if not keep_alive and self.exchange is None:
            self.close()

    def refuse(self, status: int, message: str, code: str, *, retry_after_s: float = 0.0) -> None:
        """Answer a request that is not complete, and close. What it still sends is read and dropped for a while, so
        that closing does not tear the answer away."""
        parsed = self._now
        self._forget_body()
        self.state, self.since = LINGER, _monotonic()
        self._closing, parsed.keep_alive = True, False
        if self.exchange is not None:
            self.exchange.keep_alive = False  # an earlier pipelined request is answered first, then we close
            return
        if not parsed.request_id:
            self.port.name(parsed)
        kind = "server_error" if status >= 500 else "invalid_request_error"
        headers = b"content-type: application/json\r\nx-request-id: %b\r\n" % parsed.request_id.encode()
        if retry_after_s:
            headers += b"retry-after: %d\r\n" % round(retry_after_s)
        body = http_text.error_json(message, kind, code)
        self.write(http_text.head(status, headers, length=len(body), keep_alive=False) + body)
        self.port.metrics.refused(status)
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self.port.loop.call_later(self.port.limits.linger_s, self.close)

    def _head_too_large(self) -> None:
        limit = self.port.limits.header_bytes
        self.refuse(431, f"The request's headers are larger than {limit} bytes.", "headers_too_large")

    def _body_too_large(self) -> None:
        limit = self.port.limits.body_bytes
        self.refuse(413, f"The request's body is larger than {limit} bytes.", "request_too_large")

    def exchange_over(self, keep_alive: bool) -> None:
        """The answer is written. Go on with what was pipelined behind it."""
        self.exchange = None
        if not keep_alive or self._closing or self.port.draining:
            self.close()
            return
        self.since = _monotonic() if self.state == IDLE else self.since
        if self._waiting:
            self._advance()

    def close(self) -> None:
        """Close after what is written has gone out."""
        self._closing = True
        self.transport.close()

    # -- time ---------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Called about once a second: nobody may be slow for ever."""
        limits = self.port.limits
        if self.write_paused and now - self.write_paused_at > limits.stall_s:
            self.transport.abort()
        elif self.state == HEAD:
            if now - self.since > limits.header_s:
                self.refuse(408, f"The headers took longer than {limits.header_s:g} s.", "request_timeout")
        elif self.state == BODY:
            if now - self.since > limits.body_s:
                self.refuse(408, f"The body took longer than {limits.body_s:g} s.", "request_timeout")
        elif self.state == IDLE and self.exchange is None and now - self.since > limits.idle_s:
            self.close()

    @property
    def is_idle(self) -> bool:
        return self.exchange is None and self.state == IDLE and not self._waiting
