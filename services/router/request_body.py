"""The check of a request's body before a model is woken for it.

The body goes to the engine byte for byte. Of a repeated name, msgspec, llama.cpp's parser and Python's use the last
value.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from glowplug.domain.errors import BadRequest, GlowplugError
from glowplug.domain.model import Model
from glowplug.engines import apis
from glowplug.engines.apis import EngineApi
from glowplug.services.router import request_shapes as shapes
from glowplug.services.router import schemas
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.request_shapes import (
    CHARS_PER_TOKEN_MAX,
    NULL,
    NUM_CHOICES,
    NUM_INPUTS,
    TOOLS_BYTES,
    UNKNOWN_BYTES,
)

# Empty requests and malformed texts get the client's API's wording: engines would invent an answer.

# Half of a UTF-16 surrogate pair, as an escape or as bytes. The second alternative skips other escapes, so that an
# escaped backslash before a `u` does not count.
_ESCAPES = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_AS_BYTES = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")


class EmptyArray(BadRequest):
    """A list is empty (400)."""

    code = "empty_array"


class MissingParameter(BadRequest):
    """A required parameter is missing (400)."""

    code = "missing_required_parameter"


def check_chat(asked: shapes.ChatAsked) -> None:
    """Check that messages have content or, an assistant's, tool calls. Raises BadRequest."""
    if not asked.messages:
        raise _empty_array("messages")
    for i, message in enumerate(asked.messages):
        content = message.content
        if content:
            continue
        param = f"messages[{i}].content"
        if content is None:
            if message.role != "assistant":
                text = f"Invalid value for '{param}': expected a string or an array of parts, got null."
                raise BadRequest(text, param=param)
        elif isinstance(content, list) and message.role != "assistant":
            raise _empty_array(param)


def check_texts(param: str, texts: shapes.Text, *, may_be_empty: bool = False) -> None:
    """Check that neither the list nor a text in it is empty. Raises BadRequest."""
    if texts == []:
        raise _empty_array(param)
    for i, one in enumerate(texts if isinstance(texts, list) else [texts]):
        where = f"{param}[{i}]" if isinstance(texts, list) else param
        if one == []:
            raise _empty_array(where)
        if one == "" and not may_be_empty:
            raise BadRequest(f"Invalid '{where}': input cannot be an empty string.", param=where)


def check_turns(asked: shapes.CountAsked) -> None:
    """Check Anthropic's rule: only a final assistant message may be empty. Raises BadRequest."""
    for i, turn in enumerate(asked.messages):
        if not turn.content and not (turn.role == "assistant" and i == len(asked.messages) - 1):
            rule = "all messages must have non-empty content except for the optional final assistant message"
            text = f"messages.{i}: {rule}"
            raise BadRequest(text, param=f"messages[{i}].content")


def check_response(asked: shapes.ConversationAsked) -> None:
    """Check that there is an input or a kept conversation. Raises BadRequest."""
    if not asked.input and not (asked.previous_response_id or getattr(asked, "conversation", None)):
        text = "One of 'input', 'previous_response_id' or 'conversation' must be provided."
        raise MissingParameter(text, param="input")


def lone_surrogate(body: bytes) -> str:
    """Return the error message for a lone surrogate, or ""."""
    if (found := _AS_BYTES.search(body)) is not None:
        half = found[0].decode("utf-8", "surrogatepass")
        return _half(f"U+{ord(half):04X}", found.start())
    high: Any = None
    for found in _ESCAPES.finditer(body):
        unit = int(found[1], 16) if found[1] else 0
        is_second = 0xDC00 <= unit <= 0xDFFF
        if high is not None and not (is_second and high.end() == found.start()):
            return _half(high[0].decode(), high.start())
        if high is None and is_second:
            return _half(found[0].decode(), found.start())
        high = found if 0xD800 <= unit <= 0xDBFF else None
    return _half(high[0].decode(), high.start()) if high is not None else ""


def _half(shown: str, at: int) -> str:
    return (
        f"The body is not valid JSON: `{shown}` at byte {at} is a surrogate without its other half, and no character."
    )


def _empty_array(param: str) -> EmptyArray:
    text = f"Invalid '{param}': empty array. Expected an array with minimum length 1, but got an empty array instead."
    return EmptyArray(text, param=param)


Piece = str | shapes.Document | shapes.ContentPart | shapes.Block | shapes.Item | shapes.AnthropicTurn
Readers = Mapping[bytes, "Reader"]
SHAPES: dict[bytes, type[shapes.Asked]] = {
    b"/v1/chat/completions": shapes.ChatAsked,
    b"/v1/completions": shapes.CompletionAsked,
    b"/v1/embeddings": shapes.EmbeddingAsked,
    b"/v1/responses": shapes.ResponseAsked,
    b"/v1/responses/compact": shapes.CompactAsked,
    b"/v1/messages": shapes.MessagesAsked,
    b"/v1/messages/count_tokens": shapes.CountAsked,
    b"/v1/rerank": shapes.RerankAsked,
    b"/tokenize": shapes.TokensAsked,
    b"/detokenize": shapes.TokensAsked,
    b"/v1/audio/speech": shapes.SpeechAsked,
}
OPERATIONS = {
    b"/v1/chat/completions": "chat",
    b"/v1/completions": "text_completion",
    b"/v1/embeddings": "embeddings",
    b"/v1/responses": "chat",
    b"/v1/responses/compact": "chat",
    b"/v1/messages": "chat",
    b"/v1/messages/count_tokens": "count_tokens",
    b"/v1/rerank": "rerank",
    b"/tokenize": "tokenize",
    b"/detokenize": "detokenize",
    b"/v1/audio/speech": "speech",
    b"/v1/audio/transcriptions": "transcription",
    b"/v1/audio/translations": "translation",
}
CHARS_PER_TOKEN = 4
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal"})
_TEXT_PARTS |= {"thinking", "redacted_thinking", "tool_use", "tool_result"}
_OWN_TOOLS = (None, "custom")  # of messages
_SERVERS_CALLS = ("server_tool_use", "mcp_tool_use")
_SERVERS_BLOCK = re.compile(rb'"(?:server_tool_use|mcp_tool_use|\w+_tool_result)"')
_SCHEMAS = ("json_schema", "guided_json", "guided_choice", "structured_outputs")
_GRAMMARS = ("grammar", "guided_grammar", "guided_regex")
_WITH_TEXT = frozenset({"text", "input_text", "output_text"})
_FORM_MODEL = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,512})\r\n--')
_NOT_IN_HEADERS = re.compile(r"[^A-Za-z0-9_.\-]")
_MOST_SHOWN, _SHOWN_CHARS = 16, 64
_EVERYONES = frozenset(path for path in OPERATIONS if path.decode() not in apis.OPTIONAL)
_CONTENT = attrgetter("content")
_UNKNOWN = "Object contains unknown field `"
_WHOLE = (shapes.EmbeddingAsked, shapes.RerankAsked, shapes.CountAsked, shapes.CompactAsked)
_NOT_KEPT = "no engine keeps answers for later requests"


class Reader:
    """A parser of one path's bodies. Unknown fields cost a second parse, or are refused if `strict`."""

    def __init__(self, shape: type[shapes.Asked], *, strict: bool) -> None:
        self.shape = shape
        self._known = frozenset(shape.__struct_encode_fields__)
        self._decode = msgspec.json.Decoder(shape).decode
        lenient = msgspec.defstruct(shape.__name__, [], bases=(shape,), forbid_unknown_fields=False)
        self._decode_known = None if strict else msgspec.json.Decoder(lenient).decode

    def read(self, body: bytes) -> Any:
        """Parse a body. Raises msgspec's errors, and BadRequest for a large unknown field."""
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            if self._decode_known is None or not str(error).startswith(_UNKNOWN):
                raise
        asked = self._decode_known(body)
        for name, value in self.unknown(body).items():
            num_bytes = memoryview(value).nbytes
            if num_bytes > UNKNOWN_BYTES:
                raise BadRequest(f"{name[:100]}: {num_bytes} bytes are more than {UNKNOWN_BYTES}.", param=name[:100])
        return asked

    def unknown(self, body: bytes) -> dict[str, msgspec.Raw]:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return {name: value for name, value in found.items() if name not in self._known}


def readers(*, strict: bool = False) -> Readers:
    return {path: Reader(shape, strict=strict) for path, shape in SHAPES.items()}


READERS = readers()


def read_body(path: bytes, body: bytes, by_path: Readers = READERS) -> Any:
    """Parse and check a body. Raises BadRequest naming the wrong field."""
    try:
        if not body.isascii():
            body.decode()  # the parser does not check skipped fields, which engines would refuse late
        asked = by_path[path].read(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error
    except msgspec.DecodeError as error:
        raise BadRequest(lone_surrogate(body) or f"The body is not valid JSON: {error}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(lone_surrogate(body) or f"The body cannot be read: {error}") from error
    if not asked.model:
        raise BadRequest("`model` is empty.", param="model")
    _check(asked)
    return asked


def read_form(body: bytes, content_type: bytes) -> shapes.UploadAsked:
    """Read a form's field `model`. Raises BadRequest."""
    if not content_type.lower().startswith(b"multipart/form-data"):
        raise BadRequest("The body is expected as multipart/form-data, with the fields `model` and `file`.")
    found = _FORM_MODEL.search(body)
    name = found[1].strip().decode("utf-8", "replace") if found is not None else ""
    if not name:
        raise BadRequest("The form has no field `model`.", param="model")
    return shapes.UploadAsked(model=name)


def unknown_fields(reader: Reader, body: bytes) -> bytes:
    return fields_named(list(reader.unknown(body)))


def fields_named(names: Sequence[str]) -> bytes:
    return _named("x-glowplug-unknown-fields", names)


def drop_tools(request: HttpRequest, kinds: Sequence[str]) -> None:
    """Note kinds of left out tools, for the answer's head and the trace."""
    request.dropped_tools = tuple(kind[:_SHOWN_CHARS] for kind in kinds[:_MOST_SHOWN])
    request.notes += _named("x-glowplug-dropped-tools", kinds)


def without_servers_tools(body: bytes, asked: shapes.CountAsked) -> tuple[bytes, list[str]]:
    """Leave out the tools that Anthropic defines, most of which its servers run, and their earlier calls; returns the
    rest of the body, and the types of those left out. A turn of nothing else is left out too."""
    dropped = {tool.type for tool in asked.tools or () if tool.type not in _OWN_TOOLS and tool.type}
    if _SERVERS_BLOCK.search(body) is not None:
        blocks = (block for turn in asked.messages if isinstance(turn.content, list) for block in turn.content)
        dropped |= {block.type for block in blocks if _is_servers(block.type)}
    if not dropped:
        return body, []
    fields = msgspec.json.decode(body)
    if fields.get("tools"):
        fields["tools"] = [tool for tool in fields["tools"] if tool.get("type") in _OWN_TOOLS]
        if not fields["tools"]:
            del fields["tools"]
            fields.pop("tool_choice", None)
    for turn in fields["messages"]:
        if isinstance(turn["content"], list):
            turn["content"] = [block for block in turn["content"] if not _is_servers(block["type"])] or None
    fields["messages"] = [turn for turn in fields["messages"] if turn["content"] is not None]
    return msgspec.json.encode(fields), sorted(dropped)


def _is_servers(block: str) -> bool:
    return block in _SERVERS_CALLS or block.endswith("_tool_result")


def _named(header: str, names: Sequence[str]) -> bytes:
    shown = [_NOT_IN_HEADERS.sub("?", name[:_SHOWN_CHARS]) for name in names[:_MOST_SHOWN]]
    more = [f"and {len(names) - _MOST_SHOWN} more"] if len(names) > _MOST_SHOWN else []
    return f"{header}: {', '.join(shown + more)}\r\n".encode()


class NotSupported(GlowplugError):
    """The model's engine does not have this API (501)."""

    status, type, code = 501, "invalid_request_error", "not_supported"


class TooLong(BadRequest):
    """The text cannot fit the model's context (400)."""

    code = "context_length_exceeded"


class ToolChoiceRefused(BadRequest):
    """The model cannot be made to call a tool in this way (400)."""

    code = "unsupported_tool_choice"


def check_model(
    asked: Any, model: Model, api: EngineApi, path: bytes, num_bytes: int, *, may_choose: bool = False
) -> str:
    """Check a request, with a body of `num_bytes`, against its model and engine. `may_choose`: its tool choice is not
    the engine's. Returns the feature that its instance needs (apis.TOOL_CHOICE), or "". Raises NotSupported, and
    BadRequest with the field."""
    if api.lacks and (why := api.lacks.get(path.decode())):
        raise NotSupported(f"`{model.name}` {why}.", param="model")
    if path not in _EVERYONES:
        if path.decode() not in api.also:
            raise NotSupported(f"`{model.name}` runs on {model.engine}, which has no {path.decode()}.", param="model")
        if (field := api.reads.get(path.decode())) and getattr(asked, field) == NULL:
            raise BadRequest(
                f"{field}: `{model.name}` runs on {model.engine}, which reads no other field.", param=field
            )
        return ""
    if api.ignores:
        _check_ignored(asked, model, api.ignores)
    if api.prefills and isinstance(asked, shapes.ChatAsked) and asked.messages[-1].role == "assistant":
        _check_prefill(asked, model)
    for field in ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict"):
        most = getattr(asked, field, None)
        if most is not None and most > model.context_tokens:
            text = f"{field}: {most} is too large; `{model.name}` has a context of {model.context_tokens} tokens."
            raise BadRequest(text, param=field)
    most = model.context_tokens * CHARS_PER_TOKEN_MAX
    param, num_chars = _longest_text(asked) if num_bytes > most else ("", 0)  # a text is no longer than its body
    if num_chars > most:
        text = (
            f"{param}: {num_chars} characters do not fit the context of `{model.name}`, {model.context_tokens} tokens."
        )
        raise TooLong(text, param=param)
    if api.text_only:
        for param, part in _parts(asked):
            if part.type not in _TEXT_PARTS:
                raise BadRequest(f"{param}: `{model.name}` takes text only, not `{part.type}`.", param=param)
    kind = "" if may_choose or getattr(asked, "tool_choice", None) is None else forced_choice(asked)
    if kind and kind not in api.tool_choices:
        raise tool_choice_refused(model, calls_functions=apis.CHAT.encode() in api.translated)
    return apis.TOOL_CHOICE if kind else ""


def _check_ignored(asked: Any, model: Model, ignores: Mapping[str, Any]) -> None:
    for field, nothing in ignores.items():
        value = getattr(asked, field, None)
        if field == "output_config" and value:  # its effort is a hint
            field, value = "output_config.format", value.get("format")
        if value not in (None, nothing, NULL):
            if field == "best_of" and value == (asked.n or 1):
                continue
            if field == "response_format" and value.type == nothing:
                continue
            text = f"{field}: `{model.name}` runs on {model.engine}, which ignores it; leave it out."
            if field == "echo" and asked.logprobs is not None:
                text += " Log-likelihoods of a prompt (`echo` with `logprobs`) need another engine, such as vLLM."
            if field == "output_format" and "output_config" not in ignores:
                text += " Use `output_config.format`."
            raise BadRequest(text, param=field)


def _check_prefill(asked: shapes.ChatAsked, model: Model) -> None:
    """Refuse settings that would close an assistant's last message."""
    for field in ("continue_final_message", "add_generation_prompt"):
        if getattr(asked, field) is not None and not asked.continue_final_message:
            text = f"{field}: `{model.name}` always continues the assistant's last message; leave it out."
            raise BadRequest(text, param=field)


def tool_choice_refused(model: Model, *, calls_functions: bool = False) -> ToolChoiceRefused:
    """Return the error for a tool choice. `calls_functions`: a function call can be forced."""
    if calls_functions:
        text = (
            f"`{model.name}` can be made to call any of its functions (required) or one by its name, and nothing else; "
            "ask for that, or leave the choice to it (auto)."
        )
    else:
        text = f"`{model.name}` cannot be made to call a tool; leave the choice to it (auto)."
    return ToolChoiceRefused(f"tool_choice: {text}", param="tool_choice")


def forced_choice(asked: Any) -> str:
    """Return apis.REQUIRED (any tool), apis.NAMED, or "" (not forced). A message's only tool counts as REQUIRED, as in
    engines."""
    choice = getattr(asked, "tool_choice", None)
    if choice is None or isinstance(choice, str):
        return apis.REQUIRED if choice == "required" else ""
    if isinstance(choice, dict):
        return apis.NAMED
    if choice.type not in ("any", "tool") or not isinstance(asked, shapes.MessagesAsked):
        return ""
    return apis.NAMED if choice.type == "tool" and len(asked.tools or ()) > 1 else apis.REQUIRED


def sizes(asked: Any) -> tuple[int, int]:
    """Estimate (prompt tokens, most tokens of one answer; 0: no limit) at four characters a token, without images and
    sounds."""
    if isinstance(asked, shapes.ChatAsked):
        num_chars = sum(map(_chars, map(_CONTENT, asked.messages)))
        most = asked.max_completion_tokens or asked.max_tokens or asked.n_predict
    elif isinstance(asked, shapes.CompletionAsked):
        num_chars = _chars_of_text(asked.prompt)
        most = 1 if asked.max_tokens == 0 else asked.max_tokens or asked.n_predict
    elif isinstance(asked, shapes.EmbeddingAsked):
        num_chars, most = _chars_of_text(asked.input), 1
    elif isinstance(asked, shapes.MessagesAsked):
        num_chars, most = _chars(asked.system) + _chars(asked.messages), asked.max_tokens
    elif isinstance(asked, shapes.CountAsked):
        num_chars, most = 0, 1
    elif isinstance(asked, shapes.RerankAsked):
        num_chars, most = _chars(asked.documents) + len(asked.query) * len(asked.documents), 1
    else:
        num_chars, most = 0, 1
    return num_chars // CHARS_PER_TOKEN, max(most or 0, 0)


def _longest_text(asked: Any) -> tuple[str, int]:
    if isinstance(asked, shapes.ChatAsked):
        return "messages", sum(map(_chars_of_message, asked.messages))
    if isinstance(asked, shapes.ConversationAsked):
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
    num_chars = _chars(message.content) + len(message.reasoning_content or "")
    return num_chars + sum(len(call.said) for call in message.tool_calls or ())


def _chars(content: str | Sequence[Piece] | None) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(map(_chars_of_piece, content)) if content else 0


def _chars_of_piece(piece: Piece) -> int:
    if isinstance(piece, str):
        return len(piece)
    if isinstance(piece, shapes.AnthropicTurn):
        return _chars(piece.content)
    if isinstance(piece, shapes.Item):
        return _chars(piece.content) + _chars(piece.output)
    if isinstance(piece, shapes.Block):
        num_chars = len(piece.thinking or "") + memoryview(piece.input).nbytes + _chars(piece.content)
        return num_chars + len(piece.text or "")
    return len(piece.text or "")


def _chars_of_text(text: shapes.Text) -> int:
    if isinstance(text, str):
        return len(text)
    return sum(len(one) if isinstance(one, str) else _num_ids(one) * CHARS_PER_TOKEN for one in text)


def _num_ids(one: int | list[int]) -> int:
    return 1 if isinstance(one, int) else len(one)


def num_texts(text: shapes.Text) -> int:
    """Return the number of texts; bare token ids together count as one."""
    if isinstance(text, str):
        return 1
    num_texts = sum(not isinstance(one, int) for one in text)
    return num_texts + (num_texts < len(text))


def _check(asked: Any) -> None:
    if isinstance(asked, shapes.Generating) and asked.n_predict is not None:
        _check_one_bound(asked)
    if asked.stream and isinstance(asked, _WHOLE) and not isinstance(asked, shapes.MessagesAsked):
        raise BadRequest("stream: this answer comes whole; leave it out.", param="stream")
    if isinstance(asked, shapes.ChatAsked):
        if not asked.messages or not all(map(_CONTENT, asked.messages)):
            check_chat(asked)
        if asked.tools is not None or asked.tool_choice is not None:
            tools = [tool.shown for tool in asked.tools or ()]
            _check_tools("tools[{}].function", tools)
            _check_choice(asked.tool_choice, [tool.name for tool in tools])
        if asked.store:
            raise BadRequest(f"store: {_NOT_KEPT}; leave it out.", param="store")
        _check_format(asked)
        if asked.chat_template_kwargs is not NULL:
            _check_schema("chat_template_kwargs", asked.chat_template_kwargs)
        if list in map(type, map(_CONTENT, asked.messages)):
            for param, part in _parts(asked):
                _check_part(param, part)
    elif isinstance(asked, shapes.CompletionAsked):
        num_prompts, n = num_texts(asked.prompt), max(asked.n or 1, asked.n_cmpl or 1)
        check_texts("prompt", asked.prompt, may_be_empty=n == 1)  # llama.cpp never ends several of nothing
        if num_prompts * n > NUM_CHOICES:
            text = f"{num_prompts} prompts with n={n} make more than {NUM_CHOICES} answers"
            raise BadRequest(f"prompt: {text}; send them in several requests.", param="prompt")
        if asked.max_completion_tokens is not None:
            text = "max_completion_tokens: the bound of a completion is `max_tokens`."
            raise BadRequest(text, param="max_completion_tokens")
        if asked.max_tokens == 0 and not asked.echo:
            raise BadRequest("max_tokens: 0 is allowed only with `echo`; ask for 1 or more.", param="max_tokens")
        if asked.best_of is not None and asked.best_of < n:
            raise BadRequest(f"best_of: {asked.best_of} is below n={n}.", param="best_of")
        _check_format(asked)
    elif isinstance(asked, shapes.EmbeddingAsked):
        num_inputs = num_texts(asked.input)
        check_texts("input", asked.input)
        if not 1 <= num_inputs <= NUM_INPUTS:
            raise BadRequest(f"input: {num_inputs} texts; 1 to {NUM_INPUTS} are allowed.", param="input")
    elif isinstance(asked, shapes.CountAsked):
        _check_anthropic(asked)
    elif isinstance(asked, shapes.ConversationAsked):
        _check_conversation(asked)
        if isinstance(asked, shapes.ResponseAsked):
            _check_response(asked)


def _check_one_bound(asked: shapes.Generating) -> None:
    """llama.cpp prefers `n_predict` to the API's own bound: they must agree."""
    for field in ("max_completion_tokens", "max_tokens"):
        most = getattr(asked, field, None)
        if most is not None and most != asked.n_predict:
            text = f"n_predict: {asked.n_predict} contradicts {field}: {most}; send one of them."
            raise BadRequest(text, param="n_predict")


def _check_anthropic(asked: shapes.CountAsked) -> None:
    check_turns(asked)
    if isinstance(asked, shapes.MessagesAsked) and asked.inference_geo not in (None, "global"):
        raise BadRequest("inference_geo: no place can be chosen here; leave it out.", param="inference_geo")
    num_bytes = num_repetitions = 0
    for i, tool in enumerate(asked.tools or ()):
        num_repetitions += _check_schema(f"tools[{i}].input_schema", tool.input_schema)
        num_bytes += memoryview(tool.input_schema).nbytes + len(tool.description or "")
    _check_tools_size(num_bytes, num_repetitions)
    choice = asked.tool_choice
    if choice is not None and choice.type in ("any", "tool"):
        ours = [tool.name for tool in asked.tools or () if tool.type in _OWN_TOOLS]
        _check_forced(ours, choice.name if choice.type == "tool" else None)
        if choice.type == "tool" and not choice.name:
            raise BadRequest("tool_choice.name is missing.", param="tool_choice.name")
    for param, part in _parts(asked):
        _check_part(param, part)


def _check_choice(choice: str | dict[str, Any] | None, tools: Sequence[str | None]) -> None:
    if choice is None or choice in ("auto", "none"):
        return
    if isinstance(choice, str):
        if choice != "required":
            raise BadRequest(f"tool_choice: `{choice}` is not one of auto, none and required.", param="tool_choice")
        _check_forced(tools, None)
    elif choice.get("type") == "allowed_tools":
        _check_forced(tools, None)
    else:
        _check_forced(tools, _named_tool(choice))


def _check_forced(tools: Sequence[str | None], name: str | None) -> None:
    if not tools:
        raise BadRequest("tool_choice: a call is asked for, and no tools are given.", param="tool_choice")
    if name and name not in tools:
        raise BadRequest(f"tool_choice: `{name[:100]}` is not one of the given tools.", param="tool_choice")


def _named_tool(choice: Mapping[str, Any]) -> str:
    """A chat has the name inside `function` or `custom`, a response beside `type`."""
    tool = choice.get("function") or choice.get("custom")
    name = tool.get("name") if isinstance(tool, dict) else choice.get("name")
    return name if isinstance(name, str) else ""


def _check_conversation(asked: shapes.ConversationAsked) -> None:
    check_response(asked)
    for i, item in enumerate(asked.input if isinstance(asked.input, list) else ()):
        if item.type in (None, "message") and item.content is None:
            raise BadRequest(f"input[{i}].content is missing.", param=f"input[{i}].content")
    for field in ("previous_response_id", "conversation", "background"):
        if getattr(asked, field, None):
            text = f"{field}: {_NOT_KEPT}; send the whole conversation as `input`."
            raise BadRequest(text, param=field)
    for param, part in _parts(asked):
        _check_part(param, part)


def _check_response(asked: shapes.ResponseAsked) -> None:
    for i, tool in enumerate(asked.tools or ()):
        if tool.type == "function" and not tool.name:
            raise BadRequest(f"tools[{i}].name is missing.", param=f"tools[{i}].name")
    _check_tools("tools[{}]", asked.tools or ())
    _check_choice(asked.tool_choice, [tool.name for tool in asked.tools or ()])
    if asked.text is not None and asked.text.format is not None:
        _check_schema("text.format.schema", asked.text.format.schema)


def _check_tools(where: str, tools: Sequence[shapes.Function | shapes.Custom | shapes.ResponseTool]) -> None:
    num_bytes = num_repetitions = 0
    for i, tool in enumerate(tools):
        num_bytes += len(tool.description or "")
        if not isinstance(tool, shapes.Custom):
            num_repetitions += _check_schema(f"{where.format(i)}.parameters", tool.parameters)
            num_bytes += memoryview(tool.parameters).nbytes
    _check_tools_size(num_bytes, num_repetitions)


def _check_tools_size(num_bytes: int, num_repetitions: int) -> None:
    if num_bytes > TOOLS_BYTES:
        raise BadRequest(f"tools: {num_bytes} bytes are more than {TOOLS_BYTES}.", param="tools")
    schemas.check_repetitions("tools", num_repetitions)


def _check_format(asked: shapes.ChatAsked | shapes.CompletionAsked) -> None:
    for field in _SCHEMAS:
        if (schema := getattr(asked, field)) is not NULL:
            schemas.check_schema(field, bytes(schema))
    for field in _GRAMMARS:
        if (grammar := getattr(asked, field)) is not None:
            schemas.check_repetitions(field, schemas.repetitions_of_text(grammar))
    if asked.response_format is not None:
        _check_schema("response_format.json_schema", asked.response_format.json_schema)
        _check_schema("response_format.schema", asked.response_format.schema)


def _check_schema(param: str, schema: msgspec.Raw) -> int:
    """Return how many repetitions it asks for."""
    if schema is NULL:
        return 0
    num = schemas.check_schema(param, bytes(schema))
    if not bytes(schema).startswith((b"{", b"null")):
        raise BadRequest(f"{param}: an object is expected.", param=param)
    return num


def _check_part(param: str, part: shapes.ContentPart | shapes.Block) -> None:
    if part.type in _WITH_TEXT and part.text is None:
        raise BadRequest(f"{param}.text is missing.", param=f"{param}.text")


def _parts(asked: Any) -> Iterator[tuple[str, shapes.ContentPart | shapes.Block]]:
    contents: Sequence[tuple[str, str | Sequence[shapes.ContentPart] | Sequence[shapes.Block] | None]]
    if isinstance(asked, shapes.CountAsked):
        turns = [(f"messages[{i}].content", turn.content) for i, turn in enumerate(asked.messages)]
        contents = [("system", asked.system), *turns]
        for where, blocks in turns:
            if isinstance(blocks, list):
                contents += [(f"{where}[{i}].content", block.content) for i, block in enumerate(blocks)]
    elif isinstance(asked, shapes.ChatAsked):
        contents = [
            (f"messages[{i}].content", m.content) for i, m in enumerate(asked.messages) if type(m.content) is list
        ]
    elif isinstance(asked, shapes.ConversationAsked) and isinstance(asked.input, list):
        contents = [(f"input[{i}].content", item.content) for i, item in enumerate(asked.input)]
        contents += [(f"input[{i}].output", item.output) for i, item in enumerate(asked.input)]
    else:
        return
    for where, content in contents:
        if isinstance(content, list):
            for i, part in enumerate(content):
                yield f"{where}[{i}]", part


_HINTS = {
    "stop": "; OpenAI's API takes at most 4, none of them empty",
    "functions": "; use `tools`",
    "function_call": "; use `tool_choice`",
    "audio": "; answers are texts",
    "prompt": "; none is kept here, so send its text",
}


def _wrong_field(text: str) -> BadRequest:
    """Find the field in msgspec's "... - at `$.messages[0].role`" or "... missing required field `model`"."""
    what, _, where = text.partition(" - at `")
    if what.startswith(_UNKNOWN):
        inside = where.removeprefix("$.").rstrip("`")
        name = (inside and f"{inside}.") + what.removeprefix(_UNKNOWN).rstrip("`")
        return BadRequest(f"{name}: this request has no such field.", param=name)
    param = where.partition("$")[2].rstrip("`").lstrip(".") or what.partition("missing required field `")[2].rstrip("`")
    if ".tool_calls[" in param and "field `type`" in what:
        what += ', which is "function" in OpenAI\'s API'
    hint = _HINTS.get(param.partition("[")[0], "")
    return BadRequest(f"{param}: {what}{hint}" if where else what, param=param or None)
