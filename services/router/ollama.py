"""Ollama's API, translated to OpenAI's and back. Pure: bytes in, bytes out.

A `generate` becomes a chat of one message, or with `raw` a completion. Streams are lines of JSON, the default unless
`stream` is false. An empty request loads its model, as with Ollama. Times are nanoseconds: `load_duration` is the wait
for the model, the others are the engine's where known. Templates, models and `keep_alive` (by default none) are the
operator's decision.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from glowplug.domain.errors import BadRequest
from glowplug.domain.model import Model
from glowplug.services.router import paths
from glowplug.services.router.api_errors import ApiError
from glowplug.services.router.continuation import DONE, decode, events
from glowplug.services.router.sequences import add_call
from glowplug.services.router.wire import JSON_HEADERS, encode_json

CHAT, GENERATE, EMBED, EMBEDDINGS = b"/api/chat", b"/api/generate", b"/api/embed", b"/api/embeddings"
TAGS, PS, VERSION, SHOW, PULL = b"/api/tags", b"/api/ps", b"/api/version", b"/api/show", b"/api/pull"
ASKS = frozenset((CHAT, GENERATE, EMBED, EMBEDDINGS))
READS = frozenset((TAGS, PS, VERSION))
OPERATORS = frozenset((b"/api/create", b"/api/copy", b"/api/delete", b"/api/push"))
PATHS = paths.OLLAMA | OPERATORS
_CHATS, _COMPLETIONS, _EMBEDDINGS = b"/v1/chat/completions", b"/v1/completions", b"/v1/embeddings"
CAPABILITIES = (("completion", _CHATS.decode()), ("tools", _CHATS.decode()), ("embedding", _EMBEDDINGS.decode()))
LINES_HEADERS = b"content-type: application/x-ndjson\r\ncache-control: no-cache\r\n"
IS_KEPT = (
    "A model is unloaded by an operator (`glowplug unload`) or when its keep-alive is over, not over this port, unless "
    "its operator lets clients say so (GLOWPLUG_CLIENT_KEEP_ALIVE_S)."
)
IS_OPERATORS = "Models are deployed, changed and taken away by an operator (`glowplug deploy`), not over this port."
_OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "num_predict": "max_tokens",
}
_REPEAT = {"vllm": "repetition_penalty"}  # by engine; others: "repeat_penalty"
_OPERATORS_FIELDS = ("keep_alive", "template", "context", "truncate")
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
_LONGEST_DURATION = 40  # characters; longer texts are slow to parse
_AGES_S = 1e9  # in effect for ever
_REASONS = {"tool_calls": "stop", None: "stop"}
Clock = Callable[[], float]  # seconds, for durations


@dataclass(frozen=True, slots=True)
class Translated:
    """A translated request. `ignored`: the client's fields without effect."""

    path: bytes
    body: bytes
    answer: "OllamaAnswer"
    ignored: tuple[str, ...]


def read(body: bytes) -> dict[str, Any]:
    """Parse a request. Raises BadRequest."""
    try:
        found = decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest("The body is not a JSON object.")
    return found


def name_of(asked: dict[str, Any]) -> str:
    """Return the model's name, which older clients send as `name`. Raises BadRequest."""
    name = asked.get("model") or asked.get("name")
    if not isinstance(name, str):
        raise BadRequest("model is missing.", param="model")
    return name


def says_nothing(path: bytes, asked: dict[str, Any]) -> bool:
    """Return whether a request only loads or unloads its model. Raises BadRequest."""
    if path == CHAT:
        return not _list(asked, "messages")
    return path == GENERATE and not (asked.get("prompt") or asked.get("images"))


def keep_alive_s(asked: dict[str, Any], model: Model, most_s: float) -> float | None:
    """Return the idle seconds for which a client wants its model kept: 0 unloads at once, -1 is for ever. The longer of
    `most_s` and the model's keep-alive bounds them; negative wishes get that bound. None without a wish, or with
    `most_s` 0. Raises BadRequest."""
    said = asked.get("keep_alive")
    if said is None or said == "" or not most_s:
        return None
    wanted = _seconds(said)
    if model.keep_alive_s < 0:
        return -1.0 if wanted < 0 else wanted
    longest = max(most_s, model.keep_alive_s)
    return longest if wanted < 0 else min(wanted, longest)


def _seconds(said: Any) -> float:
    """Parse seconds, or a duration in Go's notation ("1h30m"). Raises BadRequest."""
    if isinstance(said, int | float) and not isinstance(said, bool):
        return float(min(max(said, -1), _AGES_S))
    if isinstance(said, str) and len(said) <= _LONGEST_DURATION:
        digits = said.lstrip("+-") if said[1:2] not in ("+", "-") else ""
        if said == "0" or (digits and not _PART.sub("", digits)):
            seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(digits))
            return -1.0 if said[0] == "-" and seconds else min(seconds, _AGES_S)
    raise BadRequest('keep_alive is neither seconds nor a duration such as "5m" or "1h30m".', param="keep_alive")


def unloaded(path: bytes, asked: dict[str, Any], clock: Clock) -> bytes:
    return Unloaded(name_of(asked), clock, is_chat=path == CHAT).whole(b"")


def translate(path: bytes, asked: dict[str, Any], model: Model, clock: Clock, *, keeps: bool = False) -> Translated:
    """Translate a request; `keeps`: its `keep_alive` is honoured. Raises BadRequest for a wrong type, ApiError for an
    operator's privilege."""
    name, fields = name_of(asked), dict[str, Any]()
    undone = [field for field in _OPERATORS_FIELDS if not (keeps and field == "keep_alive")]
    ignored = [field for field in undone if asked.get(field) not in (None, "", [])]
    if path in (EMBED, EMBEDDINGS):
        fields |= {"model": model.name, "encoding_format": "float"}
        fields["input"] = asked.get("input" if path == EMBED else "prompt", "")
        if asked.get("dimensions") is not None:
            fields["dimensions"] = asked["dimensions"]
        made = Embedded(name, clock, one=path == EMBEDDINGS)
        return Translated(_EMBEDDINGS, encode_json(fields), made, tuple(ignored))
    is_chat = path == CHAT
    messages = _list(asked, "messages") if is_chat else _as_messages(asked)
    streams = asked.get("stream") is not False
    if says_nothing(path, asked):
        if not keeps and asked.get("keep_alive") not in (None, "") and _seconds(asked["keep_alive"]) == 0:
            raise ApiError(501, IS_KEPT, "invalid_request_error", "not_supported")
        fields |= {"model": model.name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        return Translated(_CHATS, encode_json(fields), Loaded(name, clock, is_chat=is_chat), tuple(ignored))
    fields |= {"model": model.name, "stream": streams}
    if streams:
        fields["stream_options"] = {"include_usage": True}
    ignored += _take_options(fields, _dict(asked, "options"), model.engine)
    if (form := asked.get("format")) not in (None, ""):
        fields["response_format"] = _format(form)
    is_raw = not is_chat and (asked.get("raw") is True or asked.get("suffix"))
    answer = OllamaAnswer(name, clock, streams=streams, is_chat=is_chat)
    if is_raw:
        ignored += [field for field in ("images", "tools", "think", "system") if asked.get(field)]
        fields["prompt"] = asked.get("prompt", "")
        if asked.get("suffix"):
            fields["suffix"] = asked["suffix"]
        return Translated(_COMPLETIONS, encode_json(fields), answer, tuple(ignored))
    fields["messages"] = _messages(messages)
    if asked.get("tools"):
        fields["tools"] = _list(asked, "tools")
    if (think := asked.get("think")) is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": bool(think)}
        if isinstance(think, str):
            fields["reasoning_effort"] = think
    return Translated(_CHATS, encode_json(fields), answer, tuple(ignored))


def _list(asked: dict[str, Any], field: str) -> list[Any]:
    found = asked.get(field) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise BadRequest(f"{field} is not a list of objects.", param=field)
    return found


def _dict(asked: dict[str, Any], field: str) -> dict[str, Any]:
    found = asked.get(field) or {}
    if not isinstance(found, dict):
        raise BadRequest(f"{field} is not an object.", param=field)
    return found


def _as_messages(asked: dict[str, Any]) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": asked["system"]}] if asked.get("system") else []
    return [*system, {"role": "user", "content": asked.get("prompt", ""), "images": asked.get("images")}]


def _take_options(fields: dict[str, Any], options: dict[str, Any], engine: str) -> list[str]:
    """Set the known options' fields. Returns the names of the others."""
    ignored = []
    for name, value in options.items():
        field = _REPEAT.get(engine, "repeat_penalty") if name == "repeat_penalty" else _OPTIONS.get(name)
        if value is None:
            continue
        if field is None:
            ignored.append(f"options.{name}")
        elif name != "num_predict" or (isinstance(value, int) and value > 0):  # else: no bound
            fields[field] = value
    return ignored


def _format(form: Any) -> dict[str, Any]:
    if form == "json":
        return {"type": "json_object"}
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
    raise BadRequest('format is neither "json" nor a schema.', param="format")


def _messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ids to tool calls and their results, turn arguments into text and images into parts. Raises BadRequest."""
    made: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # (name, id) of calls without a result
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content", "")
        one: dict[str, Any] = {"role": role, "content": content}
        if images := message.get("images"):
            if not isinstance(images, list):
                raise BadRequest("images is not a list of texts.", param="images")
            urls = [{"type": "image_url", "image_url": {"url": _image(image)}} for image in images]
            one["content"] = [*([{"type": "text", "text": content}] if content else []), *urls]
        if calls := _list(message, "tool_calls"):
            one["tool_calls"] = [_call(call, f"call_{number}_{index}") for index, call in enumerate(calls)]
            open_calls = [(call["function"]["name"], call["id"]) for call in one["tool_calls"]]
        if role == "tool":
            one["tool_call_id"] = _result_of(message, open_calls)
        made.append(one)
    return made


def _image(image: Any) -> str:
    if not isinstance(image, str):
        raise BadRequest("images are texts in base64.", param="images")
    return image if image.startswith("data:") else f"data:image/png;base64,{image}"


def _call(call: Any, call_id: str) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRequest("tool_calls: each has a `function` with a `name`.", param="messages") from error
    text = arguments if isinstance(arguments, str) else encode_json(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _result_of(message: dict[str, Any], open_calls: list[tuple[str, str]]) -> str:
    """Return the id of the first open call of this name, else of the first open one."""
    if message.get("tool_call_id"):
        return str(message["tool_call_id"])
    name = message.get("tool_name") or message.get("name")
    found = next((call for call in open_calls if call[0] == name), open_calls[0] if open_calls else ("", "call_0_0"))
    if found in open_calls:
        open_calls.remove(found)
    return found[1]


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer:
    """The translation of a chat's or a completion's answer."""

    def __init__(self, name: str, clock: Clock, *, streams: bool, is_chat: bool) -> None:
        self.streams = streams
        self.headers = LINES_HEADERS if streams else JSON_HEADERS
        self.counts: tuple[int, int] | None = None
        self.counts_all = False
        self.nothing = b" "  # harmless before the next line of JSON
        self._name, self._clock, self._is_chat = name, clock, is_chat
        self._asked = self._began = clock()
        self._load_s = 0.0
        self._reason: str | None = None
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._calls: list[dict[str, Any]] = []

    def began(self, queue_s: float) -> None:
        self._began, self._load_s = self._clock(), queue_s

    def events(self, data: bytes) -> bytes:
        lines = []
        for _, event in events(data):
            found = decode(event) if event != DONE else None
            if not isinstance(found, dict):
                continue
            self._note(found)
            for choice in found.get("choices") or ():
                self._reason = choice.get("finish_reason") or self._reason
                delta = choice.get("delta") or {"content": choice.get("text")}
                for call in delta.get("tool_calls") or ():
                    add_call(self._calls, call)
                text, thinking = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning")
                if text or thinking:
                    lines.append(self._line(text, thinking or ""))
        return b"".join(lines)

    def _note(self, found: dict[str, Any]) -> None:
        self._usage = found.get("usage") or self._usage
        self._timings = found.get("timings") or self._timings

    def _made_calls(self) -> list[dict[str, Any]]:
        functions = [call["function"] for call in self._calls]
        return [{"function": {"name": one["name"], "arguments": _arguments(one["arguments"])}} for one in functions]

    def _line(
        self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = (), last: dict[str, Any] | None = None
    ) -> bytes:
        found: dict[str, Any] = {"model": self._name, "created_at": now()}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if thinking:
                message["thinking"] = thinking
            if calls:
                message["tool_calls"] = calls
            found["message"] = message
        else:
            found["response"] = text
            if thinking:
                found["thinking"] = thinking
        return encode_json(found | {"done": last is not None} | (last or {})) + b"\n"

    def end(self) -> bytes:
        before = self._line("", calls=self._made_calls()) if self._calls else b""
        return before + self._line("", last=self._last())

    def _last(self) -> dict[str, Any]:
        return {"done_reason": _REASONS.get(self._reason, self._reason), **self._told()}

    def _told(self) -> dict[str, int]:
        ended, timings = self._clock(), self._timings
        prompt_s = float(timings.get("prompt_ms", 0)) / 1000
        answer_s = float(timings.get("predicted_ms", 0)) / 1000 or max(ended - self._began - prompt_s, 0.0)
        return {
            "total_duration": _nanoseconds(ended - self._asked),
            "load_duration": _nanoseconds(self._load_s),
            "prompt_eval_count": int(self._usage.get("prompt_tokens") or 0),
            "prompt_eval_duration": _nanoseconds(prompt_s),
            "eval_count": int(self._usage.get("completion_tokens") or 0),
            "eval_duration": _nanoseconds(answer_s),
        }

    def whole(self, answer: bytes) -> bytes:
        found = decode(answer)
        self._note(found)
        choice = found["choices"][0]
        message = choice.get("message") or {"content": choice.get("text")}
        self._reason = choice.get("finish_reason")
        for index, call in enumerate(message.get("tool_calls") or ()):
            add_call(self._calls, {"index": index, **call})
        thinking = message.get("reasoning_content") or message.get("reasoning") or ""
        text = message.get("content") or ""
        return self._line(text, thinking, self._made_calls(), self._last())

    def error(self, error: bytes) -> bytes:
        found = decode(error)["error"]
        return encode_json({"error": found["message"] if isinstance(found, dict) else found})

    def error_event(self, error: bytes) -> bytes:
        return self.error(error) + b"\n"


class Loaded(OllamaAnswer):
    """The answer to an empty request: its one token, generated to load the model, is dropped."""

    reason = "load"

    def __init__(self, name: str, clock: Clock, *, is_chat: bool) -> None:
        super().__init__(name, clock, streams=False, is_chat=is_chat)

    def whole(self, answer: bytes) -> bytes:
        return self._line("", last={"done_reason": self.reason})


class Unloaded(Loaded):
    reason = "unload"


class Embedded(OllamaAnswer):
    """Embeddings. `one`: for the older path /api/embeddings, with a single text."""

    def __init__(self, name: str, clock: Clock, *, one: bool) -> None:
        super().__init__(name, clock, streams=False, is_chat=False)
        self._one = one

    def whole(self, answer: bytes) -> bytes:
        found = decode(answer)
        vectors = [row["embedding"] for row in sorted(found["data"], key=lambda row: row["index"])]
        if self._one:
            return encode_json({"embedding": vectors[0]})
        self._note(found)
        told = {key: value for key, value in self._told().items() if not key.startswith(("eval", "prompt_eval_d"))}
        return encode_json({"model": self._name, "embeddings": vectors, **told})


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:  # the tokens ran out within the arguments
        return {"": text}


def _nanoseconds(seconds: float) -> int:
    return round(max(seconds, 0.0) * 1e9)


# -- the models -------------------------------------------------------------------------------------------------------


def tag(model: Model) -> str:
    """Return the name with a tag, as Ollama's clients expect it."""
    return model.name if ":" in model.name else f"{model.name}:latest"


def row(model: Model, modified_s: float) -> dict[str, Any]:
    """`modified_s`: epoch seconds."""
    at = datetime.fromtimestamp(modified_s, UTC).isoformat().replace("+00:00", "Z")
    found = {"name": tag(model), "model": tag(model), "modified_at": at, "size": model.weights_bytes}
    return found | {"digest": model.weights.digest, "details": details(model)}


def details(model: Model) -> dict[str, Any]:
    kind = "gguf" if model.engine == "llamacpp" else "safetensors"
    named = {"parent_model": "", "format": kind, "family": model.engine, "families": [model.engine]}
    return named | {"parameter_size": "", "quantization_level": ""}


def shown(model: Model, capabilities: Sequence[str], modified_s: float) -> dict[str, Any]:
    """`modified_s`: epoch seconds."""
    listed = row(model, modified_s)
    info = {"general.architecture": model.engine, f"{model.engine}.context_length": model.context_tokens}
    found = {"modelfile": f"# {model.name} is deployed by a model file of Glowplug's", "parameters": "", "template": ""}
    return found | {
        "details": listed["details"],
        "model_info": info,
        "capabilities": list(capabilities),
        "modified_at": listed["modified_at"],
    }
