"""Server-sent events as bytes: where whole events end, and whether an answer has said that it is over."""

import re

from services.router import http_text

EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_DONE = b"data: [DONE]"
_DONE_WITHIN = len(_DONE) + 4  # with the longest end of an event
_RESPONSE_OVER = re.compile(rb"^event: response\.(?:completed|incomplete|failed)\r?$", re.MULTILINE)
_RESPONSES = b"/v1/responses"


def whole_events(body: bytes, most: int) -> int:
    """Length of the whole events `body` begins with. An event longer than `most` bytes is passed on in parts."""
    end = max(body.rfind(b"\n\n") + 2, body.rfind(b"\r\n\r\n") + 4)
    if end >= 4:
        return end
    return len(body) if len(body) > most else 0


def is_over(path: bytes, last: bytes) -> bool:
    """Whether the whole events passed on last end the answer: `[DONE]`, or the event that closes a response."""
    if not last.endswith(EVENT_ENDS):
        return False
    if last[-_DONE_WITHIN:].rstrip(b"\r\n").endswith(_DONE):
        return True
    return path == _RESPONSES and _RESPONSE_OVER.search(last) is not None


def as_error(body: bytes) -> bytes:
    """An engine's error body for use inside a stream; wrapped when it is no error object on one line."""
    if b'"error"' in body and b"\n" not in body.strip():
        return body.strip()
    return http_text.error_json(body.decode("utf-8", "replace")[:2000], "server_error", "engine_error")
