"""The client of a translated request, which translates its exchange's answer back.

The exchange writes to a TranslatedClient as to a connection. That separates head and body again, and frames the
translated body as the client's request demands.
"""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from glowplug.domain.errors import EngineFailed
from glowplug.services.router import api_errors, wire
from glowplug.services.router.ends import ClientSink
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.port_context import PortContext

_OWN_FRAMING = (b"content-type", b"content-length", b"transfer-encoding", b"connection", b"cache-control")
_BODY_HEADERS = (b"content-type", b"content-length", b"accept", b"accept-encoding")


class Translation(Protocol):
    """The translation of one answer. `streams`: the client gets a stream, else one piece, whatever the engine gives."""

    streams: bool
    headers: bytes
    counts: tuple[int, int] | None  # tokens of prompt and answer, where the exchange would miscount
    counts_all: bool  # it sums several sequences; the exchange would read one
    nothing: bytes  # harmless bytes between events, to keep a connection alive

    def began(self, queue_s: float) -> None:
        """Note the answer's beginning, after `queue_s` in the queue."""
        ...

    def events(self, events: bytes) -> bytes:
        """Translate whole SSE events; b"": nothing to send yet."""
        ...

    def end(self) -> bytes:
        """Return the end of the client's stream, or the answer if only the engine streamed."""
        ...

    def whole(self, answer: bytes) -> bytes:
        """Translate an unstreamed answer."""
        ...

    def error(self, error: bytes) -> bytes: ...

    def error_event(self, error: bytes) -> bytes: ...


class SameApi:
    """The common part of translations within OpenAI's API."""

    nothing = b":\n\n"
    counts: tuple[int, int] | None = None
    counts_all = False

    def __init__(self, streams: bool) -> None:
        self.streams = streams
        self.headers = wire.EVENT_STREAM_HEADERS if streams else wire.JSON_HEADERS

    def began(self, queue_s: float) -> None:
        """OpenAI's API does not report the time in the queue."""

    def error(self, error: bytes) -> bytes:
        return error

    def error_event(self, error: bytes) -> bytes:
        return api_errors.event(b"", error)


def inner_request(request: HttpRequest, path: bytes, body: bytes) -> HttpRequest:
    """Return the exchange's request, as HTTP/1.0 so that the answer comes without chunk framing."""
    headers = {name: value for name, value in request.headers.items() if name not in _BODY_HEADERS}
    headers[b"content-type"] = b"application/json"
    first = request.first_path or request.path
    return replace(request, path=path, target=path, body=body, headers=headers, is_http11=False, first_path=first)


class TranslatedClient:
    """A client's connection, as seen by its exchange."""

    def __init__(
        self, client: ClientSink, request: HttpRequest, translation: Translation, context: PortContext[Any]
    ) -> None:
        self._client, self._request, self._translation, self._context = client, request, translation, context
        self.counts_all = translation.counts_all
        self._exchange: Any = None
        self._unread: bytes | None = b""  # the head so far; None once it is read
        self._status = 0
        self._own_headers = b""
        self._is_sse = False
        self._parts: list[bytes] = []
        self._event = b""
        self._error = b""
        self._has_begun = False
        self._is_answered = False
        self._keep_alive = request.keep_alive
        self.at_end: Callable[[], None] | None = None  # called at any end of the request
        self.renaming: Callable[[bytes], bytes] | None = None  # of the engine's output (intake.py)
        self.write: wire.Write = self._write

    @property
    def exchange(self) -> Any:
        return self._exchange

    @exchange.setter
    def exchange(self, exchange: Any) -> None:
        self._exchange, self._client.exchange = exchange, self

    # The exchange of the client's connection, or of another translation.

    @property
    def queue_s(self) -> float:
        return float(self._exchange.queue_s)

    @property
    def ending(self) -> Any:
        return self._exchange.ending

    def client_left(self) -> None:
        self._exchange.client_left()
        self._over()

    def client_paused(self, paused: bool) -> None:
        self._exchange.client_paused(paused)

    def probe(self) -> bool:
        """Write harmless bytes if the client has the head. Returns whether it has."""
        if self._has_begun and not self.write_paused:
            self._stream(self._translation.nothing)
        return self._has_begun

    # The exchange's ClientSink.

    @property
    def write_paused(self) -> bool:
        return self._client.write_paused

    @write_paused.setter
    def write_paused(self, paused: bool) -> None:
        self._client.write_paused = paused

    def respond(
        self, request: HttpRequest, status: int, body: bytes, headers: bytes = wire.JSON_HEADERS, more: bytes = b""
    ) -> bool:
        """Send the router's own answer, always an error here. Returns whether the connection stays open."""
        self._is_answered = True
        self._request.notes = request.notes
        self._keep_alive = self._client.respond(self._request, status, self._translation.error(body), headers, more)
        return self._keep_alive

    def _write(self, data: bytes) -> None:
        if self._unread is not None:
            self._unread += data
            head, found, data = self._unread.partition(b"\r\n\r\n")
            if not found:
                return
            self._unread = None
            self._read_head(head)
            self._translation.began(self._exchange.queue_s)
        if not data:
            return
        if not self._is_sse:
            self._parts.append(data)
            return
        self._event += data
        end = wire.whole_events(self._event, self._context.limits.event_bytes)
        events, self._event = self._renamed(self._event[:end]), self._event[end:]
        if b'data: {"error"' in events:
            before, _, found = events.partition(b'data: {"error"')
            events, self._error = before, b'{"error"' + found.partition(b"\n")[0]
        is_comment = events.startswith(b":") and b"data:" not in events
        out = self._translation.nothing if is_comment else self._translation.events(events) if events else b""
        if (counts := self._translation.counts) is not None:
            answer = self._exchange.answer
            known = answer.counted[3] if answer.counted is not None else -1
            answer.counted = (*counts, True, wire.cached_tokens(events) if b"cache" in events else known)
            self._exchange.note_counts()
        if self._translation.streams:
            self._stream(out)

    def _renamed(self, said: bytes) -> bytes:
        return said if self.renaming is None else self.renaming(said)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        self._status = int(first.split(b" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-type":
                self._is_sse = value.strip().startswith(b"text/event-stream")
            if name.lower() not in _OWN_FRAMING:
                self._own_headers += line + b"\r\n"

    def _stream(self, out: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = self._translation.headers + self._own_headers
            is_framed = self._request.is_http11
            self._keep_alive = self._request.keep_alive and is_framed and not self._context.table.stage
            headers += wire.CHUNKED if is_framed else b""
            self._client.write(wire.head(200, headers, keep_alive=self._keep_alive))
        if out:
            self._client.write(wire.chunk(out) if self._request.is_http11 else out)

    def exchange_over(self, keep_alive: bool) -> None:
        if not self._is_answered:
            self._end()
        self._over()
        self._client.exchange_over(self._keep_alive)

    def _over(self) -> None:
        if self.at_end is not None:
            self.at_end()
            self.at_end = None

    def _end(self) -> None:
        ending, translation = self._exchange.ending, self._translation
        failed = self._error
        if ending.error_code and not failed:
            failed = api_errors.body(b"", EngineFailed("The engine was lost before its answer was complete."))
        if translation.streams and self._is_sse:
            out = translation.error_event(failed) if failed else translation.end()
            self._stream(out)
            if self._request.is_http11:
                self._client.write(wire.LAST_CHUNK)
            return
        if not failed:
            try:
                body = translation.end() if self._is_sse else translation.whole(self._renamed(b"".join(self._parts)))
                self._answer(self._status, body)
                return
            except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError, AttributeError) as error:
                said = f"The engine's answer does not match its API: {type(error).__name__}."
                failed = api_errors.body(b"", EngineFailed(said))
        status = ending.status if ending.status >= 400 else EngineFailed("").status
        self.respond(self._request, status, failed)

    def _answer(self, status: int, body: bytes) -> None:
        self._keep_alive = self._request.keep_alive and not self._context.table.stage
        headers = self._translation.headers + self._own_headers + wire.content_length(len(body))
        self._client.write(wire.head(status, headers, keep_alive=self._keep_alive) + body)
