"""What of the data port's HTTP API an engine answers for one model, known from the model's file before an engine runs.

Each driver declares it (`api` of its class); a router refuses the rest with the reason, and wakes no model for it. What
depends on the weights, the engine itself says when it is ready (`LoadReport.lacks`).
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RERANK = "/v1/rerank"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
SPEECH = "/v1/audio/speech"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
AUDIO = (SPEECH, TRANSCRIPTIONS, TRANSLATIONS)
OPTIONAL = frozenset((TOKENIZE, DETOKENIZE, *AUDIO))  # answered by the engines that declare it, and by no other

TOOL_CHOICE = "tool_choice"  # in Instance.lacks: a call of a tool cannot be forced, the chat template knows no tools
REQUIRED, NAMED = "required", "named"  # a tool choice: any tool must be called, or this one


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineApi:
    """`lacks`: path -> why the engine does not answer it for this model, to be read behind the model's name."""

    lacks: Mapping[str, str] = field(default_factory=dict)
    also: frozenset[str] = frozenset()  # of OPTIONAL, those that it answers
    ignores: Mapping[str, Any] = field(default_factory=dict)  # field -> the one value that asks for nothing: any other
    # would be accepted and would change nothing, so it is refused
    functions_only: bool = False  # tools that an engine would run itself (a web search) are refused, else ignored
    text_only: bool = False  # images, sounds and files within messages are refused
    tool_choices: frozenset[str] = frozenset((REQUIRED, NAMED))  # that it honours; "auto" and "none" are no obligation
    # Of a stream whose engine is lost (services/router/continuation.py):
    continues: frozenset[str] = frozenset((COMPLETIONS,))  # paths on which another engine goes on with an answer
    continues_schemas: bool = False  # a grammar takes what of the answer is there already
    prefills: bool = False  # a chat's last message, where the assistant's, is gone on with, whatever the request says
    mixed_prompts: bool = False  # a prompt of token ids may have a text among them
    token_ids: bool = False  # a stream says its tokens when asked to (`return_token_ids`)
    # Paths on which its usage counts one sequence of several, it calls no tool by force, or a message of it keeps to no
    # structure: the router translates such requests (services/router/sequences.py, forced_tools.py,
    # forced_responses.py, messages_as_chat.py).
    translated: frozenset[bytes] = frozenset()
    # On RESPONSES and COMPLETIONS it does nothing of the structure that is asked for: the router writes that where the
    # engine reads it (services/router/intake.py).
    ignores_formats: bool = False
    # Fields of each request by which the engine tells the adapters of a base, and the base, from one another, whatever
    # the client has sent under these names. Empty: the field `model` does.
    names_adapter: Mapping[str, Any] = field(default_factory=dict)
    completion_tokens: int = 0  # of a completion that sets no bound; 0: as many as the context has


def adapter_number(key: str) -> int:
    """Of the adapter with that model key, where an engine takes whole numbers for adapters (llamacpp_lora.py): from 1,
    and few enough that a 32-bit float holds each exactly."""
    return 1 + zlib.crc32(key.encode()) % ((1 << 24) - 1)


EVERYTHING = EngineApi(also=OPTIONAL)  # of an engine that declares nothing: it is asked, and refuses by itself
