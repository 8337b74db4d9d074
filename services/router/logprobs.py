"""Log-probabilities without alternatives. Pure.

Where no alternatives are asked for, llama.cpp gives 20 for each token of a chat, and for a zero no log-probabilities at
all: so it is asked for one, which is left out of the answer.
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
    return bool(asked.logprobs == 0)


def more(asked: Any) -> dict[str, msgspec.Raw]:
    """Return the engine's fields."""
    return {"top_logprobs" if isinstance(asked, ChatAsked) else "logprobs": _ONE}


def translate(body: bytes, asked: Any) -> "tuple[bytes, WithoutAlternatives]":
    fields = decode(body, type=dict[str, msgspec.Raw])
    return encode_json(fields | more(asked)), WithoutAlternatives(bool(asked.stream))


def leave_out(answer: dict[str, Any]) -> None:
    """Take the alternatives off an answer or an event."""
    for choice in answer.get("choices") or ():
        for token in (choice.get("logprobs") or {}).get("content") or ():
            token["top_logprobs"] = []


class WithoutAlternatives(SameApi):
    def events(self, data: bytes) -> bytes:
        return b"".join(self._event(event) for _, event in events(data))

    def _event(self, event: bytes) -> bytes:
        if event == DONE:
            return DONE_EVENT
        found = decode(event)
        if isinstance(found, dict):
            leave_out(found)
        return b"data: " + encode_json(found) + b"\n\n"

    def end(self) -> bytes:
        return b""

    def whole(self, answer: bytes) -> bytes:
        found = decode(answer)
        leave_out(found)
        return encode_json(found)
