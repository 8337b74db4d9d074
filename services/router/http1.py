"""HTTP/1.1 on the wire: the bytes of answers that the router writes itself, and a way to write bytes at once."""

import asyncio
import os
from collections.abc import Callable, Sequence
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
Write = Callable[[bytes], None]


def status_line(code: int) -> bytes:
    return _STATUS_LINES.get(code) or b"%b%d Unknown\r\n" % (VERSION, code)


def chunk(data: bytes) -> bytes:
    """`data` (not empty) as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def server_timing(queue_s: float, phases: Sequence[Phase], router_s: float) -> bytes:
    """Server-Timing: milliseconds in the queue, of each phase of the start it waited for, and in the router."""
    started = b"".join([f"{p.name};dur={p.actual_s * 1000:.1f}, ".encode() for p in phases]) if phases else b""
    return b"queue;dur=%.1f, %brouter;dur=%.2f" % (queue_s * 1000, started, router_s * 1000)


def head(code: int, headers: bytes, *, length: int | None, keep_alive: bool) -> bytes:
    """Status line and headers; `length` None means chunked."""
    framing = CHUNKED if length is None else b"content-length: %d\r\n" % length
    return status_line(code) + headers + framing + (b"" if keep_alive else CLOSE) + b"\r\n"


def writer(transport: asyncio.Transport) -> Write:
    """A function that sends bytes in order after what is buffered; nothing once the transport is closing. A broken
    connection is left to the transport to notice.

    uvloop keeps every write until the end of a loop iteration, which costs one more iteration (and its system calls)
    for each chunk of a stream. Here what the kernel takes is gone when the call returns; only the rest goes to the
    transport's own buffer, with its limits and its pause_writing.
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
