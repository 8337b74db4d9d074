"""The request fields known to the router, with their bounds.

They are OpenAI's and Anthropic's, and engines' own with which a client could exhaust a machine's memory or block it for
a minute (llama.cpp's `n_probs`, `n_predict`, `grammar`, ...). All others go to the engine (request_body.py). Each value
of a repeated name is checked. Null counts as not given.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from glowplug.services.router.schemas import SCHEMA_BYTES

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
NUM_MESSAGES = 2048  # or items of a response's input
NUM_INPUTS = 2048  # of one embedding request, as with OpenAI
NUM_CHOICES = 128  # answers of one request, over all its prompts; OpenAI's bound of `n`
NUM_TOOLS = 128  # as with OpenAI
CHARS_PER_TOKEN_MAX = 64  # a longer text cannot fit its context; tokenizing 9 MB takes llama.cpp 45 s and 800 MB
TOOLS_BYTES = 256 * 1024  # of all tools together
UNKNOWN_BYTES = 256 * 1024  # of one unknown field

Count = Annotated[int, Meta(ge=1, le=NUM_CHOICES)]
Tokens = Annotated[int, Meta(ge=1, le=INT32_MAX)]  # the model's context bounds it too
TokenId = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]  # an empty one would end each answer at once
TokenKey = Annotated[str, Meta(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Short = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Short, Short], Meta(max_length=16)]
NULL = Raw(b"null")
Grammar = Annotated[str, Meta(max_length=SCHEMA_BYTES)]
Text = str | list[str | TokenId | list[TokenId]]


class ContentPart(Struct):
    type: str
    text: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str


class CustomCall(Struct):
    name: str
    input: str


class FunctionCalled(Struct, tag_field="type", tag="function"):
    function: FunctionCall
    id: str | None = None

    @property
    def said(self) -> str:
        return self.function.arguments


class CustomCalled(Struct, tag_field="type", tag="custom"):
    custom: CustomCall
    id: str | None = None

    @property
    def said(self) -> str:
        return self.custom.input


class Message(Struct):
    """Unknown fields are for the chat template."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[FunctionCalled | CustomCalled] | None = None


class Function(Struct):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: Raw = NULL


class Custom(Struct):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    format: dict[str, Any] | None = None


class FunctionTool(Struct, tag_field="type", tag="function"):
    function: Function

    @property
    def shown(self) -> Function:
        return self.function


class CustomTool(Struct, tag_field="type", tag="custom"):
    custom: Custom

    @property
    def shown(self) -> Custom:
        return self.custom


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Raw = NULL
    schema: Raw = NULL  # also read by llama.cpp


class StreamOptions(Struct):
    include_usage: bool | None = None


class Asked(Struct):
    model: str
    stream: bool | None = None


class OpenAiAsked(Asked, kw_only=True):
    user: Short | None = None


class Generating(OpenAiAsked, kw_only=True):
    """The common fields of chats and completions. From `top_k` on, most are engines' own, not OpenAI's."""

    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=INT64_MAX)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    response_format: ResponseFormat | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    n_probs: Annotated[int, Meta(ge=0, le=20)] | None = None
    n_cmpl: Count | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    grammar: Grammar | None = None
    guided_grammar: Grammar | None = None
    guided_regex: Grammar | None = None
    json_schema: Raw = NULL
    guided_json: Raw = NULL
    guided_choice: Raw = NULL
    structured_outputs: Raw = NULL


class ChatAsked(Generating, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(max_length=NUM_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[FunctionTool | CustomTool], Meta(max_length=NUM_TOOLS)] | None = None
    tool_choice: Short | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Short | None = None
    verbosity: Short | None = None
    prediction: dict[str, Any] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Short | None = None
    prompt_cache_key: Short | None = None
    prompt_cache_retention: Short | None = None
    safety_identifier: Short | None = None
    chat_template_kwargs: Raw = NULL
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    functions: None = None  # of older clients
    function_call: None = None
    audio: None = None


class CompletionAsked(Generating, kw_only=True, forbid_unknown_fields=True):
    prompt: Text
    max_tokens: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None  # 0: only the echo
    max_completion_tokens: Any = None  # of chats; refused here, since llama.cpp would prefer it to `max_tokens`
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None


class EmbeddingAsked(OpenAiAsked, kw_only=True, forbid_unknown_fields=True):
    input: Text
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None


class Item(Struct):
    """A message, reasoning, a call or its output."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None


class ResponseTool(Struct):
    type: str
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    description: str | None = None
    parameters: Raw = NULL


class TextFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    name: Short | None = None
    description: str | None = None
    schema: Raw = NULL
    strict: bool | None = None


class ResponseText(Struct):
    format: TextFormat | None = None
    verbosity: Short | None = None


class Reasoning(Struct):
    effort: Short | None = None
    summary: Short | None = None


class ConversationAsked(OpenAiAsked, kw_only=True):
    """The common fields of a response and a conversation's compaction."""

    input: str | Annotated[list[Item], Meta(max_length=NUM_MESSAGES)] = ""
    instructions: str | None = None
    previous_response_id: Short | None = None
    service_tier: Short | None = None
    prompt_cache_key: Short | None = None
    prompt_cache_retention: Short | None = None


class CompactAsked(ConversationAsked, kw_only=True, forbid_unknown_fields=True):
    """`stream` stays null."""


class ResponseAsked(ConversationAsked, kw_only=True, forbid_unknown_fields=True):
    max_output_tokens: Tokens | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream_options: dict[str, Any] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=NUM_TOOLS)] | None = None
    tool_choice: Short | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Short], Meta(max_length=16)] | None = None
    metadata: Metadata | None = None
    client_metadata: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["disabled"] | None = None
    conversation: Short | dict[str, Any] | None = None
    safety_identifier: Short | None = None
    prompt: None = None  # a text kept by OpenAI


class Document(Struct, forbid_unknown_fields=True):
    text: str


class TokensAsked(Asked, kw_only=True):
    """The fields differ by engine."""

    content: Raw = NULL
    prompt: Raw = NULL
    tokens: Raw = NULL


class SpeechAsked(Asked, kw_only=True):
    input: str


class UploadAsked(Asked, kw_only=True):
    """A form; the router reads only its model."""


class RerankAsked(OpenAiAsked, kw_only=True, forbid_unknown_fields=True):
    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=NUM_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, le=NUM_INPUTS)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=INT32_MAX)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None


# -- Anthropic's Messages API (/v1/messages and /v1/messages/count_tokens) -------------------------------------------


class Block(Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    content: "str | list[Block] | None" = None  # of a tool's result
    input: Raw = NULL  # of a tool's call


class AnthropicTurn(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Struct):
    """`type` is "custom", or names a tool of Anthropic's own servers."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    type: str | None = None
    description: str | None = None
    input_schema: Raw = NULL


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountAsked(Asked, kw_only=True, forbid_unknown_fields=True):
    """A request for the number of input tokens; messages share its fields. `stream` stays null."""

    messages: Annotated[list[AnthropicTurn], Meta(min_length=1, max_length=NUM_MESSAGES)]
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
