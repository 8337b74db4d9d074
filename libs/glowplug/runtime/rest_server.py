"""The HTTP server of REST ports: uvicorn, with the data port's bounds on all that comes before a key."""

import asyncio
import resource
from typing import Any, Final

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from glowplug.domain.errors import BadRequest, GlowplugError, NoCapacity
from glowplug.runtime.rest import error_body

HEAD_BYTES: Final = 32 * 1024  # request line and headers
LINGER_S: Final = 1.0  # what a refused client still sends is read and dropped, or it would not see the answer
HEAD_S: Final = 10.0  # from a connection's start, or a later request's first byte, to the last header
MAX_CONNECTIONS: Final = min(512, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class HeadTooLarge(BadRequest):
    status, code = 431, "headers_too_large"


class HeadTooLate(BadRequest):
    status, code = 408, "request_timeout"


class BoundedHttp(HttpToolsProtocol):
    """Refuses heads that are too large or too late, and connections beyond MAX_CONNECTIONS."""

    _head_bytes: int | None = 0  # received of a head; None within a body
    _late: asyncio.TimerHandle | None = None
    _is_refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(NoCapacity("too many connections"))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_late()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and self._head_bytes is not None and not self._is_refused:
            self._expect_head()
            # No more of a head than its bound reaches the parser, which copies all of an unfinished header again.
            part, data = data[: HEAD_BYTES - self._head_bytes + 1], data[HEAD_BYTES - self._head_bytes + 1 :]
            self._head_bytes += len(part)
            super().data_received(part)
            if self._head_bytes is not None and self._head_bytes > HEAD_BYTES:
                self._refuse(HeadTooLarge(f"the request line and headers are larger than {HEAD_BYTES} bytes"))
        if data and not self._is_refused:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        self._cancel_late()
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def _expect_head(self) -> None:
        if self._late is None:
            error = HeadTooLate(f"the headers have not arrived within {HEAD_S:g} s")
            self._late = self.loop.call_later(HEAD_S, self._refuse, error)

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, error: GlowplugError) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._cancel_late()
        body = msgspec.json.encode(error_body(error.message, error.type, error.code))
        head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.write_eof()
        self._late = self.loop.call_later(LINGER_S, self.transport.close)


class RestServer(uvicorn.Server):
    """uvicorn that wakes once a second, for its date header, instead of ten times. Nothing sets `should_exit`: services
    cancel it."""

    @classmethod
    def of(cls, app: Any) -> "RestServer":
        settings: Any = {"log_config": None, "access_log": False, "lifespan": "off", "timeout_graceful_shutdown": 2}
        server = cls(uvicorn.Config(app, http=BoundedHttp, ws="none", **settings))
        server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        return server

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(1.0)
