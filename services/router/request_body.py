"""What the router must know of a request body, and what it refuses before waking a model for it.

The body itself goes to the engine byte for byte. Engines parse it again: where a name comes twice, the last value
counts for msgspec, for llama.cpp's parser and for Python's alike.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from glowplug.domain.errors import BadRequest, GlowplugError
from glowplug.domain.model import Model
from glowplug.engines import apis
from glowplug.engines.apis import EngineApi
from services.router import request_shapes as shapes
from services.router.request_shapes import CHARS_PER_TOKEN_MAX, NULL, NUM_CHOICES, NUM_INPUTS, SCHEMA_BYTES, TOOLS_BYTES

Piece = str | shapes.Document | shapes.Part | shapes.Block | shapes.Item | shapes.Turn
Readers = Mapping[bytes, Callable[[bytes], Any]]
SHAPES: dict[bytes, type[shapes.Asked]] = {
    b"/v1/chat/completions": shapes.ChatAsked,
    b"/v1/completions": shapes.CompletionAsked,
    b"/v1/embeddings": shapes.EmbeddingAsked,
    b"/v1/responses": shapes.ResponseAsked,
    b"/v1/messages": shapes.MessagesAsked,
    b"/v1/messages/count_tokens": shapes.CountAsked,
    b"/v1/rerank": shapes.RerankAsked,
}
OPERATIONS = {
    b"/v1/chat/completions": "chat",
    b"/v1/completions": "text_completion",
    b"/v1/embeddings": "embeddings",
    b"/v1/responses": "chat",
    b"/v1/messages": "chat",
    b"/v1/messages/count_tokens": "count_tokens",
    b"/v1/rerank": "rerank",
}
CHARS_PER_TOKEN = 4
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"})
_TEXT_PARTS |= {"thinking", "redacted_thinking", "tool_use", "tool_result"}  # of Anthropic's messages
_FUNCTIONS = frozenset({"function", "custom"})  # tools that the client runs
_WITH_TEXT = frozenset({"text", "input_text", "output_text"})
_UNKNOWN = "Object contains unknown field `"


def readers(passed: Iterable[str] = ()) -> Readers:
    """A reader for each path; the fields named in `passed` are let through unchecked besides those that are known."""
    return {path: msgspec.json.Decoder(_with(shape, passed)).decode for path, shape in SHAPES.items()}


def _with(shape: type[shapes.Asked], passed: Iterable[str]) -> type[shapes.Asked]:
    names = [name for name in passed if name not in shape.__struct_encode_fields__]
    if not names:
        return shape
    extra = {f"passed_{i}": name for i, name in enumerate(names)}
    fields = [(field, msgspec.Raw, NULL) for field in extra]
    made = msgspec.defstruct(
        shape.__name__, fields, bases=(shape,), kw_only=True, forbid_unknown_fields=True, rename=extra
    )
    return cast(type[shapes.Asked], made)


READERS = readers()


def read_body(path: bytes, body: bytes, by_path: Readers = READERS) -> Any:
    """What is asked: `model`, `stream` and what its kind of request has. Raises BadRequest naming the wrong field."""
    try:
        if not body.isascii():
            body.decode()  # what is skipped is not looked at below, and engines refuse it late
        asked = by_path[path](body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body cannot be read: {error}") from error
    if not asked.model:
        raise BadRequest("`model` is empty.", param="model")
    _check(asked)
    return asked


class NotSupported(GlowplugError):
    """The model's engine has no such API, whatever is asked of it (501)."""

    status, type, code = 501, "invalid_request_error", "not_supported"


class TooLong(BadRequest):
    """The text cannot fit the model's context (400)."""

    code = "context_length_exceeded"


class ToolChoiceRefused(BadRequest):
    """The model cannot be made to call a tool, or not in this way (400)."""

    code = "unsupported_tool_choice"


def check_model(asked: Any, model: Model, api: EngineApi, path: bytes, num_bytes: int) -> str:
    """Hold a request, with a body of `num_bytes`, against the model it is for, and against what its engine answers.
    Returns the feature that its instance must not lack (apis.TOOL_CHOICE), else "". Raises BadRequest naming the field
    that this model cannot do, and NotSupported."""
    if api.lacks and (why := api.lacks.get(path.decode())):
        raise NotSupported(f"`{model.name}` {why}.", param="model")
    for field in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        most = getattr(asked, field, None)
        if most is not None and most > model.context_tokens:
            text = f"{field}: {most} is too large; `{model.name}` has a context of {model.context_tokens} tokens."
            raise BadRequest(text, param=field)
    most = model.context_tokens * CHARS_PER_TOKEN_MAX
    param, num_chars = _longest_text(asked) if num_bytes > most else ("", 0)  # no text is longer than its body
    if num_chars > most:
        text = (
            f"{param}: {num_chars} characters do not fit the context of `{model.name}`, {model.context_tokens} tokens."
        )
        raise TooLong(text, param=param)
    if api.text_only:
        for param, part in _parts(asked):
            if part.type not in _TEXT_PARTS:
                raise BadRequest(f"{param}: `{model.name}` takes text only, not `{part.type}`.", param=param)
    if api.functions_only and isinstance(asked, shapes.ResponseAsked):
        for i, tool in enumerate(asked.tools or ()):
            if tool.type not in _FUNCTIONS:
                text = f"tools[{i}].type: `{model.name}` calls functions only, and runs no `{tool.type}`."
                raise BadRequest(text, param=f"tools[{i}].type")
    kind = forced_choice(asked)
    if kind and kind not in api.tool_choices:
        raise tool_choice_refused(model, can_require=apis.REQUIRED in api.tool_choices)
    return apis.TOOL_CHOICE if kind else ""


def tool_choice_refused(model: Model, *, can_require: bool = False) -> ToolChoiceRefused:
    """Why a choice of tools is refused, and what would be taken."""
    if can_require:
        text = f"`{model.name}` cannot be made to call a tool by its name; send it alone and ask for any call."
    else:
        text = f"`{model.name}` cannot be made to call a tool; leave the choice to it (auto)."
    return ToolChoiceRefused(f"tool_choice: {text}", param="tool_choice")


def forced_choice(asked: Any) -> str:
    """Whether some tool has to be called (apis.REQUIRED) or one of certain ones (apis.NAMED); "" when that is left
    open. To name the only tool of a message is to require a call: engines read it so."""
    choice = getattr(asked, "tool_choice", None)
    if choice is None or isinstance(choice, str):
        return apis.REQUIRED if choice == "required" else ""
    if isinstance(choice, dict):
        return apis.NAMED
    if choice.type not in ("any", "tool") or not isinstance(asked, shapes.MessagesAsked):
        return ""
    return apis.NAMED if choice.type == "tool" and len(asked.tools or ()) > 1 else apis.REQUIRED


def sizes(asked: Any) -> tuple[int, int]:
    """(prompt tokens, most response tokens; 0 for no limit), without a tokenizer: a token is four characters. Images
    and sounds within messages count nothing."""
    if isinstance(asked, shapes.ChatAsked):
        num_chars = sum(_chars(message.content) for message in asked.messages)
        most = asked.max_completion_tokens or asked.max_tokens
    elif isinstance(asked, shapes.CompletionAsked):
        num_chars, most = _chars_of_text(asked.prompt), asked.max_tokens
    elif isinstance(asked, shapes.EmbeddingAsked):
        num_chars, most = _chars_of_text(asked.input), 1
    elif isinstance(asked, shapes.MessagesAsked):
        num_chars, most = _chars(asked.system) + _chars(asked.messages), asked.max_tokens
    elif isinstance(asked, shapes.CountAsked):
        num_chars, most = 0, 1  # its text is cut into tokens, and not read
    elif isinstance(asked, shapes.RerankAsked):
        num_chars, most = _chars(asked.documents) + len(asked.query) * len(asked.documents), 1
    else:
        num_chars, most = _chars(asked.input), asked.max_output_tokens
    return num_chars // CHARS_PER_TOKEN, most or 0


def _longest_text(asked: Any) -> tuple[str, int]:
    """(field, characters) of the longest text that is one prompt for the engine."""
    if isinstance(asked, shapes.ChatAsked):
        return "messages", sum(map(_chars_of_message, asked.messages))
    if isinstance(asked, shapes.ResponseAsked):
        return "input", _chars(asked.input) + len(asked.instructions or "")
    if isinstance(asked, shapes.CountAsked):
        return "messages", _chars(asked.system) + _chars(asked.messages)
    if isinstance(asked, shapes.RerankAsked):
        return "documents", max(map(_chars_of_piece, asked.documents)) + len(asked.query)
    param, text = ("prompt", asked.prompt) if isinstance(asked, shapes.CompletionAsked) else ("input", asked.input)
    if isinstance(text, str):
        return param, len(text)
    return param, max((len(one) for one in text if isinstance(one, str)), default=0)


def _chars_of_message(message: shapes.Message) -> int:
    """With what the engine is given besides its content."""
    num_chars = _chars(message.content) + len(message.reasoning_content or "")
    return num_chars + sum(len(call.function.arguments) for call in message.tool_calls or ())


def _chars(content: str | Sequence[Piece] | None) -> int:
    """Characters of a text, or of the pieces of one."""
    if isinstance(content, str):
        return len(content)
    return sum(map(_chars_of_piece, content)) if content else 0


def _chars_of_piece(piece: Piece) -> int:
    if isinstance(piece, str):
        return len(piece)
    if isinstance(piece, shapes.Turn):
        return _chars(piece.content)
    if isinstance(piece, shapes.Item):
        return _chars(piece.content) + _chars(piece.output)
    if isinstance(piece, shapes.Block):
        num_chars = len(piece.thinking or "") + memoryview(piece.input).nbytes + _chars(piece.content)
        return num_chars + len(piece.text or "")
    return len(piece.text or "")


def _chars_of_text(text: shapes.Text) -> int:
    """Of a list: texts, or token ids, each of which is one token."""
    if isinstance(text, str):
        return len(text)
    return sum(len(one) if isinstance(one, str) else _num_ids(one) * CHARS_PER_TOKEN for one in text)


def _num_ids(one: int | list[int]) -> int:
    return 1 if isinstance(one, int) else len(one)


def _num_texts(text: shapes.Text) -> int:
    """How many texts a list holds; token ids among them are one together."""
    if isinstance(text, str):
        return 1
    num_texts = sum(not isinstance(one, int) for one in text)
    return num_texts + (num_texts < len(text))


def _check(asked: Any) -> None:
    """What types cannot say: fields that bound each other, and the sizes of schemas."""
    if isinstance(asked, shapes.ChatAsked):
        if asked.tools is not None or asked.tool_choice is not None:
            tools = [tool.function for tool in asked.tools or ()]
            _check_tools("tools[{}].function", tools)
            _check_choice(asked.tool_choice, [tool.name for tool in tools])
        _check_format(asked)
        if asked.chat_template_kwargs is not NULL:
            _check_schema("chat_template_kwargs", asked.chat_template_kwargs)
        for param, part in _parts(asked):
            _check_part(param, part)
    elif isinstance(asked, shapes.CompletionAsked):
        num_prompts, n = _num_texts(asked.prompt), asked.n or 1
        if not num_prompts:
            raise BadRequest("prompt: no text is given.", param="prompt")
        if num_prompts * n > NUM_CHOICES:
            text = f"{num_prompts} prompts with n={n} make more than {NUM_CHOICES} answers"
            raise BadRequest(f"prompt: {text}; send them in several requests.", param="prompt")
        if asked.best_of is not None and asked.best_of < n:
            raise BadRequest(f"best_of: {asked.best_of} is below n={n}.", param="best_of")
        _check_format(asked)
    elif isinstance(asked, shapes.EmbeddingAsked):
        num_inputs = _num_texts(asked.input)
        if not 1 <= num_inputs <= NUM_INPUTS:
            raise BadRequest(f"input: {num_inputs} texts; 1 to {NUM_INPUTS} are allowed.", param="input")
    elif isinstance(asked, shapes.CountAsked):
        _check_anthropic(asked)
    elif isinstance(asked, shapes.ResponseAsked):
        _check_response(asked)


def _check_anthropic(asked: shapes.CountAsked) -> None:
    num_bytes = 0
    for i, tool in enumerate(asked.tools or ()):
        if tool.type not in (None, "custom"):
            text = f"tools[{i}].type: `{tool.type}` is run by its maker's own servers, and not here."
            raise BadRequest(text, param=f"tools[{i}].type")
        _check_schema(f"tools[{i}].input_schema", tool.input_schema)
        num_bytes += memoryview(tool.input_schema).nbytes + len(tool.description or "")
    _check_tools_bytes(num_bytes)
    choice = asked.tool_choice
    if choice is not None and choice.type in ("any", "tool"):
        _check_forced([tool.name for tool in asked.tools or ()], choice.name if choice.type == "tool" else None)
        if choice.type == "tool" and not choice.name:
            raise BadRequest("tool_choice.name is missing.", param="tool_choice.name")
    for param, part in _parts(asked):
        _check_part(param, part)


def _check_choice(choice: str | dict[str, Any] | None, tools: Sequence[str | None]) -> None:
    """A choice that is one, of tools that are given."""
    if choice is None or choice in ("auto", "none"):
        return
    if isinstance(choice, str):
        if choice != "required":
            raise BadRequest(f"tool_choice: `{choice}` is none of auto, none and required.", param="tool_choice")
        _check_forced(tools, None)
    elif choice.get("type") == "allowed_tools":
        _check_forced(tools, None)
    else:
        _check_forced(tools, _named_tool(choice))


def _check_forced(tools: Sequence[str | None], name: str | None) -> None:
    if not tools:
        raise BadRequest("tool_choice: a call is asked for, and no tools are given.", param="tool_choice")
    if name and name not in tools:
        raise BadRequest(f"tool_choice: `{name[:100]}` is none of the tools that are given.", param="tool_choice")


def _named_tool(choice: Mapping[str, Any]) -> str:
    """The function that a tool choice names: within `function` for a chat, beside `type` for a response."""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    return name if isinstance(name, str) else ""


def _check_response(asked: shapes.ResponseAsked) -> None:
    for i, tool in enumerate(asked.tools or ()):
        if tool.type == "function" and not tool.name:
            raise BadRequest(f"tools[{i}].name is missing.", param=f"tools[{i}].name")
    _check_tools("tools[{}]", asked.tools or ())
    _check_choice(asked.tool_choice, [tool.name for tool in asked.tools or ()])
    for field in ("previous_response_id", "conversation", "background"):
        if getattr(asked, field):
            text = f"{field}: no engine keeps answers for later requests; send the whole conversation as `input`."
            raise BadRequest(text, param=field)
    if asked.text is not None and asked.text.format is not None:
        _check_schema("text.format.schema", asked.text.format.schema)
    for param, part in _parts(asked):
        _check_part(param, part)


def _check_tools(where: str, tools: Sequence[shapes.Function | shapes.ResponseTool]) -> None:
    num_bytes = 0
    for i, tool in enumerate(tools):
        _check_schema(f"{where.format(i)}.parameters", tool.parameters)
        num_bytes += memoryview(tool.parameters).nbytes + len(tool.description or "")
    _check_tools_bytes(num_bytes)


def _check_tools_bytes(num_bytes: int) -> None:
    if num_bytes > TOOLS_BYTES:
        raise BadRequest(f"tools: {num_bytes} bytes are more than {TOOLS_BYTES}.", param="tools")


def _check_format(asked: shapes.ChatAsked | shapes.CompletionAsked) -> None:
    if asked.response_format is not None:
        _check_schema("response_format.json_schema", asked.response_format.json_schema)
        _check_schema("response_format.schema", asked.response_format.schema)


def _check_schema(param: str, schema: msgspec.Raw) -> None:
    """An object of bounded size, or null."""
    num_bytes = memoryview(schema).nbytes
    if num_bytes > SCHEMA_BYTES:
        raise BadRequest(f"{param}: {num_bytes} bytes are more than {SCHEMA_BYTES}.", param=param)
    if not bytes(schema).startswith((b"{", b"null")):
        raise BadRequest(f"{param}: an object is expected.", param=param)


def _check_part(param: str, part: shapes.Part | shapes.Block) -> None:
    if part.type in _WITH_TEXT and part.text is None:
        raise BadRequest(f"{param}.text is missing.", param=f"{param}.text")


def _parts(asked: Any) -> Iterator[tuple[str, shapes.Part | shapes.Block]]:
    """Every part of every message, with where it is."""
    contents: Sequence[tuple[str, str | Sequence[shapes.Part] | Sequence[shapes.Block] | None]]
    if isinstance(asked, shapes.CountAsked):
        turns = [(f"messages[{i}].content", turn.content) for i, turn in enumerate(asked.messages)]
        contents = [("system", asked.system), *turns]
        for where, blocks in turns:  # a tool's result has pieces too
            if isinstance(blocks, list):
                contents += [(f"{where}[{i}].content", block.content) for i, block in enumerate(blocks)]
    elif isinstance(asked, shapes.ChatAsked):
        contents = [
            (f"messages[{i}].content", m.content) for i, m in enumerate(asked.messages) if type(m.content) is list
        ]
    elif isinstance(asked, shapes.ResponseAsked) and isinstance(asked.input, list):
        contents = [(f"input[{i}].content", item.content) for i, item in enumerate(asked.input)]
        contents += [(f"input[{i}].output", item.output) for i, item in enumerate(asked.input)]
    else:
        return
    for where, content in contents:
        if isinstance(content, list):
            for i, part in enumerate(content):
                yield f"{where}[{i}]", part


def _wrong_field(text: str) -> BadRequest:
    """msgspec says "... - at `$.messages[0].role`" or "... missing required field `model`"."""
    what, _, where = text.partition(" - at `")
    if what.startswith(_UNKNOWN):
        name = what.removeprefix(_UNKNOWN).rstrip("`")
        return BadRequest(f"{name}: this request has no such field.", param=name)
    param = where.partition("$")[2].rstrip("`").lstrip(".") or what.partition("missing required field `")[2].rstrip("`")
    return BadRequest(f"{param}: {what}" if where else what, param=param or None)
