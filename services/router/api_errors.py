"""Errors in the shape of the API that a client speaks: OpenAI's object, or Anthropic's on the paths of its own.

What an engine answers instead of an answer is read here, whichever engine it is, and says the same in that shape: a
string for a code, the field where one is named, and a status that is about the client's request or about the engine.
"""

import re
from typing import Any

import msgspec

from glowplug.domain.errors import GlowplugError
from services.router.wire import MESSAGES, encode_json, is_anthropic

_RESPONSES = b"/v1/responses"
MESSAGE_CHARS = 2000  # of an engine's own words that a client gets
ENGINE_RETRY_S = 1.0  # after which a client asks again that an engine has sent away for now
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# llama.cpp says how many of how many in fields of their own; vLLM and the emulated engine in the sentence.
_TOO_LONG = re.compile(
    r"maximum context length|maximum model length|context (?:size|window|length)|longer than the context"
    r"|max_model_len",
    re.IGNORECASE,
)
_PROMPT_FIELDS = {
    b"/v1/chat/completions": "messages",
    MESSAGES: "messages",
    b"/v1/messages/count_tokens": "messages",
    b"/v1/completions": "prompt",
    b"/v1/rerank": "documents",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 503: "service_unavailable"}
_CODES = {
    400: "bad_request",
    404: "not_found",
    413: "request_too_large",
    415: "unsupported_media_type",
    422: "bad_request",
    429: "engine_overloaded",
    501: "not_supported",
    503: "engine_unavailable",
}


class ApiError(GlowplugError):
    """An error with a status, type and code of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.status, self.type, self.code = status, type, code


def refused(status: int, message: str, code: str = "bad_request", retry_after_s: float | None = None) -> ApiError:
    """What came cannot be taken as a request: the answer it gets, after which its connection is closed."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return ApiError(status, message, kind, code, retry_after_s=retry_after_s)


STOPPING = ApiError(503, "This router is stopping.", "service_unavailable", "router_stopping", retry_after_s=1.0)


def body(path: bytes, error: GlowplugError) -> bytes:
    """The error object of the answer to a request of `path`."""
    status, message = error.status, error.message
    if is_anthropic(path):
        kind = _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
        return encode_json({"type": "error", "error": {"type": kind, "message": message}})
    found = {"message": message, "type": error.type, "param": error.param, "code": error.code}
    return encode_json({"error": found})


def no_retry(error: GlowplugError) -> bytes:
    """A header line where asking again would not help. Clients do so by themselves after a 5xx; the SDKs of both APIs
    read this header."""
    return b"x-should-retry: false\r\n" if error.status == 501 else b""


def retry_after(error: GlowplugError) -> bytes:
    """A header line where it is known when to ask again."""
    return b"retry-after: %d\r\n" % round(error.retry_after_s) if error.retry_after_s else b""


def event(path: bytes, error: bytes) -> bytes:
    """One SSE event that carries such an object, after which a stream closes without the event that would end it."""
    if is_anthropic(path):
        return b"event: error\ndata: " + error + b"\n\n"
    if path == _RESPONSES:  # its events have a type each; clients of OpenAI's raise what stands in `error`
        found = msgspec.json.decode(error)
        fields = {k: found["error"][k] for k in ("message", "code", "param")}
        return b"event: error\ndata: " + encode_json({"type": "error", **fields, **found}) + b"\n\n"
    return b"data: " + error + b"\n\n"


def read(status: int, answer: bytes, path: bytes) -> ApiError:
    """Read an engine's answer that is no answer, with its HTTP status (one inside it counts where that is 200)."""
    found = _object(answer)
    message = _text(found.get("message")) or answer.decode("utf-8", "replace").strip() or f"HTTP status {status}"
    message = message[:MESSAGE_CHARS]
    inner = found.get("code")
    if status < 400:
        status = inner if type(inner) is int and 400 <= inner <= 599 else 502
    code, param = inner if type(inner) is str else "", found.get("param")
    too_long = _too_long(found, message) if status in (400, 413, 422) else ""
    if too_long:
        where = _PROMPT_FIELDS.get(path, "input")
        return ApiError(400, too_long, "invalid_request_error", "context_length_exceeded", where)
    if status in (401, 403):  # it is the router's key that the engine does not take: the client's is another
        return ApiError(502, "The engine refuses the router's key.", "server_error", "engine_refused_key")
    if status in (404, 405) and "does not exist" not in message:
        status, code, message = 501, "not_supported", f"The engine does not answer {path.decode()}: {message}"
    elif status == 404:
        code = "model_not_found"
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    code = code or _CODES.get(status) or ("engine_error" if status >= 500 else "bad_request")
    retry_after_s = ENGINE_RETRY_S if status in (429, 503) else None
    return ApiError(status, message, kind, code, param if type(param) is str and param else None, retry_after_s)


def _object(answer: bytes) -> dict[str, Any]:
    """The innermost object that says what is wrong: of OpenAI, Anthropic, llama.cpp, vLLM and FastAPI alike."""
    try:
        found = msgspec.json.decode(answer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    for name in ("error", "detail"):
        inner = found.get(name) if isinstance(found, dict) else None
        if isinstance(inner, dict):
            return inner
        if isinstance(inner, str):
            return {"message": inner, "code": found.get("code")}
        if isinstance(inner, list):
            return {"message": encode_json(inner).decode()}
    return found if isinstance(found, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _too_long(found: dict[str, Any], message: str) -> str:
    """What to say of a prompt that does not fit the context, in OpenAI's sentence where the numbers are known; "" when
    that is not what the engine says."""
    num_tokens, context = found.get("n_prompt_tokens"), found.get("n_ctx")
    is_told = found.get("type") == "exceed_context_size_error" or found.get("code") == "context_length_exceeded"
    if type(num_tokens) is int and type(context) is int and is_told:
        return (
            f"This model's maximum context length is {context} tokens. However, your request has {num_tokens} tokens. "
            "Please reduce its length."
        )
    return message if is_told or _TOO_LONG.search(message) else ""
