"""Estimates of an answer's length from its request's texts; only that number leaves the router.

Texts are read before sending if routing chooses an instance by the number. Else they are read afterwards: in a model's
first `TEACH_FIRST` requests and one in `TEACH_EVERY` later ones, at most `TEACH_AT_ONCE` between two load reports, to
learn from true lengths, and in load reports, for the look-ahead.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

from glowplug.controllers.router.messages import TextRead
from glowplug.policies.prediction.length_text import Turn
from glowplug.services.router import request_shapes as shapes

NUM_TURNS = 64  # last turns read, besides the first
TEACH_FIRST: Final = 32
TEACH_EVERY: Final = 16
TEACH_AT_ONCE: Final = 8
LATE_AT_ONCE: Final = 16  # per report, so that no stream waits for long
ASSISTANT = "assistant"
log = logging.getLogger(__name__)


class Lengths(Protocol):
    """An estimator of answers' lengths."""

    def of(self, turns: Sequence[Turn]) -> Any: ...


def open_lengths(setting: str) -> Lengths | None:
    """Open a length model: "" for Glowplug's own, or a path. Returns None for `none` or without numpy. Raises
    BadRequest for an unreadable file."""
    if setting == "none":
        return None
    try:
        from glowplug.policies.prediction.length_model import SHIPPED, LengthModel
        from glowplug.policies.prediction.length_native import NativeLengths
    except ImportError as error:
        log.info("the router does not estimate the length of answers from prompts: %s", error)
        return None
    model = LengthModel.read(Path(setting) if setting else SHIPPED)
    try:
        return NativeLengths(model)
    except OSError as error:
        log.info("the router reads prompts in pure Python, which is slower: %s", error)
        return model


class UnreadRequest(Protocol):
    """`unread`: the body's fields while its text is unread."""

    ticket: int
    unread: Any


class StimulusSink(Protocol):
    def take(self, stimulus: Any) -> None: ...


class TextReader:
    def __init__(self, lengths: Lengths, table: StimulusSink) -> None:
        self._lengths, self._table = lengths, table
        self._num_unread: Counter[str] = Counter()
        self._left = TEACH_AT_ONCE

    def before(self, asked: Any) -> int:
        return text_tokens(asked, self._lengths)

    def later(self, request: UnreadRequest, asked: Any, model_key: str) -> None:
        """Read the text now to learn from it, or keep it for `late`."""
        num = self._num_unread[model_key] = self._num_unread[model_key] + 1
        if num > TEACH_FIRST:
            if num % TEACH_EVERY or not self._left:
                request.unread = asked
                return
            self._left -= 1
        self._tell(request, asked, teaches=True)

    def late(self, running: Iterable[UnreadRequest]) -> None:
        """Read some running requests' unread texts, the oldest first, before a load report."""
        self._left = TEACH_AT_ONCE
        for request in list(islice((one for one in running if one.unread is not None), LATE_AT_ONCE)):
            asked, request.unread = request.unread, None
            self._tell(request, asked, teaches=False)

    def _tell(self, request: UnreadRequest, asked: Any, *, teaches: bool) -> None:
        if tokens := text_tokens(asked, self._lengths):
            self._table.take(TextRead(request.ticket, tokens, teaches))


def text_tokens(asked: Any, lengths: Lengths) -> int:
    """Estimate the answer's tokens; 0 without text or for several prompts."""
    turns = turns_of(asked)
    return int(lengths.of(turns).tokens) if turns else 0


def turns_of(asked: Any) -> list[Turn]:
    """Return the conversation, oldest turn first; empty where the answer is not text."""
    if isinstance(asked, shapes.ChatAsked):
        return [Turn(text_of(m.content), m.role == ASSISTANT) for m in _ends(asked.messages)]
    if isinstance(asked, shapes.MessagesAsked):
        said = [Turn(text_of(m.content), m.role == ASSISTANT) for m in _ends(asked.messages)]
        return [Turn(text_of(asked.system)), *said] if asked.system else said
    if isinstance(asked, shapes.CompletionAsked) and isinstance(asked.prompt, str):
        return [Turn(asked.prompt)]
    return []


def _ends(messages: Sequence[Any]) -> Sequence[Any]:
    return messages if len(messages) <= NUM_TURNS else [messages[0], *messages[-NUM_TURNS:]]


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(piece.text for piece in content or () if piece.text)
