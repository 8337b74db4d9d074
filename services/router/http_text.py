"""Bytes of HTTP/1.1 answers the router writes itself: heads, JSON, chunks."""

from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from glowplug.domain.instance import Phase

_REASONS = {s.value: s.phrase for s in HTTPStatus} | {499: "Client Closed Request"}
VERSION = b"HTTP/1.1 "  # what every answer begins with
_STATUS_LINES: dict[int, bytes] = {code: VERSION + f"{code} {phrase}\r\n".encode() for code, phrase in _REASONS.items()}
CONTINUE = VERSION + b"100 Continue\r\n\r\n"
CLOSE = b"connection: close\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"
LAST_CHUNK = b"0\r\n\r\n"
EVENT_STREAM_HEADERS = b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
JSON_HEADERS = b"content-type: application/json\r\n"
encode_json = msgspec.json.Encoder().encode


def status_line(code: int) -> bytes:
    return _STATUS_LINES.get(code) or b"%b%d Unknown\r\n" % (VERSION, code)


def chunk(data: bytes) -> bytes:
    """`data` (not empty) as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def server_timing(queue_s: float, phases: Sequence[Phase], router_s: float) -> bytes:
    """Server-Timing: milliseconds in the queue, of each phase of the start it waited for, and in the router."""
    parts = [b"queue;dur=%.1f" % (queue_s * 1000)]
    parts += [f"{p.name};dur={p.actual_s * 1000:.1f}".encode() for p in phases]
    parts.append(b"router;dur=%.2f" % (router_s * 1000))
    return b", ".join(parts)


def head(code: int, headers: bytes, *, length: int | None, keep_alive: bool) -> bytes:
    """Status line and headers; `length` None means chunked."""
    framing = CHUNKED if length is None else b"content-length: %d\r\n" % length
    return status_line(code) + headers + framing + (b"" if keep_alive else CLOSE) + b"\r\n"
