"""The HTTP API that an engine answers for a model, known from the model file alone.

A router refuses the rest with the reason, without waking a model. Features that depend on the weights are in
`Instance.lacks`.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
COMPACT = "/v1/responses/compact"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RERANK = "/v1/rerank"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
SPEECH = "/v1/audio/speech"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
AUDIO = (SPEECH, TRANSCRIPTIONS, TRANSLATIONS)
OPTIONAL = frozenset((TOKENIZE, DETOKENIZE, *AUDIO))

TOOL_CHOICE = "tool_choice"  # in Instance.lacks: no tool call can be forced, since the chat template has no tools
REQUIRED, NAMED = "required", "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineApi:
    """`lacks`: path -> reason, worded to follow the model's name."""

    lacks: Mapping[str, str] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    reads: Mapping[str, str] = field(default_factory=dict)  # path among `also` -> its one field
    ignores: Mapping[str, Any] = field(default_factory=dict)  # field -> its one harmless value: any other
    # would be accepted without effect, so it is refused
    text_only: bool = False  # refuse images, sounds and files
    tool_choices: frozenset[str] = frozenset((REQUIRED, NAMED))  # "auto" and "none" oblige to nothing
    # For a stream whose engine is lost (services/router/continuation.py):
    continues: frozenset[str] = frozenset((COMPLETIONS,))  # paths where another engine can continue an answer
    continues_schemas: bool = False  # a grammar accepts the answer so far
    prefills: bool = False  # always continue an assistant's last message
    thinks_by_template: bool = False  # a message's `thinking` and effort are settings of the chat template
    mixed_prompts: bool = False  # token-id prompts may contain text
    token_ids: bool = False  # streams give their tokens on request (`return_token_ids`)
    # Paths where usage counts one sequence of several, no tool call can be forced, or messages ignore the requested
    # structure: the router translates (services/router/sequences.py, forced_tools.py, messages_as_chat.py). It
    # translates all responses (responses_as_chat.py).
    translated: frozenset[bytes] = frozenset()
    has_messages: bool = True  # else each becomes a chat, and is translated
    # It ignores the structure requested on COMPLETIONS: the router moves it to a field that the engine reads
    # (services/router/intake.py).
    ignores_formats: bool = False
    # Request fields that tell a base and its adapters apart; they override the client's. Empty: the field `model` does.
    names_adapter: Mapping[str, Any] = field(default_factory=dict)
    completion_tokens: int = 0  # default bound of a completion; 0: the context


def adapter_number(key: str) -> int:
    """Number an adapter from 1, exact in a 32-bit float (llamacpp_lora.py)."""
    return 1 + zlib.crc32(key.encode()) % ((1 << 24) - 1)


EVERYTHING = EngineApi(also=OPTIONAL)  # an undeclared engine refuses by itself
