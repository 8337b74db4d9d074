"""What of the data port's HTTP API an engine answers for one model, known from the model's file before an engine runs.

Each driver declares it (`api` of its class); a router refuses the rest with the reason, and wakes no model for it. What
depends on the weights, the engine itself says when it is ready (`LoadReport.lacks`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RERANK = "/v1/rerank"

TOOL_CHOICE = "tool_choice"  # in Instance.lacks: a call of a tool cannot be forced, the chat template knows no tools
REQUIRED, NAMED = "required", "named"  # a tool choice: any tool must be called, or this one


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineApi:
    """`lacks`: path -> why the engine does not answer it for this model, to be read behind the model's name."""

    lacks: Mapping[str, str] = field(default_factory=dict)
    functions_only: bool = False  # tools that an engine would run itself (a web search) are refused, else ignored
    text_only: bool = False  # images, sounds and files within messages are refused
    tool_choices: frozenset[str] = frozenset((REQUIRED, NAMED))  # that it honours; "auto" and "none" are no obligation
    # Of a stream whose engine is lost (services/router/continuation.py):
    continues: frozenset[str] = frozenset((COMPLETIONS,))  # paths on which another engine goes on with an answer
    continues_schemas: bool = False  # a grammar takes what of the answer is there already
    prefills: bool = False  # a chat's last message, where the assistant's, is gone on with, whatever the request says
    mixed_prompts: bool = False  # a prompt of token ids may have a text among them
    token_ids: bool = False  # a stream says its tokens when asked to (`return_token_ids`)
    completion_tokens: int = 0  # of a completion that sets no bound; 0: as many as the context has


EVERYTHING = EngineApi()  # of an engine that declares nothing: it is asked, and refuses by itself
