"""What stands in an exchange's place on a client's connection while the router answers a call of its own that waits."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from glowplug.domain.errors import GlowplugError
from glowplug.services.router import api_errors, wire
from glowplug.services.router.ends import ClientSink
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.port_context import PortContext

log = logging.getLogger(__name__)
OCTETS = b"content-type: application/octet-stream\r\n"


class Answering:
    """One call. `work` returns what is answered as JSON, or (length, pieces) of a file; its GlowplugError is answered
    as an error."""

    def __init__(self, client: ClientSink, request: HttpRequest, context: PortContext[Any]) -> None:
        self._client, self._request, self._context = client, request, context
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._has_left = self._has_begun = False
        client.exchange = self

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run the call beside the connection."""
        self._task = self._context.loop.create_task(self._run(work), name="a call about files or batches")

    async def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        keep_alive = False
        try:
            made = await work
            if isinstance(made, tuple):
                await self._write_file(*made)
                keep_alive = self._request.keep_alive and not self._context.table.stage
            else:
                keep_alive = self._respond(200, wire.encode_json(made))
        except GlowplugError as error:
            keep_alive = self._refuse(error)
        except Exception:
            log.exception("a call about files or batches failed; it gets a 500")
            keep_alive = self._refuse(api_errors.FAILED)
        finally:
            self._context.buffered_bytes -= len(self._request.body)
            if not self._has_left:
                self._client.exchange_over(keep_alive)

    def _refuse(self, error: GlowplugError) -> bool:
        if self._has_begun:
            return False
        self._context.metrics.refused(error.status)
        self._context.report_refusal(self._request, error)
        body = api_errors.body(self._request.path, error)
        more = api_errors.no_retry(error) + api_errors.retry_after(error)
        return self._respond(error.status, body, more)

    def _respond(self, status: int, body: bytes, more: bytes = b"") -> bool:
        return not self._has_left and self._client.respond(self._request, status, body, wire.JSON_HEADERS, more)

    async def _write_file(self, num_bytes: int, pieces: AsyncIterator[bytes]) -> None:
        request = self._request
        headers = OCTETS + b"x-request-id: %b\r\n" % request.request_id.encode() + self._context.access.cors(request)
        keep_alive = request.keep_alive and not self._context.table.stage
        head = wire.head(200, headers + wire.content_length(num_bytes), keep_alive=keep_alive)
        async for piece in pieces:
            await self._may_write.wait()
            if self._has_left:
                return
            self._client.write(piece if self._has_begun else head + piece)
            self._has_begun = True
        if not self._has_begun:
            self._client.write(head)

    # What the connection calls on its exchange.

    def client_left(self) -> None:
        """Go on without a client: what the call changes is changed as a whole."""
        self._has_left = True
        self._may_write.set()

    def client_paused(self, paused: bool) -> None:
        """Wait while the client reads too slowly."""
        (self._may_write.clear if paused else self._may_write.set)()

    def probe(self) -> bool:
        """Return whether the answer has begun."""
        return self._has_begun
