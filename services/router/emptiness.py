"""Empty requests and malformed texts, refused in the wording of the client's API, since engines would invent an
answer."""

import re
from typing import Any

from glowplug.domain.errors import BadRequest
from glowplug.services.router import request_shapes as shapes

# Half of a UTF-16 surrogate pair without the other, as an escape or as bytes. The second alternative skips other
# escapes, so that an escaped backslash before a `u` is not taken for one.
_ESCAPES = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_AS_BYTES = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


class EmptyArray(BadRequest):
    """A list is empty (400)."""

    code = "empty_array"


class MissingParameter(BadRequest):
    """A required parameter is missing (400)."""

    code = "missing_required_parameter"


def check_chat(asked: shapes.ChatAsked) -> None:
    """Check that every message has content; an assistant's may call tools instead. Raises BadRequest."""
    if not asked.messages:
        raise _empty_array("messages")
    for i, message in enumerate(asked.messages):
        content = message.content
        if content:
            continue
        param = f"messages[{i}].content"
        if content is None:
            if message.role != "assistant":
                text = f"Invalid value for '{param}': expected a string or an array of parts, got null."
                raise BadRequest(text, param=param)
        elif isinstance(content, list) and message.role != "assistant":
            raise _empty_array(param)


def check_texts(param: str, texts: shapes.Text, *, may_be_empty: bool = False) -> None:
    """Check that a text, or a list of texts or token ids, is not empty. Raises BadRequest."""
    if texts == []:
        raise _empty_array(param)
    for i, one in enumerate(texts if isinstance(texts, list) else [texts]):
        where = f"{param}[{i}]" if isinstance(texts, list) else param
        if one == []:
            raise _empty_array(where)
        if one == "" and not may_be_empty:
            raise BadRequest(f"Invalid '{where}': input cannot be an empty string.", param=where)


def check_turns(asked: shapes.CountAsked) -> None:
    """Check Anthropic's rule: only a last message of the assistant's may be empty. Raises BadRequest."""
    for i, turn in enumerate(asked.messages):
        if not turn.content and not (turn.role == "assistant" and i == len(asked.messages) - 1):
            rule = "all messages must have non-empty content except for the optional final assistant message"
            text = f"messages.{i}: {rule}"
            raise BadRequest(text, param=f"messages[{i}].content")


def check_response(asked: shapes.ResponseAsked) -> None:
    """Check that a response has an input or a conversation to continue. Raises BadRequest."""
    if not asked.input and not (asked.previous_response_id or asked.conversation):
        text = "One of 'input', 'previous_response_id' or 'conversation' must be provided."
        raise MissingParameter(text, param="input")


def lone_surrogate(body: bytes) -> str:
    """The error message for a lone surrogate in an unreadable body, with its position; "" where there is none."""
    if (found := _AS_BYTES.search(body)) is not None:
        half = found[0].decode("utf-8", "surrogatepass")
        return _half(f"U+{ord(half):04X}", found.start())
    high: Any = None  # the escape before, where it is the first half of a pair
    for found in _ESCAPES.finditer(body):
        unit = int(found[1], 16) if found[1] else 0
        is_second = 0xDC00 <= unit <= 0xDFFF
        if high is not None and not (is_second and high.end() == found.start()):
            return _half(high[0].decode(), high.start())
        if high is None and is_second:
            return _half(found[0].decode(), found.start())
        high = found if 0xD800 <= unit <= 0xDBFF else None
    return _half(high[0].decode(), high.start()) if high is not None else ""


def _half(shown: str, at: int) -> str:
    return (
        f"The body is not valid JSON: `{shown}` at byte {at} is a surrogate without its other half, and no character."
    )


def _empty_array(param: str) -> EmptyArray:
    text = f"Invalid '{param}': empty array. Expected an array with minimum length 1, but got an empty array instead."
    return EmptyArray(text, param=param)
