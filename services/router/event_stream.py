"""Server-sent events as bytes: where whole events end, and whether an answer has said that it is over."""

import re

from services.router.http_text import encode_json

EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_DONE = b"data: [DONE]"
_DONE_WITHIN = len(_DONE) + 4  # with the longest end of an event
_RESPONSE_OVER = re.compile(rb"^event: response\.(?:completed|incomplete|failed)\r?$", re.MULTILINE)
_MESSAGE_OVER = re.compile(rb"^event: message_stop\r?$", re.MULTILINE)
_OVER = {b"/v1/responses": _RESPONSE_OVER, b"/v1/messages": _MESSAGE_OVER}


def whole_events(body: bytes, most: int) -> int:
    """Length of the whole events `body` begins with. An event longer than `most` bytes is passed on in parts."""
    end = max(body.rfind(b"\n\n") + 2, body.rfind(b"\r\n\r\n") + 4)
    if end >= 4:
        return end
    return len(body) if len(body) > most else 0


def begins_late(first: bytes) -> bool:
    """Whether a message's stream begins behind its first event: llama.cpp leaves `message_start` out where an answer
    ends with its first token, and Anthropic's clients take such a stream for broken."""
    return first.startswith((b"event: content_block_start", b"event: message_delta"))


def message_start(message_id: str, model: str, prompt_tokens: int) -> bytes:
    """The event that an engine has left out."""
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
    return b"event: message_start\ndata: " + encode_json({"type": "message_start", "message": message}) + b"\n\n"


def is_over(path: bytes, last: bytes) -> bool:
    """Whether the whole events passed on last end the answer: `[DONE]`, or the event that closes a response or a
    message."""
    if not last.endswith(EVENT_ENDS):
        return False
    if last[-_DONE_WITHIN:].rstrip(b"\r\n").endswith(_DONE):
        return True
    end = _OVER.get(path)
    return end is not None and end.search(last) is not None
