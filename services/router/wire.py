"""Answers on the wire: HTTP/1.1 output, an undelayed writer, and cheap reads of engines' answers without parsing."""

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus

import msgspec

from glowplug.domain.instance import Phase
from glowplug.telemetry.semconv import HEADER_EMULATED

_REASONS = {s.value: s.phrase for s in HTTPStatus} | {499: "Client Closed Request"}
VERSION = b"HTTP/1.1 "
_STATUS_LINES: dict[int, bytes] = {code: VERSION + f"{code} {phrase}\r\n".encode() for code, phrase in _REASONS.items()}
CONTINUE = VERSION + b"100 Continue\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
LAST_CHUNK = b"0\r\n\r\n"
EVENT_STREAM_HEADERS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
JSON_HEADERS = b"content-type: application/json\r\n"
_EMULATED = HEADER_EMULATED.encode()
encode_json = msgspec.json.Encoder().encode
Write = Callable[[bytes], None]


def chunk(data: bytes) -> bytes:
    """Frame `data`, not empty, as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@lru_cache
def instance_headers(instance_id: str, emulated: bool) -> bytes:
    name = b"x-glowplug-instance: %b\r\n" % instance_id.encode()
    return name + b"%b: 1\r\n" % _EMULATED if emulated else name


def server_timing(queue_s: float, phases: Sequence[Phase], router_s: float) -> bytes:
    """Return Server-Timing's value: milliseconds in the queue, in an awaited start's phases, and in the router."""
    started = b"".join([f"{p.name};dur={p.actual_s * 1000:.1f}, ".encode() for p in phases]) if phases else b""
    return b"queue;dur=%.1f, %brouter;dur=%.2f" % (queue_s * 1000, started, router_s * 1000)


def head(code: int, headers: bytes, *, keep_alive: bool) -> bytes:
    """Return status line and headers; `headers` includes the framing's."""
    status_line = _STATUS_LINES.get(code) or b"%b%d Unknown\r\n" % (VERSION, code)
    return status_line + headers + (b"\r\n" if keep_alive else b"connection: close\r\n\r\n")


def content_length(num_bytes: int) -> bytes:
    return b"content-length: %d\r\n" % num_bytes


def writer(transport: asyncio.Transport) -> Write:
    """Return a function that sends bytes at once, after buffered ones, and drops them once the transport is closing.

    uvloop keeps every write until the end of a loop iteration, which costs one more iteration (and its system calls)
    per chunk. This function hands bytes to the kernel, and only the rest to the transport.
    """
    fd = int(transport.get_extra_info("socket").fileno())  # valid while the transport is not closing
    num_buffered, is_closing, send = transport.get_write_buffer_size, transport.is_closing, os.write

    def write(data: bytes) -> None:
        if is_closing():
            return
        if not num_buffered():
            try:
                sent = send(fd, data)
            except OSError:  # EAGAIN, or broken: the transport's own write finds out
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)

    return write


# -- server-sent events ------------------------------------------------------------------------------------------------

MESSAGES = b"/v1/messages"  # and below: Anthropic's API
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
DONE_ENDS = (b"[DONE]\n\n", b"[DONE]\r\n\r\n")  # of a stream; within a text a quote follows
first_error = re.compile(rb'(?:event: error\r?\ndata: |data: (?=\{"error")|error: )(\{[^\r\n]*\})').match
_PINGS = re.compile(rb"(?::[^\r\n]*(?:\r?\n){2})+")
_DONE = b"data: [DONE]"
_DONE_WITHIN = len(_DONE) + 4
_MESSAGE_OVER = re.compile(rb"^event: message_stop\r?$", re.MULTILINE)


def whole_events(body: bytes, most: int) -> int:
    """Return the length of the whole events in `body`; beyond `most` bytes an event counts as whole."""
    end = max(body.rfind(b"\n\n") + 2, body.rfind(b"\r\n\r\n") + 4)
    if end >= 4:
        return end
    return len(body) if len(body) > most else 0


def is_anthropic(path: bytes) -> bool:
    return path.startswith(MESSAGES) and path[len(MESSAGES) : len(MESSAGES) + 1] in (b"", b"/")


def after_pings(first: bytes) -> tuple[bytes, bytes]:
    """Divide the beginning of a stream: whole comments, and what follows them."""
    end = found.end() if (found := _PINGS.match(first)) is not None else 0
    return first[:end], first[end:]


def starts_stream(first: bytes) -> bytes:
    """Return the error at the beginning of a stream, or b""."""
    found = first_error(first)
    return found[1] if found else b""


def begins_late(first: bytes) -> bool:
    """Return whether `message_start` is missing: llama.cpp omits it where an answer ends with its first token, and
    Anthropic's clients take such a stream for broken."""
    return first.startswith((b"event: content_block_start", b"event: message_delta"))


def with_message_id(first: bytes) -> bytes:
    """Replace llama.cpp's chat id by one in Anthropic's form."""
    is_one = first.startswith((b'{"id":"chatcmpl-', b"event: message_start"))
    return first.replace(b'"id":"chatcmpl-', b'"id":"msg_', 1) if is_one else first


def message_start(message_id: str, model: str, prompt_tokens: int) -> bytes:
    message: dict[str, object] = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": max(1, prompt_tokens), "output_tokens": 0},
    }
    return named_event({"type": "message_start", "message": message})


def named_event(event: Mapping[str, object]) -> bytes:
    """Messages and responses name events by `type`."""
    return b"event: %b\ndata: %b\n\n" % (str(event["type"]).encode(), encode_json(event))


def is_over(path: bytes, last: bytes) -> bool:
    """Return whether the last whole events end the stream."""
    if not last.endswith(EVENT_ENDS):
        return False
    if last[-_DONE_WITHIN:].rstrip(b"\r\n").endswith(_DONE):
        return True
    return path == MESSAGES and _MESSAGE_OVER.search(last) is not None


_EVENT = re.compile(rb".+?(?:\r?\n\r?\n|\Z)", re.DOTALL)
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')


def before_failure(body: bytes) -> tuple[bytes, str]:
    """Return (events before an engine's failure, its message or ""). Failures are errors from 500 on, and vLLM's finish
    reason "abort" when it sleeps or shuts down."""
    if b'"abort"' in body or b'data: {"error"' in body:
        for event in _EVENT.finditer(body):
            if why := _failure(event[0]):
                return body[: event.start()], why
    return body, ""


def _failure(event: bytes) -> str:
    found = event.partition(b"data: ")[2]
    if not found.startswith(b'{"error"'):
        return "the engine stopped its answers" if _ABORTED.search(found) and b'"choices"' in found else ""
    try:
        error = msgspec.json.decode(found.strip())["error"]
    except msgspec.DecodeError:
        return ""
    code = error.get("code") if isinstance(error, dict) else None
    if not isinstance(code, int) or code < 500:
        return ""
    return f"the engine failed: {str(error.get('message', ''))[:200]}"


_CHATS = (b"/v1/chat/completions", b"/v1/completions")


def asking_for_ids(path: bytes, body: bytes) -> bytes:
    if path not in _CHATS or b'"return_token_ids"' in body:
        return body
    return body.rstrip()[:-1] + b',"return_token_ids":true}'


# -- token counts -----------------------------------------------------------------------------------------------------

_USAGE = (
    re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)'),
    re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)'),
)
_TIMINGS = (re.compile(rb'"prompt_n"\s*:\s*(\d+)'), re.compile(rb'"predicted_n"\s*:\s*(\d+)'))
# Anthropic's usage excludes prompt tokens read from and written to a cache.
_BESIDE = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d+)')
_CACHED = re.compile(rb'"cache_n"\s*:\s*(\d+)')  # prompt tokens that llama.cpp did not read again
_ANY_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens|cache_n)"\s*:\s*(\d+)')
TAIL_BYTES = 4096


def count_tokens(tail: bytes, num_events: int) -> tuple[int, int, bool]:
    """Return (prompt tokens, response tokens, exact) from an answer's last bytes, and the first ones of a stream that
    counts its prompt there: by `usage`, else llama.cpp's `timings`, else one token per SSE event, which is not exact.
    The last count wins."""
    if b'"usage"' in tail and (found := _find(_USAGE, tail)):
        prompt, response = found
        return prompt + _beside(tail), response, True
    if b'"timings"' in tail and (found := _find(_TIMINGS, tail)):
        prompt, response = found
        cached = _CACHED.search(tail)
        return prompt + (int(cached[1]) if cached else 0), response, True
    return 0, num_events, False


def cached_tokens(tail: bytes) -> int:
    """Return the engine's cached prompt tokens, by the last count of OpenAI's, Anthropic's or llama.cpp's field; -1
    without one."""
    found = _ANY_CACHED.findall(tail)
    return int(found[-1]) if found else -1


def _beside(tail: bytes) -> int:
    """A stream may report these tokens twice, at its beginning and end."""
    if b'_input_tokens"' not in tail:
        return 0
    last = {match[0].partition(b":")[0]: int(match[1]) for match in _BESIDE.finditer(tail)}
    return sum(last.values())


def _find(patterns: tuple[re.Pattern[bytes], re.Pattern[bytes]], tail: bytes) -> tuple[int, int] | None:
    prompt, response = (pattern.findall(tail) for pattern in patterns)
    if not prompt and not response:
        return None
    return int(prompt[-1]) if prompt else 0, int(response[-1]) if response else 0
