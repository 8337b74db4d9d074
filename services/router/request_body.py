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


def read_body(path: bytes, body: bytes) -> tuple[str, bool]:
    """(model name, whether a stream is asked for). Raises BadRequest naming the field that is wrong."""
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
    return asked.model, bool(asked.stream)


def _wrong_field(text: str) -> BadRequest:
    """msgspec says "... - at `$.messages[0].role`" or "... missing required field `model`"."""
    what, _, where = text.partition(" - at `$")
    param = where.rstrip("`").lstrip(".") if where else what.partition("missing required field `")[2].rstrip("`")
    return BadRequest(f"{param}: {what}" if where else what, param=param or None)
