"""Log-probabilities in OpenAI's forms, from llama.cpp's. Pure.

Where no alternatives are asked for, llama.cpp gives 20 for each token of a chat, and for a zero no log-probabilities at
all: so it is asked for one, which is left out of the answer. A completion's have a chat's form.
"""

from typing import Any

import msgspec

from glowplug.services.router.continuation import DONE, DONE_EVENT, decode, events
from glowplug.services.router.request_shapes import ChatAsked
from glowplug.services.router.translated import SameApi
from glowplug.services.router.wire import encode_json

_ONE = msgspec.Raw(b"1")


def can(asked: Any) -> bool:
    if isinstance(asked, ChatAsked):
        return bool(asked.logprobs) and not asked.top_logprobs
    return asked.logprobs is not None


def more(asked: Any) -> dict[str, msgspec.Raw]:
    """Return the engine's fields."""
    if isinstance(asked, ChatAsked):
        return {"top_logprobs": _ONE}
    return {} if asked.logprobs else {"logprobs": _ONE}


class Form:
    """The form of one request's log-probabilities, for which `can` is true."""

    def __init__(self, asked: Any) -> None:
        self._is_chat = isinstance(asked, ChatAsked)
        self._has_alternatives = not self._is_chat and bool(asked.logprobs)
        self._offsets: dict[int, int] = {}  # characters so far, by the choice's index

    def give(self, answer: dict[str, Any]) -> None:
        """Write the form into an answer or an event."""
        for choice in answer.get("choices") or ():
            tokens = (choice.get("logprobs") or {}).get("content") or ()
            if not self._has_alternatives:
                for token in tokens:
                    token["top_logprobs"] = []
            if tokens and not self._is_chat:
                choice["logprobs"] = self._of_completion(choice.get("index", 0), tokens)

    def _of_completion(self, index: int, tokens: list[dict[str, Any]]) -> dict[str, list[Any]]:
        offsets, at = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token["token"])
        self._offsets[index] = at
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {one["token"]: one["logprob"] for one in (*token["top_logprobs"], token)} for token in tokens
            ],
            "text_offset": offsets,
        }


def translate(body: bytes, asked: Any) -> "tuple[bytes, Formed]":
    fields = decode(body, type=dict[str, msgspec.Raw])
    return encode_json(fields | more(asked)), Formed(bool(asked.stream), Form(asked))


class Formed(SameApi):
    def __init__(self, streams: bool, form: Form) -> None:
        super().__init__(streams)
        self._form = form

    def events(self, data: bytes) -> bytes:
        return b"".join(self._event(event) for _, event in events(data))

    def _event(self, event: bytes) -> bytes:
        if event == DONE:
            return DONE_EVENT
        found = decode(event)
        if isinstance(found, dict):
            self._form.give(found)
        return b"data: " + encode_json(found) + b"\n\n"

    def end(self) -> bytes:
        return b""

    def whole(self, answer: bytes) -> bytes:
        found = decode(answer)
        self._form.give(found)
        return encode_json(found)
