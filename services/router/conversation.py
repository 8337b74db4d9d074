"""Estimates of the length of an answer from the texts of its request; only that number leaves the router.

Texts are read only where the number is used. If the routing policy chooses an instance by it, before the request is
sent. If the model has only one instance, after that: for the model's first `TEACH_FIRST` requests and then one in
`TEACH_EVERY`, so that the estimates learn from the true lengths; and for requests still running when loads are
reported, for the look-ahead.
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

NUM_TURNS = 64  # last turns of a long conversation that are read, besides its first
TEACH_FIRST: Final = 32
TEACH_EVERY: Final = 16
LATE_AT_ONCE: Final = 16  # texts read for one report, so that no stream waits for long
ASSISTANT = "assistant"
log = logging.getLogger(__name__)


class Lengths(Protocol):
    """A model that estimates from texts how long their answers will be."""

    def of(self, turns: Sequence[Turn]) -> Any: ...


def open_lengths(setting: str) -> Lengths | None:
    """Open the length model that the setting names: "" for the file that comes with Glowplug, a path, or `none`.
    Returns None for `none`, and, with a line in the log, where numpy is not installed. Raises BadRequest for a file
    that cannot be read."""
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


class Unread(Protocol):
    """A request that was sent on, as the reader sees it. `unread`: the fields of its body while its text is unread."""

    ticket: int
    unread: Any


class Notified(Protocol):
    """The request table, as the reader uses it."""

    def take(self, stimulus: Any) -> None: ...


class TextReader:
    """A reader of requests' texts, which reads each text at most once."""

    def __init__(self, lengths: Lengths, table: Notified) -> None:
        self._lengths, self._table = lengths, table
        self._num_unread: Counter[str] = Counter()  # by model_key

    def before(self, asked: Any) -> int:
        """Estimate the answer's tokens for a request about to arrive, whose instance may depend on them."""
        return text_tokens(asked, self._lengths)

    def later(self, request: Unread, asked: Any, model_key: str) -> None:
        """Take a request that arrived with its text unread: read it now to learn from it, or keep it for `late`."""
        num = self._num_unread[model_key] = self._num_unread[model_key] + 1
        if num > TEACH_FIRST and num % TEACH_EVERY:
            request.unread = asked
        else:
            self._tell(request, asked, teaches=True)

    def late(self, running: Iterable[Unread]) -> None:
        """Read the texts of some running requests that are still unread, the oldest first."""
        for request in list(islice((one for one in running if one.unread is not None), LATE_AT_ONCE)):
            asked, request.unread = request.unread, None
            self._tell(request, asked, teaches=False)

    def _tell(self, request: Unread, asked: Any, *, teaches: bool) -> None:
        if tokens := text_tokens(asked, self._lengths):
            self._table.take(TextRead(request.ticket, tokens, teaches))


def text_tokens(asked: Any, lengths: Lengths) -> int:
    """Estimate the answer's tokens from a request's texts; 0 for a request without text or with several prompts."""
    turns = turns_of(asked)
    return int(lengths.of(turns).tokens) if turns else 0


def turns_of(asked: Any) -> list[Turn]:
    """The conversation in a request, oldest turn first; empty for a request whose answer is no text."""
    if isinstance(asked, shapes.ChatAsked):
        return [Turn(text_of(m.content), m.role == ASSISTANT) for m in _ends(asked.messages)]
    if isinstance(asked, shapes.MessagesAsked):
        said = [Turn(text_of(m.content), m.role == ASSISTANT) for m in _ends(asked.messages)]
        return [Turn(text_of(asked.system)), *said] if asked.system else said
    if isinstance(asked, shapes.ResponseAsked):
        if isinstance(asked.input, str):
            said = [Turn(asked.input)]
        else:
            said = [Turn(text_of(item.content), item.role == ASSISTANT) for item in _ends(asked.input) if item.content]
        return [Turn(asked.instructions), *said] if asked.instructions else said
    if isinstance(asked, shapes.CompletionAsked) and isinstance(asked.prompt, str):
        return [Turn(asked.prompt)]
    return []


def _ends(messages: Sequence[Any]) -> Sequence[Any]:
    return messages if len(messages) <= NUM_TURNS else [messages[0], *messages[-NUM_TURNS:]]


def text_of(content: Any) -> str:
    """The text of a message's content, or the texts among its pieces."""
    if isinstance(content, str):
        return content
    return "\n".join(piece.text for piece in content or () if piece.text)
