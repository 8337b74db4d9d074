"""OpenAI bodies and their checks. Errors name the field."""

import re
from collections.abc import Sequence as Items
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from glowplug_lab.emulated.text import LABEL, count_tokens

FINGERPRINT = "emulated"
MAX_STOP_STRINGS = 4
Prompts = str | list[int | str | list[int]]
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"missing required field `([^`]*)`")
T = TypeVar("T")


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": param, "code": code}}


class Body(msgspec.Struct, kw_only=True):
    model: str | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class GenerateBody(Body, kw_only=True):
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    n: Literal[1] | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    seed: int | None = None

    @property
    def num_wanted(self) -> int:
        """0: no bound."""
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def stops(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        return tuple(text for text in given if text)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else " ".join(str(part.get("text", "")) for part in parts)


class ChatBody(GenerateBody, kw_only=True):
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(GenerateBody, kw_only=True):
    prompt: Prompts


class EmbeddingBody(Body, kw_only=True):
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"


class TokenizeBody(Body, kw_only=True):
    prompt: str | None = None
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)] | None = None


class Generate(msgspec.Struct, frozen=True, kw_only=True):
    """`begun`: beginning of the answer, not part of the `prompt` that decides it."""

    body: GenerateBody
    model: str
    prompt: str
    num_prompt: int
    begun: str = ""


def bad(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def parse(raw: bytes, kind: type[T]) -> T:
    """Raises ApiError 400."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if (wrong := _named(str(error))) is None:
            raise ApiError(400, "the body must be a JSON object", code="invalid_json") from error
        raise bad(*wrong) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from error


def _named(message: str) -> tuple[str, str] | None:
    where, missing = _PATH.search(message), _MISSING.search(message)
    path = [where[1]] if where else []
    path += [missing[1]] if missing else []
    return (".".join(path), _PATH.sub("", message)) if path else None


def check_model(model: str | None, names: Items[str]) -> str:
    """Default to the engine's own name. Raises ApiError 404."""
    model = names[0] if model is None else model
    if model not in names:
        raise ApiError(404, f"The model `{model}` does not exist.", param="model", code="model_not_found")
    return model


def chat_prompt(messages: Items[Message], system_prompt: str) -> str:
    """The default system message is added if the client gives none."""
    parts = [f"{message.role}: {message.text}" for message in messages]
    if system_prompt and not (messages and messages[0].role == "system"):
        parts.insert(0, f"system: {system_prompt}")
    return "\n".join(parts)


def begun_chat(body: ChatBody) -> tuple[list[Message], str]:
    """Split off the assistant's last message if the answer continues it."""
    if not body.continue_final_message:
        return body.messages, ""
    if body.add_generation_prompt:
        raise bad("continue_final_message", "not allowed with add_generation_prompt")
    *before, last = body.messages
    if last.role != "assistant" or not isinstance(last.content, str):
        raise bad("continue_final_message", "the last message is not an assistant's text")
    return before, last.content


def begun_completion(prompt: str) -> tuple[str, str]:
    """Split (prompt, begun answer) at the answer's label."""
    at = prompt.find(LABEL)
    return (prompt[:at], prompt[at:]) if at > 0 else (prompt, "")


def texts_of(param: str, given: Prompts) -> list[tuple[str, int]]:
    """(text, tokens) of each prompt: a text, texts, token ids, or lists of them."""
    items: list[Any] = [given] if isinstance(given, str) or all(type(one) is int for one in given) else list(given)
    if not items or not all(items) or len({type(one) for one in items}) > 1 or type(items[0]) is int:
        raise bad(param, "a text, a list of texts or lists of token ids are expected")
    return [(one, count_tokens(one)) if isinstance(one, str) else (" ".join(map(str, one)), len(one)) for one in items]


def check_generate(wanted: Generate, context_tokens: int) -> None:
    """Raises ApiError 400."""
    body, num_prompt, max_tokens = wanted.body, wanted.num_prompt, wanted.body.num_wanted
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options", "only allowed with stream")
    if num_prompt + max(max_tokens, 1) > context_tokens:
        raise ApiError(
            400,
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{num_prompt + max_tokens} tokens ({num_prompt} in the messages, {max_tokens} in the completion).",
            param="messages",
            code="context_length_exceeded",
        )
