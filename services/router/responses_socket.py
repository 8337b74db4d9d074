"""Responses over a WebSocket: one connection, on which each message `response.create` asks for a response.

Responses are answered one at a time, in order, each as the stream of POST /v1/responses with an event a frame. The
connection keeps its last response's conversation, so that the next message, by `previous_response_id`, adds to it; a
message that fails ends the conversation that it names. Nothing is kept beyond the connection.
https://developers.openai.com/api/docs/guides/websocket-mode
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec import Raw
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.server import ServerProtocol

from glowplug.domain.errors import BadRequest, EngineFailed, GlowplugError
from glowplug.engines import apis
from glowplug.runtime.clock import CLOCK
from glowplug.services.router import api_errors, http_request, tracing, wire
from glowplug.services.router.api_errors import ApiError, refused
from glowplug.services.router.continuation import events
from glowplug.services.router.ends import Answerer, ClientSink, Connection
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.wire import encode_json

CREATE: Final = "response.create"
_PATH: Final = apis.RESPONSES.encode()
_OF_HANDSHAKE: Final = frozenset(b"connection upgrade traceparent x-request-id content-type content-length".split())
_BEGIN: Final = (b"response.created", b"response.in_progress")
_END: Final = (b"response.completed", b"response.incomplete", b"response.failed")
_MESSAGES: Final = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
_PAUSE_PINGS: Final = 2  # unanswered, until the client counts as gone
PARSE_BYTES: Final = 16 * 1024  # per step, so that small frames do not hold up other connections
_monotonic = time.monotonic
T = TypeVar("T")
Take = Callable[[ClientSink, HttpRequest], bool]


# -- the conversation: bytes in, bytes out ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `body`: of POST /v1/responses; `items`: JSON of the conversation's items, with commas between."""

    body: bytes
    items: bytes
    previous_id: str | None
    generates: bool
    max_output_tokens: int | None

    def event(self, name: bytes, data: bytes) -> tuple[bytes, dict[str, Any] | None]:
        """Return the client's event, b"" for none, and the response, if this is its last event. A response that
        generates nothing has no output: one token is made of it, so that the engine has read its prompt."""
        is_last = name in _END
        if not (is_last or name in _BEGIN):
            return data if self.generates else b"", None
        event = msgspec.json.decode(data)
        response = event["response"] | {"previous_response_id": self.previous_id}
        if not self.generates:
            response["max_output_tokens"] = self.max_output_tokens
            if name == b"response.incomplete":
                event["type"] = "response.completed"
                at = response["created_at"]
                response |= {"status": "completed", "incomplete_details": None, "completed_at": at}
            response["output"] = []
        return encode_json(event | {"response": response}), response if is_last else None


class Conversation:
    """The last response's conversation, until a message fails that names it."""

    def __init__(self) -> None:
        self._response_id = ""
        self._items = b""

    @property
    def num_bytes(self) -> int:
        return len(self._items)

    def forget(self) -> None:
        self._response_id, self._items = "", b""

    def take(self, message: bytes) -> Turn:
        """Read a message. Raises GlowplugError."""
        fields = _fields(message)
        previous_id = _value(fields.pop("previous_response_id", None), str, "previous_response_id") or None
        try:
            return self._turn(fields, previous_id)
        except GlowplugError:
            self.failed(previous_id)
            raise

    def _turn(self, fields: dict[str, Raw], previous_id: str | None) -> Turn:
        kind = _value(fields.pop("type", None), str, "type")
        if kind != CREATE:
            raise BadRequest(f"type: expected `{CREATE}`.", param="type")
        if _value(fields.pop("stream_id", None), str, "stream_id"):
            text = "stream_id: a connection answers one response at a time; leave it out, or open another one."
            raise BadRequest(text, param="stream_id")
        generates = _value(fields.pop("generate", None), bool, "generate") is not False
        before = self._before(previous_id)
        items = b",".join(filter(None, (before, _items(fields.get("input")))))
        fields["stream"] = Raw(b"true")
        if before:
            fields["input"] = Raw(b"[" + items + b"]")
        max_output_tokens = None
        if not generates:
            max_output_tokens = _value(fields.get("max_output_tokens"), int, "max_output_tokens")
            fields["max_output_tokens"] = Raw(b"1")
        return Turn(encode_json(fields), items, previous_id, generates, max_output_tokens)

    def _before(self, previous_id: str | None) -> bytes:
        if previous_id is None:
            return b""
        if previous_id != self._response_id:
            text = (
                f"Previous response with id '{previous_id[:100]}' not found: a connection keeps its last response, "
                "until a message that continues it fails. Send the whole conversation as `input`."
            )
            kind, code = "invalid_request_error", "previous_response_not_found"
            raise ApiError(400, text, kind, code, "previous_response_id")
        return self._items

    def failed(self, previous_id: str | None) -> None:
        if previous_id == self._response_id:
            self.forget()

    def answered(self, turn: Turn, response: dict[str, Any]) -> None:
        """Keep a response, or forget what a failed one continued."""
        if response["status"] == "failed":
            self.failed(turn.previous_id)
            return
        output = encode_json(response["output"])[1:-1]
        self._response_id, self._items = response["id"], b",".join(filter(None, (turn.items, output)))


def _fields(message: bytes) -> dict[str, Raw]:
    try:
        return msgspec.json.decode(message, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The message is not a JSON object: {error}") from error


def _value(raw: Raw | None, kind: type[T], name: str) -> T | None:
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind | None)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{name}: {error}", param=name) from error


def _items(given: Raw | None) -> bytes:
    """Return the items of an `input`. A wrong one is left to the check of the body."""
    if given is None:
        return b""
    try:
        found = msgspec.json.decode(given, type=str | list[Raw] | None)
    except (msgspec.DecodeError, RecursionError):
        return bytes(given)
    if isinstance(found, str):
        return encode_json({"type": "message", "role": "user", "content": found})
    return b",".join(map(bytes, found or ()))


# -- the connection ---------------------------------------------------------------------------------------------------


class ResponsesSocket(asyncio.Protocol):
    """A client's connection after its handshake; `take` gets each message as a POST."""

    counts_all = False

    def __init__(self, context: PortContext[Any], take: Take, others: set[Connection], handshake: HttpRequest) -> None:
        self._context, self._take, self._others = context, take, others
        self.exchange: Answerer | None = None
        self.write_paused = False
        self._write_paused_at = 0.0
        self._headers = {
            name: value
            for name, value in handshake.headers.items()
            if name not in _OF_HANDSHAKE and not name.startswith(b"sec-websocket-")
        }
        self._protocol = ServerProtocol(max_size=context.limits.max_body_bytes)
        self._answer = self._shake_hands(handshake)
        self._conversation = Conversation()
        self._turn: Turn | None = None
        self._has_head = False
        self._unread = b""  # while too many messages wait, or the client does not read
        self._unfinished = bytearray()  # a message's frames so far
        self._num_unfinished = 0  # its bytes, with those of a frame's beginning
        self._unfinished_at = 0.0
        self._waiting: deque[bytes] = deque()
        self._num_held = 0  # bytes that count in the port's
        self._heard_at = _monotonic()
        self._num_pings = 0
        self._reads_paused = self._advancing = self._resume_due = self._closing = False

    def _shake_hands(self, handshake: HttpRequest) -> bytes:
        """Return the answer to the handshake. Raises ApiError."""
        lines = b"".join(b"%b: %b\r\n" % header for header in handshake.headers.items())
        self._protocol.receive_data(b"GET %b HTTP/1.1\r\n%b\r\n" % (_PATH, lines))
        (asked,) = self._protocol.events_received() or (None,)
        if not isinstance(asked, Request):
            raise refused(400, "The WebSocket's handshake cannot be read.")
        answer = self._protocol.accept(asked)
        if answer.status_code != 101:
            raise refused(400, bytes(answer.body or b"").decode().strip().partition("\n")[0])
        self._protocol.send_response(answer)
        return b"".join(self._protocol.data_to_send())

    def open(self, transport: asyncio.Transport) -> None:
        """Take the connection over from HTTP."""
        self.transport = transport
        self._write = wire.writer(transport)
        transport.set_protocol(self)
        self._others.add(self)
        self._write(self._answer)

    # -- asyncio ------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._heard_at, self._num_pings = _monotonic(), 0
        self._unread += data
        self._advance()

    def _feed(self, data: bytes) -> int:
        """Take a part of what came. Returns how many frames it completed."""
        if not self._num_unfinished:
            self._unfinished_at = self._heard_at
        self._num_unfinished += len(data)
        self._protocol.receive_data(data)
        frames = self._protocol.events_received()
        for frame in frames:
            self._take_frame(cast(Frame, frame))
        self._hold()
        self._flush()
        return len(frames)

    def _take_frame(self, frame: Frame) -> None:
        if frame.opcode in _MESSAGES:
            self._unfinished += frame.data
            if frame.fin:
                self._waiting.append(bytes(self._unfinished))
                self._unfinished = bytearray()
        self._num_unfinished = len(self._unfinished)

    def _hold(self) -> None:
        """Count what this connection holds. The conversation goes first when the port holds too much."""
        self._count()
        if self._context.buffered_bytes > self._context.limits.buffered_bytes:
            self._conversation.forget()
            self._count()
        if self._context.buffered_bytes > self._context.limits.buffered_bytes and self._num_held:
            self._fail(CloseCode.TRY_AGAIN_LATER, "Too many request bodies are being held; try again.")

    def _count(self) -> None:
        num_bytes = len(self._unread) + self._num_unfinished + self._conversation.num_bytes
        num_bytes += sum(map(len, self._waiting))
        self._context.buffered_bytes += num_bytes - self._num_held
        self._num_held = num_bytes

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._write(data)
            elif not self.transport.is_closing():  # nothing follows: the client closes now
                self.transport.write_eof()
        if self._protocol.close_expected() and not self._closing:
            self._end()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._forget()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_left()
        self._others.discard(self)

    def _forget(self) -> None:
        self._waiting.clear()
        self._unread, self._unfinished, self._num_unfinished = b"", bytearray(), 0
        self._conversation.forget()
        self._count()

    def pause_writing(self) -> None:
        self.write_paused, self._write_paused_at = True, _monotonic()
        self._pause_reads()
        if self.exchange is not None:
            self.exchange.client_paused(True)

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.exchange is not None:
            self.exchange.client_paused(False)
        self._advance()

    # -- messages -----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Take the next messages; after `num_pipelined` frames other connections get a turn. Reentrant calls return at
        once."""
        if self._advancing:
            return
        self._advancing = True
        left = self._context.limits.num_pipelined
        try:
            while left > 0 and not (self.write_paused or self._closing):
                if self._waiting and self.exchange is None:
                    left -= 1
                    self._begin(self._waiting.popleft())
                elif self._unread and not self._is_full:
                    part, self._unread = self._unread[:PARSE_BYTES], self._unread[PARSE_BYTES:]
                    left -= self._feed(part)
                else:
                    break
        finally:
            self._advancing = False
        if self._closing:
            return
        self._hold()
        self._pause_reads()
        if left <= 0 and not self._resume_due:
            self._resume_due = True
            self._context.loop.call_soon(self._resume)
        if self._context.table.stage and self.is_idle:
            self.close()

    def _resume(self) -> None:
        self._resume_due = False
        self._advance()

    @property
    def _is_full(self) -> bool:
        return len(self._waiting) >= self._context.limits.num_pipelined

    def _pause_reads(self) -> None:
        """Read on unless too many messages wait, or the client itself does not read."""
        pauses = self.write_paused or bool(self._unread)
        if pauses != self._reads_paused and not self.transport.is_closing():
            self._reads_paused = pauses
            (self.transport.pause_reading if pauses else self.transport.resume_reading)()

    def _begin(self, message: bytes) -> None:
        request = HttpRequest(method=b"POST", target=_PATH, path=_PATH, headers=dict(self._headers), is_http11=False)
        request.headers[b"content-type"] = b"application/json"
        request.complete = _monotonic()
        request.complete_at = request.complete + CLOCK.offset_s
        request.request_id = tracing.request_id(None)
        self._turn, self._has_head = None, False
        try:
            turn = self._turn = self._conversation.take(message)
            if len(turn.body) > self._context.limits.max_body_bytes:
                raise http_request.body_too_large(self._context.limits)
        except GlowplugError as error:
            self._context.metrics.refused(error.status)
            self._context.report_refusal(request, error)
            self.respond(request, error.status, api_errors.body(_PATH, error))
            return
        request.body = turn.body
        self._context.buffered_bytes += len(request.body)
        if not self._take(self, request):
            self._context.buffered_bytes -= len(request.body)

    # -- answers: a sink for the exchange of each message ---------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Take a part of an answer as of HTTP/1.0: its head, then whole events."""
        if not self._has_head:
            self._has_head, data = True, data.partition(b"\r\n\r\n")[2]
        if data.startswith(b":") and not self._closing:
            self._protocol.send_ping(b"")
        for name, event in events(data):
            self._pass_on(name, event)
        self._flush()

    def _pass_on(self, name: bytes, data: bytes) -> None:
        if self._turn is None:  # its last event has been sent
            return
        out, response = self._turn.event(name, data)
        if out and not self._closing:
            self._protocol.send_text(out)
        if response is not None:
            self._conversation.answered(self._turn, response)
            self._turn = None

    def respond(
        self, request: HttpRequest, status: int, body: bytes, headers: bytes = wire.JSON_HEADERS, more: bytes = b""
    ) -> bool:
        """Send an error's event, which is a response's last one."""
        if self._turn is not None:
            self._conversation.failed(self._turn.previous_id)
            self._turn = None
        event: dict[str, Any] = {"type": "error", "status": status, **msgspec.json.decode(body)}
        if more:
            lines = (line.partition(b": ") for line in more.split(b"\r\n") if line)
            event["headers"] = {name.decode(): value.decode() for name, _, value in lines}
        if not self._closing:
            self._protocol.send_text(encode_json(event))
            self._flush()
        return True

    def exchange_over(self, keep_alive: bool) -> None:
        self.exchange = None
        if self._turn is not None:
            failed = EngineFailed("The engine's answer is not a stream.")
            self.respond(HttpRequest(), failed.status, api_errors.body(_PATH, failed))
        self._hold()
        self._advance()

    # -- its end ------------------------------------------------------------------------------------------------

    def _fail(self, code: CloseCode, reason: str) -> None:
        self._protocol.fail(code, reason)
        self._flush()

    def close(self) -> None:
        """Close after everything sent so far."""
        if not self._closing:
            self._protocol.send_close(CloseCode.GOING_AWAY)
            self._flush()
        self.transport.close()

    def _end(self) -> None:
        """Both sides have said that they close, or this one: let the client read that, then close."""
        self._closing = True
        self._forget()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_left()
        self._context.loop.call_later(self._context.limits.linger_s, self.transport.close)

    def bound_buffer(self) -> None:
        self.transport.set_write_buffer_limits(high=self._context.write_buffer_bytes)

    def sweep(self, now: float) -> None:
        """End slow messages, and clients that are gone or do not read."""
        limits = self._context.limits
        if self.write_paused and now - self._write_paused_at > limits.stall_s:
            self.transport.abort()
        elif self._closing or self._reads_paused:
            return  # the rest of a message may have arrived unread
        elif self._num_unfinished and now - self._unfinished_at > limits.body_s:
            self._fail(CloseCode.POLICY_VIOLATION, f"The message took longer than {limits.body_s:g} s.")
        elif now - self._heard_at > limits.client_idle_s * (self._num_pings + 1):
            if self._num_pings == _PAUSE_PINGS:
                self.transport.abort()
                return
            self._num_pings += 1
            self._protocol.send_ping(b"")
            self._flush()

    def postpone(self, by_s: float) -> None:
        self._heard_at += by_s
        self._unfinished_at += by_s
        self._write_paused_at += by_s

    @property
    def is_idle(self) -> bool:
        return self.exchange is None and not (self._waiting or self._unread or self._num_unfinished)
