"""The sender of batches' lines: through this router's intake, as their callers' requests in the batch class."""

import asyncio
import time
from dataclasses import replace
from typing import Any, Final, Protocol

from glowplug.domain.access import Priority
from glowplug.runtime.clock import now_s
from glowplug.services.router import api_errors, tracing, wire
from glowplug.services.router.api_errors import ApiError
from glowplug.services.router.batches.lines import LineAnswer, queue_s
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.intake import Intake
from glowplug.services.router.keys import Caller, KeyRing
from glowplug.services.router.port_context import PortContext

MAX_CALLERS: Final = 1024
_JSON: Final = {b"content-type": b"application/json"}


class LineSender(Protocol):
    """A sender of one line. Cancelling the call takes the request back from its engine."""

    async def send(self, tenant: str, key_id: str, endpoint: str, body: bytes) -> LineAnswer: ...


class IntakeSender:
    def __init__(self, intake: Intake, context: PortContext[Any], keys: KeyRing) -> None:
        self._intake, self._context, self._keys = intake, context, keys
        self._callers: dict[tuple[str, str], tuple[int, Caller]] = {}  # with the ring's number of changes

    async def send(self, tenant: str, key_id: str, endpoint: str, body: bytes) -> LineAnswer:
        path, loop = endpoint.encode(), self._context.loop
        request = HttpRequest(
            method=b"POST",
            target=path,
            path=path,
            body=body,
            headers=dict(_JSON),
            is_http11=False,  # avoids chunk framing
            complete=time.monotonic(),
            complete_at=now_s(),
            request_id=tracing.request_id(None),
        )
        try:
            request.caller = self._caller(tenant, key_id)
        except ApiError as error:
            return LineAnswer(error.status, api_errors.body(path, error), request.request_id)
        client = _LineClient(loop)
        self._context.buffered_bytes += len(body)
        if not self._intake.ask(client, request):
            self._context.buffered_bytes -= len(request.body)
        try:
            return await client.answer
        except asyncio.CancelledError:
            if client.exchange is not None:
                client.exchange.client_left()
            raise

    def _caller(self, tenant: str, key_id: str) -> Caller:
        """Return a line's caller. Raises ApiError for a key without the data port."""
        keys = self._keys
        num_changes, caller = self._callers.get((tenant, key_id), (-1, keys.shared))
        if num_changes != keys.num_changes or caller.ends_at <= time.time():
            if len(self._callers) > MAX_CALLERS:
                self._callers.clear()
            caller = replace(keys.caller_of(tenant, key_id), priority=Priority.BATCH)
            self._callers[tenant, key_id] = keys.num_changes, caller
        return caller


class _LineClient:
    """The client of one line, which collects the exchange's answer."""

    counts_all = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.exchange: Any = None
        self.write_paused = False
        self.answer: asyncio.Future[LineAnswer] = loop.create_future()
        self._parts: list[bytes] = []
        self.write = self._parts.append

    def respond(
        self, request: HttpRequest, status: int, body: bytes, headers: bytes = wire.JSON_HEADERS, more: bytes = b""
    ) -> bool:
        self._parts.clear()
        self._end(status, body, headers + more + request.notes, request.request_id)
        return False

    def exchange_over(self, keep_alive: bool) -> None:
        exchange, self.exchange = self.exchange, None
        if self.answer.done():
            return
        head, _, body = b"".join(self._parts).partition(b"\r\n\r\n")
        fields = _headers(head)
        length, status = fields.get(b"content-length"), _status(head)
        is_short = length is not None and len(body) < int(length)
        ending = getattr(exchange, "ending", None)  # of a translated answer its client knows
        if not status or is_short or (ending is not None and ending.error_code):
            error = ApiError(502, "The engine was lost in mid-answer.", "server_error", "engine_failed")
            status, body = error.status, api_errors.body(b"", error)
        self._end(status, body, head, fields.get(b"x-request-id", b"").decode("latin-1"))

    def _end(self, status: int, body: bytes, head: bytes, request_id: str) -> None:
        fields = _headers(head)
        after = fields.get(b"retry-after", b"")
        answer = LineAnswer(
            status,
            body,
            request_id,
            retry_after_s=float(after) if after.isdigit() else None,
            may_retry=fields.get(b"x-should-retry") != b"false",
            held_s=queue_s(head),
        )
        if not self.answer.done():
            self.answer.set_result(answer)


def _status(head: bytes) -> int:
    words = head.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


def _headers(head: bytes) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in head.split(b"\r\n"))
    return {name.lower(): value.strip() for name, _, value in pairs}
