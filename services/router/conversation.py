"""The length of the answer to a request, from the texts that it brings. They stay here: what is learned of them is one
number."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from glowplug.policies.prediction.length_text import Described, Turn, describe
from services.router import request_shapes as shapes

NUM_TURNS = 64  # that are read of a long conversation, beside the first
ASSISTANT = "assistant"
log = logging.getLogger(__name__)


class Lengths(Protocol):
    """What has learned from texts how long their answers are."""

    def expect(self, described: Described) -> Any: ...


def open_lengths(setting: str) -> Lengths | None:
    """What the setting names: nothing for the file that comes with Glowplug, a path for that file, `none` for texts
    that are not read. None, and a line in the log, where numpy is not installed. Raises BadRequest for a file that
    cannot be read."""
    if setting == "none":
        return None
    try:
        from glowplug.policies.prediction.length_model import SHIPPED, LengthModel
    except ImportError as error:
        log.info("lengths of answers are not read from their prompts: %s", error)
        return None
    return LengthModel.read(Path(setting) if setting else SHIPPED)


def text_tokens(asked: Any, lengths: Lengths) -> int:
    """Tokens of the answer, as its texts say; 0 for a request that has none, or more than one."""
    turns = turns_of(asked)
    return int(lengths.expect(describe(turns)).tokens) if turns else 0


def turns_of(asked: Any) -> list[Turn]:
    """The conversation that a request brings, its oldest turn first; empty where it asks for no text."""
    if isinstance(asked, shapes.ChatAsked):
        return [Turn(_text(m.content), m.role == ASSISTANT) for m in _ends(asked.messages)]
    if isinstance(asked, shapes.MessagesAsked):
        said = [Turn(_text(m.content), m.role == ASSISTANT) for m in _ends(asked.messages)]
        return [Turn(_text(asked.system)), *said] if asked.system else said
    if isinstance(asked, shapes.ResponseAsked):
        if isinstance(asked.input, str):
            said = [Turn(asked.input)]
        else:
            said = [Turn(_text(item.content), item.role == ASSISTANT) for item in _ends(asked.input) if item.content]
        return [Turn(asked.instructions), *said] if asked.instructions else said
    if isinstance(asked, shapes.CompletionAsked) and isinstance(asked.prompt, str):
        return [Turn(asked.prompt)]
    return []


def _ends(messages: Sequence[Any]) -> Sequence[Any]:
    return messages if len(messages) <= NUM_TURNS else [messages[0], *messages[-NUM_TURNS:]]


def _text(content: Any) -> str:
    """Of a message: its text, or the texts among its pieces."""
    if isinstance(content, str):
        return content
    return "\n".join(piece.text for piece in content or () if piece.text)
