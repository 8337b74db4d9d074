"""A small HTTP/1.1 server on asyncio and httptools. Tasks end with their client."""

import asyncio
import json
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import parse_qs, unquote

import httptools

MAX_BODY_BYTES = 32 << 20  # activations of a large step
MAX_PIPELINED = 16
EMULATED_HEADER = "x-glowplug-emulated: 1"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Payload Too Large", 503: "Service Unavailable"}


@dataclass(slots=True)
class HttpRequest:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes = b""


class Reply:
    def __init__(self, connection: "Connection", keep_alive: bool) -> None:
        self._connection = connection
        self._keep_alive = keep_alive
        self.headers: dict[str, str] = {}
        self.started = False

    def send(self, status: int, body: bytes | dict[str, Any] | str, content_type: str = "application/json") -> None:
        if isinstance(body, dict):
            body = json.dumps(body).encode()
        raw = body.encode() if isinstance(body, str) else body
        self._head(status, content_type, f"content-length: {len(raw)}", raw)
        self.finish()

    def start(self, content_type: str) -> None:
        self._head(200, content_type, "transfer-encoding: chunked", b"")

    async def chunk(self, data: bytes) -> None:
        """Waits for a slow reader."""
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self._connection.writable.wait()

    def end(self) -> None:
        self._connection.write(b"0\r\n\r\n")
        self.finish()

    def finish(self) -> None:
        if not self._keep_alive:
            self._connection.close()

    def _head(self, status: int, content_type: str, length: str, body: bytes) -> None:
        self.started = True
        reason = _REASONS.get(status, "Status")
        lines = [f"HTTP/1.1 {status} {reason}", f"content-type: {content_type}", length, EMULATED_HEADER]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines.append("connection: keep-alive" if self._keep_alive else "connection: close")
        self._connection.write("\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body)


Handler = Callable[[HttpRequest, Reply], Awaitable[None]]


class Connection(asyncio.Protocol):
    """Reading continues during an answer, so that a disconnect is noticed."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[tuple[HttpRequest, bool]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.writable = asyncio.Event()
        self.writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.writable.set()
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "upgrades are not supported")
        except httptools.HttpParserError as error:
            self._refuse(400, f"not HTTP: {error}")

    def on_message_begin(self) -> None:
        self._target, self._headers, self._body = b"", dict[str, str](), bytearray()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > MAX_BODY_BYTES:
            self._refuse(413, f"the body is larger than {MAX_BODY_BYTES} bytes")

    def on_message_complete(self) -> None:
        path, _, query = self._target.decode("latin-1").partition("?")
        request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=unquote(path),
            query=parse_qs(query, keep_blank_values=True),
            headers=self._headers,
            body=bytes(self._body),
        )
        self._requests.append((request, self._parser.should_keep_alive()))
        if len(self._requests) > MAX_PIPELINED:
            self._refuse(400, f"more than {MAX_PIPELINED} requests at once on one connection")
        elif self._task is None:
            self._task = asyncio.ensure_future(self._answer_all())

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def _answer_all(self) -> None:
        while self._requests:
            request, keep_alive = self._requests.popleft()
            reply = Reply(self, keep_alive)
            try:
                await self._handler(request, reply)
            except asyncio.CancelledError:
                self.close()
                raise
            except Exception:  # noqa: BLE001 - one request must not end the engine
                traceback.print_exc(file=sys.stderr)
                if reply.started:
                    self.close()  # broken, not short, for the client
                else:
                    reply.send(500, {"error": {"message": "internal error", "type": "server_error", "code": None}})
        self._task = None

    def _refuse(self, status: int, message: str) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        Reply(self, keep_alive=False).send(status, {"error": error})
