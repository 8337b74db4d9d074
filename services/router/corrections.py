"""Answers of the client's own path, corrected in what engines say otherwise than their API. Pure."""

from typing import Any

import msgspec

from glowplug.services.router import api_errors, messages_as_chat
from glowplug.services.router.continuation import decode
from glowplug.services.router.translated import SameApi
from glowplug.services.router.wire import encode_json, is_anthropic

# Some engines put the base's name into an adapter's answer. The pattern includes a JSON value's quotes, which are
# escaped within an answer's text.


class Renaming:
    """A replacement of the base's name by the adapter's in an engine's output, before any translation."""

    def __init__(self, base: str, name: str) -> None:
        self._base, self._name = (b'"model":' + encode_json(one) for one in (base, name))

    def __call__(self, said: bytes) -> bytes:
        return said.replace(self._base, self._name)


class AsItIs(SameApi):
    """The unchanged answer to a request of `path`, for use with a Renaming."""

    def __init__(self, path: bytes, *, streams: bool) -> None:
        super().__init__(streams)
        self._path, self._has_error = path, False

    def events(self, events: bytes) -> bytes:
        self._has_error = self._has_error or b"event: error\n" in events
        return events

    def end(self) -> bytes:
        return b""

    def whole(self, answer: bytes) -> bytes:
        return answer

    def error(self, error: bytes) -> bytes:
        is_other = is_anthropic(self._path) and error.startswith(b'{"error"')
        return messages_as_chat.anthropic_error(error) if is_other else error

    def error_event(self, error: bytes) -> bytes:
        return b"" if self._has_error else api_errors.event(self._path, self.error(error))


# Engines and chat templates read a call's arguments as an object, and would fail in every later turn where a model once
# wrote something else.


def with_sound_calls(asked: Any, body: bytes) -> list[Any] | None:
    """Return the body's messages, with no arguments for calls whose arguments are no JSON object; None if all are."""
    calls = [call.function for turn in asked.messages for call in turn.tool_calls or () if hasattr(call, "function")]
    if all(_is_object(call.arguments) for call in calls):
        return None
    given: list[Any] = decode(body)["messages"]
    for turn in given:
        for call in turn.get("tool_calls") or ():
            if (function := call.get("function")) and not _is_object(function["arguments"]):
                function["arguments"] = "{}"
    return given


def _is_object(text: str) -> bool:
    try:
        return isinstance(decode(text.encode()), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


# llama.cpp repeats the beginning of an answer that a last message of the assistant gives, unless it streams, and takes
# an empty one for a part of the template. It ends a message's turn where it has met a stop sequence.

_TURN_ENDS = b'"stop_reason":"end_turn","stop_sequence":"'
_STOPPED = b'"stop_reason":"stop_sequence","stop_sequence":"'


def beginning(asked: Any) -> str | None:
    """Return the beginning of the answer that the last message gives; None without one."""
    last = asked.messages[-1]
    if last.role != "assistant" or getattr(last, "tool_calls", None):
        return None
    if isinstance(last.content, str):
        return last.content
    parts = last.content or ()
    return "".join(part.text for part in parts) if all(part.type == "text" and part.text for part in parts) else None


def with_beginning(asked: Any, given: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the body's messages `given`, of which the last has this text, or is left out without one; `asked` too."""
    if text or len(given) == 1:
        asked.messages[-1].content = text
        return [*given[:-1], given[-1] | {"content": text}]
    del asked.messages[-1]
    return given[:-1]


class Corrected(AsItIs):
    """The answer of llama.cpp to a request of `path`. `begun`: its beginning, which the client has."""

    def __init__(self, path: bytes, *, streams: bool, begun: str) -> None:
        super().__init__(path, streams=streams)
        self._begun = begun

    def events(self, events: bytes) -> bytes:
        return super().events(events).replace(_TURN_ENDS, _STOPPED)

    def whole(self, answer: bytes) -> bytes:
        found = decode(answer)
        if isinstance(found.get("content"), list):
            for block in found["content"]:
                if block["type"] == "text":
                    block["text"] = block["text"].removeprefix(self._begun)
                    break
            if found["stop_reason"] == "end_turn" and found["stop_sequence"] is not None:
                found["stop_reason"] = "stop_sequence"
        for choice in found.get("choices") or ():
            if content := choice["message"].get("content"):
                choice["message"]["content"] = content.removeprefix(self._begun)
        return encode_json(found)
