"""What the router must know of a request body, and the wrong types it refuses before waking a model for them.

Only the fields named here are looked at; the body itself goes to the engine byte for byte.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from glowplug.domain.errors import BadRequest

Text = str | list[msgspec.Raw]


class Message(msgspec.Struct):
    role: str
    content: str | list[msgspec.Raw] | None = None


class _Asked(msgspec.Struct):
    model: str
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None


class ChatAsked(_Asked, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None


class CompletionAsked(_Asked, kw_only=True):
    prompt: Text


class EmbeddingAsked(msgspec.Struct):
    model: str
    input: Text
    stream: bool | None = None


class ResponseAsked(msgspec.Struct):
    model: str
    input: Text = ""
    stream: bool | None = None


class Asked(msgspec.Struct):
    """The common part of every kind of request."""

    model: str
    stream: bool | None = None


def _reader(shape: type[Any]) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(shape).decode


READERS: dict[bytes, Callable[[bytes], Any]] = {
    b"/v1/chat/completions": _reader(ChatAsked),
    b"/v1/completions": _reader(CompletionAsked),
    b"/v1/embeddings": _reader(EmbeddingAsked),
    b"/v1/responses": _reader(ResponseAsked),
}
OPERATIONS = {
    b"/v1/chat/completions": "chat",
    b"/v1/completions": "text_completion",
    b"/v1/embeddings": "embeddings",
    b"/v1/responses": "chat",
}


CHARS_PER_TOKEN = 4
_TEXT, _TEXT_WITHIN = b"text", 40  # a part of a message that is text says so in its first bytes


def read_body(path: bytes, body: bytes) -> Any:
    """What is asked: `model`, `stream` and what its kind of request has. Raises BadRequest naming the wrong field."""
    try:
        asked = READERS[path](body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body cannot be read: {error}") from error
    if not asked.model:
        raise BadRequest("`model` is empty.", param="model")
    return asked


def sizes(asked: Any) -> tuple[int, int]:
    """(prompt tokens, most response tokens; 0 for no limit), without a tokenizer: a token is four characters. Images
    and sounds within messages count nothing."""
    if isinstance(asked, ChatAsked):
        num_chars = sum(len(m.content) if isinstance(m.content, str) else _chars(m.content) for m in asked.messages)
        most = asked.max_completion_tokens or asked.max_tokens
    elif isinstance(asked, CompletionAsked):
        num_chars, most = _chars_of_text(asked.prompt), asked.max_tokens
    else:
        num_chars, most = _chars_of_text(asked.input), 1 if isinstance(asked, EmbeddingAsked) else 0
    return num_chars // CHARS_PER_TOKEN, max(most or 0, 0)


def _chars(parts: list[msgspec.Raw] | None) -> int:
    views = [memoryview(part) for part in parts or ()]
    return sum(view.nbytes for view in views if _TEXT in bytes(view[:_TEXT_WITHIN]))


def _chars_of_text(text: Text) -> int:
    """Of a list: strings, or token ids, each of which is one token."""
    if isinstance(text, str):
        return len(text)
    return sum(max(memoryview(one).nbytes, CHARS_PER_TOKEN) for one in text)


def _wrong_field(text: str) -> BadRequest:
    """msgspec says "... - at `$.messages[0].role`" or "... missing required field `model`"."""
    what, _, where = text.partition(" - at `$")
    param = where.rstrip("`").lstrip(".") if where else what.partition("missing required field `")[2].rstrip("`")
    return BadRequest(f"{param}: {what}" if where else what, param=param or None)
