"""The fields of Anthropic's Messages API (/v1/messages and /v1/messages/count_tokens), with their bounds.

As in request_shapes.py every other name is refused: engines read private names from the same object.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from services.router.request_shapes import (
    INT32_MAX,
    NUM_MESSAGES,
    NUM_TOOLS,
    Asked,
    Share,
    Short,
    Stop,
    Tokens,
)


class Block(Struct):
    """A piece of a message: text, an image, a document, a call of a tool, its result, or thoughts."""

    type: str
    text: str | None = None
    thinking: str | None = None
    content: "str | list[Block] | None" = None  # of a tool's result
    input: Raw = Raw(b"null")  # of a tool's call


class Turn(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Struct):
    """`type` is "custom", or names a tool that Anthropic's own servers run."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    type: str | None = None
    description: str | None = None
    input_schema: Raw = Raw(b"null")


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountAsked(Asked, kw_only=True, forbid_unknown_fields=True):
    """What counts as input. `stream` is none of it, and null."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=NUM_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=NUM_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class MessagesAsked(CountAsked, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Tokens
    metadata: dict[str, Any] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    service_tier: Short | None = None
    inference_geo: Short | None = None
