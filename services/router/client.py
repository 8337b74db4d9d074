"""The client side of the data port: HTTP/1.1 connections, with requests answered one at a time, in order.

Large, slow or malformed input gets an error in OpenAI's shape. Pipelined requests wait for earlier answers; so does a
refusal, a connection's last answer.

A client may close its sending side and still read. Only sending tells it from a departed one, so the first bytes of
every answer are sent at once.
"""

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from glowplug.domain.errors import GlowplugError
from glowplug.engines import apis
from glowplug.runtime.clock import CLOCK
from glowplug.services.router import api_errors, http_request, tracing, wire
from glowplug.services.router.api_errors import refused
from glowplug.services.router.batch_paths import FILES
from glowplug.services.router.ends import Answerer, ClientSink, Connection
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.request_table import PortStage
from glowplug.services.router.responses_socket import ResponsesSocket
from glowplug.services.router.upload import Upload

log = logging.getLogger(__name__)
# LINGER: no more requests are read; the client has sent all, or the last answer is decided.
IDLE, HEAD, BODY, LINGER = range(4)
PARSE_BYTES = 16 * 1024  # per step, so that small requests do not fill the memory
RESPONSES = apis.RESPONSES.encode()
UPLOAD_SLICE = 1 << 20  # least bytes of a file within `body_s`
TCP_CLOSED = 7  # TCP_CLOSE of Linux's tcp_info
_monotonic = time.monotonic
_NONE = HttpRequest()  # between two requests
# Takes one complete request. Returns True when an exchange now has it and its buffered bytes.
Take = Callable[[ClientSink, HttpRequest], bool]


class ClientConnection(asyncio.Protocol):
    counts_all = False

    def __init__(self, context: PortContext[Exchange], take: Take, others: set[Connection]) -> None:
        self._context, self._take, self._others = context, take, others
        self.exchange: Answerer | None = None
        self.write_paused = False
        self.write_paused_at = 0.0
        self._unsent_bytes, self._unsent_at = 0, 0.0  # of answers that are over, and when they last became fewer
        self.state = IDLE
        self.since = _monotonic()
        self._waiting: deque[HttpRequest] = deque()
        self._advancing = self._resume_due = False
        self._reads_paused = False
        self._all_sent = False
        self._closing = False
        self._refusal: tuple[int, bytes] | None = None  # the last answer, after all earlier ones
        self._owes_continue = False
        self._unread: bytes | memoryview = b""  # while too many requests wait
        self._head_bytes = 0
        self._body_bytes = 0
        self._framed_bytes = self._framed_at_body = 0  # bytes of the body with its framing; the same at its last piece
        self._num_trailers = 0
        self._body: bytes | bytearray = b""
        self._upload: Upload | None = None
        self._now = _NONE
        self._parser = httptools.HttpRequestParser(self)

    # -- asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self.write: wire.Write = wire.writer(self.transport)
        self.bound_buffer()
        self._others.add(self)
        if len(self._others) > self._context.limits.max_connections:
            self.refuse(refused(503, "Too many connections.", "overloaded", retry_after_s=1.0))

    def data_received(self, data: bytes) -> None:
        if self.state == LINGER:
            return
        if len(data) <= PARSE_BYTES and not self._unread:
            self._parse(data)
        else:
            self._unread = memoryview(bytes(self._unread) + data if self._unread else data)
        if self._waiting or self._unread:
            self._advance()

    def _parse(self, data: bytes | memoryview) -> None:
        in_body = self.state == BODY
        if in_body:
            self._framed_bytes += len(data)
        else:
            self._head_bytes += len(data)
        if self.state == IDLE:
            self.state, self.since = HEAD, _monotonic()
        limits = self._context.limits
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            reason = error.__context__  # raised by a callback of ours
            if not isinstance(reason, GlowplugError):
                log.exception("failed to parse a request; it gets a 500")
                reason = refused(500, "The router failed to read the request.", "internal_error")
            self.refuse(reason)
        except httptools.HttpParserUpgrade as rest:
            if rest.args[0] < len(data):
                self.refuse(refused(400, "Data follow the handshake, before its answer."))
        except httptools.HttpParserError as error:
            self.refuse(refused(400, f"The request is not HTTP/1.1: {error}"))
        else:
            if self.state == HEAD and self._head_bytes > limits.header_bytes:
                self.refuse(http_request.head_too_large(limits))
            elif self.state == BODY and in_body and self._is_framing_too_large():
                what = "The body's chunk sizes, extensions and trailers"
                self.refuse(refused(431, f"{what} are larger than {limits.header_bytes} bytes.", "headers_too_large"))

    def _is_framing_too_large(self) -> bool:
        limits = self._context.limits
        most = limits.header_bytes + limits.chunk_overhead * self._body_bytes
        since_body = self._framed_bytes - self._framed_at_body
        return since_body > limits.header_bytes or self._framed_bytes - self._body_bytes > most

    def _advance(self) -> None:
        """Take the next complete requests; after `num_pipelined` other connections get a turn. Reentrant calls return
        at once."""
        if self._advancing:
            return
        self._advancing = True
        most = left = self._context.limits.num_pipelined
        try:
            while True:
                while self._waiting and left and self.exchange is None:
                    if self.write_paused or self._closing or self.transport.is_closing():
                        break
                    left -= 1
                    request = self._waiting.popleft()
                    if not self._take(self, request):
                        self._context.buffered_bytes -= len(request.body)
                if self.state == LINGER or not self._unread or not left or len(self._waiting) >= most:
                    break
                part, self._unread = self._unread[:PARSE_BYTES], self._unread[PARSE_BYTES:]
                self._parse(part)
        finally:
            self._advancing = False
        if self._closing:
            return
        if not left and not self._resume_due:
            self._resume_due = True
            self._context.loop.call_soon(self._resume)
        if self.exchange is None and not self._waiting:
            self._all_answered()
        full = bool(self._unread) or len(self._waiting) >= most
        if full != self._reads_paused and not self._all_sent and not self.transport.is_closing():
            self._reads_paused, self.since = full, _monotonic()
            (self.transport.pause_reading if full else self.transport.resume_reading)()

    def _resume(self) -> None:
        self._resume_due = False
        self._advance()

    def _all_answered(self) -> None:
        if self._refusal is not None:
            status, answer = self._refusal
            self._refusal = None
            self.write(answer)
            self._context.metrics.refused(status)
            self._finish()
        elif self._all_sent:
            self.close()
        elif self._owes_continue and self.state == BODY and not self._body_bytes:
            self._owes_continue = False
            self.write(wire.CONTINUE)

    def eof_received(self) -> bool:
        """Probe whether the client still reads. Returns True to keep the connection."""
        self._all_sent = True
        if self._closing:
            return False
        if self._now is not _NONE:
            self.refuse(refused(400, "The request ended before it was complete."))
        self.state = LINGER
        if self.exchange is None and not self._waiting:
            return False
        if self.exchange is not None and not self.exchange.probe():
            self._begin_status_line()
        return not self._is_reset()

    def _begin_status_line(self) -> None:
        """Send the first bytes of every answer now, and omit them later."""
        write = self.write

        def write_rest(data: bytes) -> None:
            assert data.startswith(wire.VERSION), data[:20]
            self.write = write
            write(data[len(wire.VERSION) :])

        write(wire.VERSION)
        self.write = write_rest

    def _is_reset(self) -> bool:
        """Return whether the kernel has closed the connection; without reading the loop does not notice."""
        if not hasattr(socket, "TCP_INFO"):
            return False
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return bool(info[0] == TCP_CLOSED)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing, self.state = True, LINGER
        self._forget_unanswered()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_left()
        self._others.discard(self)
        del self._parser  # it refers to this connection, which is thus freed at once

    def pause_writing(self) -> None:
        self.write_paused, self.write_paused_at = True, _monotonic()
        if self.exchange is not None:
            self.exchange.client_paused(True)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.exchange is None:
            self._advance()
        else:
            self.exchange.client_paused(False)

    # -- httptools ----------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._now = HttpRequest()
        self.state, self.since = HEAD, _monotonic()

    def on_url(self, url: bytes) -> None:
        self._now.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name, headers = name.lower(), self._now.headers
        if self.state == BODY:
            self._num_trailers += 1
            if self._num_trailers > self._context.limits.num_headers:
                raise http_request.too_many_headers(self._context.limits)
        elif name in headers:
            self._now.repeat(name, value, self._context.limits)
        else:
            headers[name] = value

    def on_headers_complete(self) -> None:
        limits, now = self._context.limits, self._now
        now.check_head(self._parser.get_http_version(), limits)
        if self._parser.should_upgrade():
            if now.path != RESPONSES or self._parser.get_method() != b"GET":
                raise refused(400, "Protocol upgrades are not supported here; send plain HTTP/1.1.")
            now.open_socket = self._open_socket
        self.state, self.since = BODY, _monotonic()
        self._framed_bytes = self._framed_at_body = self._num_trailers = 0
        length = now.headers.get(b"content-length")
        if now.path == FILES and self._parser.get_method() == b"POST":
            self._begin_upload(now, None if length is None else int(length))
        elif length is not None and int(length) > limits.max_body_bytes:
            raise http_request.body_too_large(limits)
        if b"expect" in now.headers and now.is_http11:
            if now.headers[b"expect"].lower() != b"100-continue":
                raise refused(417, "Only `Expect: 100-continue` is supported.")
            self._owes_continue = length not in (None, b"0") or b"transfer-encoding" in now.headers
            if self._owes_continue and self.exchange is None and not self._waiting:
                self._owes_continue = False
                self.write(wire.CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._framed_at_body = self._framed_bytes
        if self._upload is not None:
            self._feed(self._upload, len(body), body)
            return
        self._context.buffered_bytes += len(body)
        if not self._body:
            self._body = body
        else:
            if type(self._body) is bytes:
                self._body = bytearray(self._body)  # a list of small pieces would weigh many times their bytes
            self._body += body
        if self._body_bytes > self._context.limits.max_body_bytes:
            raise http_request.body_too_large(self._context.limits)
        if self._context.buffered_bytes > self._context.limits.buffered_bytes:
            message = "Too many request bodies are being held; try again."
            raise refused(503, message, "overloaded", retry_after_s=1.0)

    def on_message_complete(self) -> None:
        now = self._now
        now.upload, self._upload = self._upload, None
        now.body = bytes(self._body)
        self._body_bytes, self._body = 0, b""  # `now.body` counts until its request is over
        now.method = self._parser.get_method()
        now.keep_alive = now.is_http11 and self._parser.should_keep_alive()
        now.complete = _monotonic()
        now.complete_at = now.complete + CLOCK.offset_s
        now.request_id = tracing.request_id(now.headers.get(b"x-request-id"))
        self.state, self.since, self._head_bytes, self._owes_continue = IDLE, now.complete, 0, False
        self._waiting.append(now)
        self._now = _NONE

    def _open_socket(self, request: HttpRequest) -> None:
        """Leave the connection to a WebSocket. Raises ApiError for a wrong handshake."""
        opened = ResponsesSocket(self._context, self._take, self._others, request)
        self._closing, self.state = True, LINGER
        self._others.discard(self)
        opened.open(self.transport)

    def _begin_upload(self, now: HttpRequest, length: int | None) -> None:
        self._upload = upload = self._context.begin_upload(now, length)
        upload.pause = self._pause_upload

    def _feed(self, upload: Upload, num_bytes: int, body: bytes) -> None:
        """Take a part of a file; a slice within `body_s` is fast enough."""
        if self._body_bytes // UPLOAD_SLICE > (self._body_bytes - num_bytes) // UPLOAD_SLICE:
            self.since = _monotonic()
        upload.feed(body)

    def _pause_upload(self, paused: bool) -> None:
        self.since = _monotonic()
        if not self.transport.is_closing() and not self._all_sent and self._reads_paused != paused:
            self._reads_paused = paused
            (self.transport.pause_reading if paused else self.transport.resume_reading)()

    def _forget_unanswered(self) -> None:
        self._context.buffered_bytes -= sum(len(request.body) for request in self._waiting)
        for request in self._waiting:
            if request.upload is not None:
                request.upload.close()
        self._waiting.clear()
        self._forget_incomplete()

    def _forget_incomplete(self) -> None:
        if self._upload is not None:
            self._upload.close()
            self._upload, self._body_bytes = None, 0
        self._context.buffered_bytes -= self._body_bytes
        self._body_bytes = 0
        self._body = self._unread = b""

    # -- answers ------------------------------------------------------------------------------------------------

    def respond(
        self, request: HttpRequest, status: int, body: bytes, headers: bytes = wire.JSON_HEADERS, more: bytes = b""
    ) -> bool:
        keep_alive = request.keep_alive and not self._context.table.stage
        self.write(self._answer(request, status, body, headers, more, keep_alive=keep_alive))
        if self.exchange is None and not keep_alive:
            self._finish()
        return keep_alive

    def _answer(
        self, request: HttpRequest, status: int, body: bytes, headers: bytes, more: bytes, *, keep_alive: bool
    ) -> bytes:
        headers += (
            b"x-request-id: %b\r\n" % request.request_id.encode() + self._context.access.cors(request) + request.notes
        )
        head = wire.head(status, headers + more + wire.content_length(len(body)), keep_alive=keep_alive)
        return head if request.method == b"HEAD" else head + body

    def refuse(self, error: GlowplugError) -> None:
        """Refuse an incomplete request after all earlier answers, then close."""
        request, self._now = self._now if self._now is not _NONE else HttpRequest(), _NONE
        self._forget_incomplete()
        self.state, self.since = LINGER, _monotonic()
        if not request.request_id:
            request.request_id = tracing.request_id(request.headers.get(b"x-request-id"))
        self._context.report_refusal(request, error)
        body, more = api_errors.body(request.path, error), api_errors.retry_after(error) + api_errors.no_retry(error)
        answer = self._answer(request, error.status, body, wire.JSON_HEADERS, more, keep_alive=False)
        self._refusal = error.status, answer
        self._advance()

    def exchange_over(self, keep_alive: bool) -> None:
        self.exchange = None
        if not keep_alive or (
            self._context.table.stage >= PortStage.DRAINING and not self._waiting and self._refusal is None
        ):
            self._finish()
            return
        if self.state == IDLE:
            self.since = _monotonic()
        if self._waiting or self._unread or self.state != IDLE:
            self._advance()

    def _finish(self) -> None:
        """Close after the last answer. While the client may still send, read and drop for `linger_s` first: an instant
        close could cost it the answer."""
        if self._all_sent or (self.state == IDLE and not self._waiting and not self._unread):
            self.close()
            return
        self._closing, self.state = True, LINGER
        self._forget_unanswered()
        if self._reads_paused and not self.transport.is_closing():
            self._reads_paused = False
            self.transport.resume_reading()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        self._context.loop.call_later(self._context.limits.linger_s, self.close)

    def close(self) -> None:
        self._closing = True
        self.transport.close()

    def bound_buffer(self) -> None:
        self.transport.set_write_buffer_limits(high=self._context.write_buffer_bytes)

    # -- time ---------------------------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Time out slow clients; called about once a second."""
        limits = self._context.limits
        waited_s = now - self.since
        is_deaf = self.exchange is not None and (self._all_sent or self._reads_paused)
        is_stalled = self.write_paused and now - self.write_paused_at > limits.stall_s
        if is_stalled or self._leaves_answers_unread(now) or (is_deaf and self._is_reset()):
            self.transport.abort()
        elif self._reads_paused:
            return  # the rest of a request may have arrived unread
        elif self.state == HEAD and waited_s > limits.header_s:
            self.refuse(refused(408, f"The headers took longer than {limits.header_s:g} s.", "request_timeout"))
        elif self.state == BODY and waited_s > limits.body_s:
            self.refuse(refused(408, f"The body took longer than {limits.body_s:g} s.", "request_timeout"))
        elif self.state == IDLE and self.exchange is None and waited_s > limits.client_idle_s:
            self.close()

    def _leaves_answers_unread(self, now: float) -> bool:
        num_bytes = self.transport.get_write_buffer_size() if self.exchange is None else 0
        if not num_bytes or num_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_at = num_bytes, now
        return now - self._unsent_at > self._context.limits.stall_s

    def postpone(self, by_s: float) -> None:
        self.since += by_s
        self.write_paused_at += by_s
        self._unsent_at += by_s

    @property
    def is_idle(self) -> bool:
        return self.exchange is None and self.state == IDLE and not self._waiting and not self._unread
