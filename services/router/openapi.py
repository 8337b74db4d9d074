"""The OpenAPI document of the data port, from the shapes that it checks requests with.

It leaves `HEAD` out, which every `GET` here also answers. Answers are described in their essential parts: engines add
others.
"""

import re
from collections.abc import Iterator
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from glowplug import __version__
from glowplug.engines import apis
from glowplug.services.router import ollama
from glowplug.services.router import request_shapes as shapes
from glowplug.services.router.request_body import OPERATIONS, SHAPES
from glowplug.services.router.wire import encode_json

PATH = b"/openapi.json"
_JSON, _EVENTS, _LINES, _FORM = "application/json", "text/event-stream", "application/x-ndjson", "multipart/form-data"
_REF = "#/components/schemas/{name}"
_ERRORS = (400, 401, 403, 404, 405, 409, 413, 415, 429, 431, 500, 501, 502, 503, 504)
_WORDS = re.compile(r"[^A-Za-z0-9]+")
_TEXT: dict[str, Any] = {"type": "string"}
_OBJECT: dict[str, Any] = {"type": "object"}


class OpenAiFault(Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class OpenAiError(Struct):
    error: OpenAiFault


class AnthropicFault(Struct):
    type: str
    message: str


class AnthropicError(Struct):
    type: Literal["error"]
    error: AnthropicFault


class OllamaError(Struct):
    error: str


class Usage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None


class Answered(Struct):
    role: str
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(Struct):
    index: int
    message: Answered
    finish_reason: str | None


class Chat(Struct):
    object: str
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Struct):
    index: int
    text: str
    finish_reason: str | None


class Completion(Struct):
    object: str
    model: str
    choices: list[TextChoice]
    usage: Usage


class Vector(Struct):
    index: int
    embedding: list[float | None] | str


class Embeddings(Struct):
    data: list[Vector]
    model: str
    usage: Usage


class Response(Struct):
    id: str
    object: Literal["response"]
    status: str
    output: list[dict[str, Any]]


class Compaction(Struct):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]


class AnthropicMessage(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[dict[str, Any]]
    stop_reason: str | None
    usage: dict[str, Any]


class Count(Struct):
    input_tokens: int


class Ranked(Struct):
    index: int
    relevance_score: float


class Ranking(Struct):
    results: list[Ranked]


class ModelRow(Struct):
    """With the header `anthropic-version`: type, display_name, created_at."""

    id: str


class Models(Struct):
    data: list[ModelRow]


class Ready(Struct):
    ready: bool
    reason: str


class Row(Struct):
    """A file or a batch."""

    id: str
    object: str


class Rows(Struct):
    data: list[Row]
    has_more: bool


class BatchAsked(Struct):
    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


class OllamaAsked(Struct):
    """Other fields differ by path."""

    model: Annotated[str, Meta(min_length=1)]


_ANSWERS: dict[str, Any] = {
    apis.CHAT: Chat,
    apis.COMPLETIONS: Completion,
    apis.EMBEDDINGS: Embeddings,
    apis.RESPONSES: Response,
    apis.COMPACT: Compaction,
    apis.MESSAGES: AnthropicMessage,
    apis.COUNT_TOKENS: Count,
    apis.RERANK: Ranking,
}
_SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
_EXAMPLES: dict[str, dict[str, Any]] = {
    apis.CHAT: _SAID | {"max_tokens": 8},
    apis.COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 8},
    apis.EMBEDDINGS: {"input": "Why is the sky blue?"},
    apis.RESPONSES: {"input": "Why is the sky blue?", "max_output_tokens": 16},
    apis.COMPACT: {"input": "Why is the sky blue?"},
    apis.MESSAGES: _SAID | {"max_tokens": 8},
    apis.COUNT_TOKENS: _SAID,
    apis.RERANK: {"query": "sky", "documents": ["The sky is blue.", "Snow is white."]},
    "/api/chat": _SAID | {"options": {"num_predict": 8}},
    "/api/generate": {"prompt": "Why is the sky blue?", "options": {"num_predict": 8}},
    "/api/embed": {"input": "Why is the sky blue?"},
    "/api/show": {},
}
_ERRORS_OF = {"/api/": OllamaError, apis.MESSAGES: AnthropicError}  # by the path's beginning
_OTHERS = (OpenAiError, AnthropicError, OllamaError, Models, ModelRow, Ready, Row, Rows, BatchAsked, OllamaAsked)
_STREAMING = (shapes.Generating, shapes.MessagesAsked, shapes.ResponseAsked)


@cache
def document(*, strict: bool) -> bytes:
    """`strict`: unknown fields are refused."""
    describable = Describable()
    described = [describable.shape(shape, strict=strict) for shape in SHAPES.values()]
    _, components = msgspec.json.schema_components([*described, *_ANSWERS.values(), *_OTHERS], ref_template=_REF)
    paths = dict[str, dict[str, Any]]()
    for path, method, operation in _operations():
        name = _WORDS.sub("_", f"{method}{path}").strip("_")
        paths.setdefault(path, {})[method] = {"operationId": name} | operation
    errors = {
        shape.__name__: _content("An error.", {_JSON: _schema(shape)})
        for shape in (OpenAiError, AnthropicError, OllamaError)
    }
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    about = "Models served over the APIs of OpenAI, Anthropic and Ollama. Without keys in the fleet, none is asked for."
    return encode_json(
        {
            "openapi": "3.1.0",
            "info": {"title": "Glowplug", "version": __version__, "description": about},
            "security": [{"bearer": []}, {"key": []}, {}],
            "paths": paths,
            "components": {"schemas": components, "responses": errors, "securitySchemes": schemes},
        }
    )


class Describable:
    """Makes shapes that msgspec can describe: of `Raw` it cannot describe the default. A shape within itself is any
    object."""

    def __init__(self) -> None:
        self._made: dict[type[Struct], Any] = {}

    def shape(self, shape: type[Struct], *, strict: bool = True) -> Any:
        if shape not in self._made:
            self._made[shape] = dict[str, Any]
            fields = [
                (one.name, self._type(one.type), *(() if one.required else (None,)))
                for one in msgspec.structs.fields(shape)
            ]
            config = shape.__struct_config__
            self._made[shape] = msgspec.defstruct(
                shape.__name__,
                fields,
                kw_only=True,
                forbid_unknown_fields=strict and config.forbid_unknown_fields,
                tag_field=config.tag_field,
                tag=config.tag,
            )
        return self._made[shape]

    def _type(self, kind: Any) -> Any:
        if kind is msgspec.Raw:
            return Any
        if isinstance(kind, type) and issubclass(kind, Struct):
            return self.shape(kind)
        origin = get_origin(kind)
        if origin is None or origin is Literal:
            return kind
        if origin is Annotated:
            return Annotated[(self._type(kind.__origin__), *kind.__metadata__)]
        inside = tuple(map(self._type, get_args(kind)))
        return reduce(or_, inside) if origin in (Union, UnionType) else origin[inside]


def _operations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (path, method, operation)."""
    for each in OPERATIONS:
        path, shape = each.decode(), SHAPES.get(each)
        answer = {_JSON: _schema(_ANSWERS.get(path, _OBJECT))}
        if shape is not None and issubclass(shape, _STREAMING):
            answer[_EVENTS] = {"description": "Where `stream` is true."}
        if path == apis.SPEECH:
            answer = {"*/*": {}}
        form = {"type": "object", "properties": {"model": _TEXT, "file": _TEXT}, "required": ["model", "file"]}
        asked = {_FORM: form} if shape is None else {_JSON: _schema(shape)}
        yield path, "post", _operation(path, answer, asked)
    yield "/", "get", _operation("/", {_JSON: _OBJECT, "text/html": _TEXT})
    for path in ("/openapi.json", "/health", "/live", "/livez"):
        yield path, "get", _operation(path, {_JSON: _OBJECT})
    for path in ("/ready", "/readyz"):
        operation = _operation(path, {_JSON: _schema(Ready)})
        operation["responses"]["503"] = _content("It takes no requests.", {_JSON: _schema(Ready)})
        yield path, "get", operation
    yield "/v1/models", "get", _operation("/v1/models", {_JSON: _schema(Models)})
    yield from _of_one("/v1/models/{model}", {_JSON: _schema(ModelRow)})
    yield from _ollama()
    yield from _files()


def _ollama() -> Iterator[tuple[str, str, dict[str, Any]]]:
    asked, answer = {_JSON: _schema(OllamaAsked)}, {_JSON: _OBJECT}
    for each in sorted(ollama.PATHS):
        path = each.decode()
        if each in ollama.READS:
            yield path, "get", _operation(path, answer)
        else:
            streams = {_LINES: _TEXT} if each in (ollama.CHAT, ollama.GENERATE, ollama.PULL) else {}
            yield path, "post", _operation(path, answer | streams, asked)


def _files() -> Iterator[tuple[str, str, dict[str, Any]]]:
    form = {"type": "object", "properties": {"purpose": {"const": "batch"}, "file": _TEXT}}
    row, rows = {_JSON: _schema(Row)}, {_JSON: _schema(Rows)}
    for path, asked in (("/v1/files", {_FORM: form}), ("/v1/batches", {_JSON: _schema(BatchAsked)})):
        yield path, "post", _operation(path, row, asked)
        yield path, "get", _operation(path, rows)
        yield from _of_one(f"{path}/{{id}}", row)
    yield from _of_one("/v1/files/{id}", {_JSON: _OBJECT}, "delete")
    yield from _of_one("/v1/files/{id}/content", {"application/octet-stream": {}})
    yield from _of_one("/v1/batches/{id}/cancel", row, "post")


def _of_one(path: str, answer: dict[str, Any], method: str = "get") -> Iterator[tuple[str, str, dict[str, Any]]]:
    name = path.partition("{")[2].partition("}")[0]
    parameter = {"name": name, "in": "path", "required": True, "schema": _TEXT | {"minLength": 1}}
    yield path, method, _operation(path, answer) | {"parameters": [parameter]}


def _operation(path: str, answer: dict[str, Any], asked: dict[str, Any] | None = None) -> dict[str, Any]:
    shape = next((shape for begin, shape in _ERRORS_OF.items() if path.startswith(begin)), OpenAiError)
    errors = {str(status): {"$ref": f"#/components/responses/{shape.__name__}"} for status in _ERRORS}
    body = {"requestBody": {"required": True} | _content("", asked)} if asked else {}
    if (example := _EXAMPLES.get(path)) is not None:
        body["requestBody"]["content"][_JSON]["example"] = {"model": "smol-chat"} | example
    return body | {"responses": {"200": _content("The answer.", answer)} | errors}


def _content(description: str, by_type: dict[str, Any]) -> dict[str, Any]:
    content = {"content": {kind: {"schema": schema} for kind, schema in by_type.items()}}
    return {"description": description} | content if description else content


def _schema(shape: Any) -> dict[str, Any]:
    return shape if isinstance(shape, dict) else {"$ref": _REF.format(name=shape.__name__)}
