"""OpenAI bodies: what a request must look like, and how an answer is built. Errors name the field."""

import json
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from glowplug.engines.emulated_host.text import LABEL, count_tokens

FINGERPRINT = "emulated"
MAX_STOP_STRINGS = 4


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape."""

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


def bad(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """A checked request for text. `max_tokens` is 0 when the client sets none. `begun`: what of the answer is there
    already, which is a part of what is read and not of the `prompt` that the answer depends on."""

    model: str
    prompt: str
    num_prompt: int
    max_tokens: int
    min_tokens: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignore_eos: bool
    seed: int
    begun: str = ""


def parse_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError 400."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_model(body: dict[str, Any], names: Items[str]) -> str:
    model = body.get("model", names[0])
    if not isinstance(model, str):
        raise bad("model", "a string is expected")
    if model not in names:
        raise ApiError(404, f"The model `{model}` does not exist.", param="model", code="model_not_found")
    return model


def chat_prompt(body: dict[str, Any], system_prompt: str) -> str:
    """All messages as one text. A default system message comes first when the client gives none."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages", "a list with at least one message is expected")
    parts = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise bad(f"messages[{i}].role", "a string is expected")
        parts.append(f"{message['role']}: {_content(message.get('content'), i)}")
    if system_prompt and messages[0]["role"] != "system":
        parts.insert(0, f"system: {system_prompt}")
    return "\n".join(parts)


def begun_chat(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(the body without it, the last message) where that is one of the assistant's that the answer goes on with."""
    if not _flag(body, "continue_final_message"):
        return body, ""
    if _flag(body, "add_generation_prompt"):
        raise bad("continue_final_message", "not allowed with add_generation_prompt")
    given = body.get("messages")
    messages = given if isinstance(given, list) else []
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise bad("messages", "the last one is no text of the assistant's that could be continued")
    return body | {"messages": messages[:-1]}, last["content"]


def begun_completion(prompt: str) -> tuple[str, str]:
    """(prompt, answer) of a prompt with the beginning of an answer behind it, which its label tells."""
    at = prompt.find(LABEL)
    return (prompt[:at], prompt[at:]) if at > 0 else (prompt, "")


def _content(content: Any, i: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return " ".join(str(part.get("text", "")) for part in content)
    raise bad(f"messages[{i}].content", "a string or a list of parts is expected")


def completion_prompt(body: dict[str, Any]) -> tuple[str, int]:
    """(text, number of tokens) of `prompt`: a string, a list with one string, or a list of token ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, count_tokens(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return " ".join(map(str, prompt)), len(prompt)
    raise bad("prompt", "one string or one list of token ids is expected")


def check_generate(
    body: dict[str, Any], model: str, prompt: str, num_prompt: int, context_tokens: int, begun: str = ""
) -> Generate:
    """Check every field that means something here. Raises ApiError 400; unknown fields are left alone."""
    max_tokens = _whole(body, "max_completion_tokens", 1) or _whole(body, "max_tokens", 1)
    for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0)):
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise bad(name, "a number is expected")
        if value is not None and not low <= value <= high:
            raise bad(name, f"between {low:g} and {high:g}")
    if body.get("n") not in (None, 1) or isinstance(body.get("n"), bool):
        raise bad("n", "only 1 is supported")
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise bad("stream_options", "an object is expected")
    stream = _flag(body, "stream")
    if options is not None and not stream:
        raise bad("stream_options", "only allowed with stream")
    if num_prompt + max(max_tokens, 1) > context_tokens:
        raise ApiError(
            400,
            f"This model's maximum context length is {context_tokens} tokens. However, you requested "
            f"{num_prompt + max_tokens} tokens ({num_prompt} in the messages, {max_tokens} in the completion).",
            param="messages",
            code="context_length_exceeded",
        )
    return Generate(
        model=model,
        prompt=prompt,
        num_prompt=num_prompt,
        max_tokens=max_tokens,
        min_tokens=_whole(body, "min_tokens", 0),
        stop=_stops(body.get("stop")),
        stream=stream,
        include_usage=_flag(options or {}, "include_usage"),
        ignore_eos=_flag(body, "ignore_eos"),
        seed=_whole(body, "seed", None),
        begun=begun,
    )


def _whole(body: dict[str, Any], name: str, least: int | None) -> int:
    value = body.get(name)
    if value is None:
        return 0
    if type(value) is not int:
        raise bad(name, "a whole number is expected")
    if least is not None and value < least:
        raise bad(name, f"at least {least}")
    return value


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad(name, "true or false is expected")
    return value


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise bad("stop", "a string or a list of strings is expected")
    if len(stops) > MAX_STOP_STRINGS:
        raise bad("stop", f"at most {MAX_STOP_STRINGS}")
    return tuple(item for item in stops if item)
