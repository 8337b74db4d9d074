"""Answers of engines as bytes, unparsed: where whole events of a stream end, whether an answer has said that it is
over, and the token counts that stand at its end."""

import re

from services.router.http1 import encode_json

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


# -- token counts -----------------------------------------------------------------------------------------------------

_USAGE = (
    re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)'),
    re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)'),
)
_TIMINGS = (re.compile(rb'"prompt_n"\s*:\s*(\d+)'), re.compile(rb'"predicted_n"\s*:\s*(\d+)'))
# Of Anthropic's usage, which counts what was read from a cache and written to one apart from the rest of the prompt.
_BESIDE = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d+)')
_CACHED = re.compile(rb'"cache_n"\s*:\s*(\d+)')  # prompt tokens llama.cpp did not have to read again
TAIL_BYTES = 4096


def count_tokens(tail: bytes, num_events: int) -> tuple[int, int, bool]:
    """(prompt tokens, response tokens, exact) from the last bytes of an answer (and the first of a stream whose prompt
    is counted there): its `usage`, else llama.cpp's `timings`; when it has neither, one token per SSE event, which is
    not exact. What is said last counts."""
    if b'"usage"' in tail and (found := _find(_USAGE, tail)):
        return found[0] + _beside(tail), found[1], True
    if b'"timings"' in tail and (found := _find(_TIMINGS, tail)):
        cached = _CACHED.search(tail)
        return found[0] + (int(cached[1]) if cached else 0), found[1], True
    return 0, num_events, False


def _beside(tail: bytes) -> int:
    """Prompt tokens that Anthropic's usage counts apart. It may be said twice, at the beginning and at the end."""
    if b'_input_tokens"' not in tail:
        return 0
    last = {match[0].partition(b":")[0]: int(match[1]) for match in _BESIDE.finditer(tail)}
    return sum(last.values())


def _find(patterns: tuple[re.Pattern[bytes], re.Pattern[bytes]], tail: bytes) -> tuple[int, int] | None:
    prompt, response = (pattern.findall(tail) for pattern in patterns)
    if not prompt and not response:
        return None
    return int(prompt[-1]) if prompt else 0, int(response[-1]) if response else 0
