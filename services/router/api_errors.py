"""Errors in the shape of the client's API: OpenAI's, or on their own paths Anthropic's and Ollama's.

`read` turns any engine's error into it, with a status that tells the request's faults from the engine's.
"""

import re
from typing import Any

import msgspec

from glowplug.domain.errors import GlowplugError
from glowplug.services.router.wire import MESSAGES, encode_json, is_anthropic

OLLAMA = b"/api/"
MESSAGE_CHARS = 2000  # of an engine's message, for the client
ENGINE_RETRY_S = 1.0  # after an engine's 429 or 503
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
# llama.cpp has fields for these numbers; vLLM and the emulated engine put them in the sentence.
_TOO_LONG = re.compile(
    r"maximum context length|maximum model length|context (?:size|window|length)|longer than the context"
    r"|max_model_len",
    re.IGNORECASE,
)
# llama.cpp's 500 for a text to embed beyond its batch, which is its context (llamacpp_host.py).
_BATCH = re.compile(r"input \((\d+) tokens\) is too large to process\..*\(current batch size: (\d+)\)", re.DOTALL)
_PATH = re.compile(r"(?<![\w.:/])(?!/(?:v1|api)/)(?:file:/*(?=/))?(?:/[^\s/:;,'\"`()]+)+/([^\s/:;,'\"`()]+)")
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
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return ApiError(status, message, kind, code, retry_after_s=retry_after_s)


FAILED = refused(500, "The router failed.", "internal_error")
STOPPING = ApiError(503, "This router is stopping.", "service_unavailable", "router_stopping", retry_after_s=1.0)


def body(path: bytes, error: GlowplugError) -> bytes:
    status, message = error.status, _told(error)
    if path.startswith(OLLAMA):
        return encode_json({"error": message})
    if is_anthropic(path):
        kind = _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
        return encode_json({"type": "error", "error": {"type": kind, "message": message}})
    found = {"message": message, "type": error.type, "param": error.param, "code": error.code}
    return encode_json({"error": found})


def _told(error: GlowplugError) -> str:
    """Leave out what only the fleet's owner may read: the end of an engine's log, and folders of a node."""
    return error.message if error.status < 500 else _PATH.sub(r"\1", error.message.strip().partition("\n")[0])


def no_retry(error: GlowplugError) -> bytes:
    """Return the header that stops the SDKs of both APIs from retrying a 501, or b""."""
    return b"x-should-retry: false\r\n" if error.status == 501 else b""


def retry_after(error: GlowplugError) -> bytes:
    return b"retry-after: %d\r\n" % round(error.retry_after_s) if error.retry_after_s else b""


def event(path: bytes, error: bytes) -> bytes:
    """Return an error's SSE event; the stream closes after it, without its usual last event."""
    if is_anthropic(path):
        return b"event: error\ndata: " + error + b"\n\n"
    return b"data: " + error + b"\n\n"


def read(status: int, answer: bytes, path: bytes) -> ApiError:
    """Turn an engine's error answer into an ApiError. Below an HTTP `status` of 400 the answer's inner one counts."""
    found = _object(answer)
    message = _text(found.get("message")) or answer.decode("utf-8", "replace").strip() or f"HTTP status {status}"
    message = message[:MESSAGE_CHARS]
    inner = found.get("code")
    if status < 400:
        status = inner if type(inner) is int and 400 <= inner <= 599 else 502
    code, param = inner if type(inner) is str else "", found.get("param")
    too_long = _too_long(found, message) if status in (400, 413, 422) or _BATCH.search(message) else ""
    if too_long:
        where = _PROMPT_FIELDS.get(path, "input")
        return ApiError(400, too_long, "invalid_request_error", "context_length_exceeded", where)
    if status in (401, 403):  # the router's key, not the client's
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
    """Return the innermost error of an answer by OpenAI, Anthropic, llama.cpp, vLLM or FastAPI."""
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
    """Return the message for a too long prompt, with known numbers in OpenAI's sentence, or ""."""
    num_tokens, context = found.get("n_prompt_tokens"), found.get("n_ctx")
    if (batch := _BATCH.search(message)) is not None:
        return _too_many(int(batch[1]), int(batch[2]))
    is_told = found.get("type") == "exceed_context_size_error" or found.get("code") == "context_length_exceeded"
    if type(num_tokens) is int and type(context) is int and is_told:
        return _too_many(num_tokens, context)
    return message if is_told or _TOO_LONG.search(message) else ""


def _too_many(num_tokens: int, context: int) -> str:
    return (
        f"This model's maximum context length is {context} tokens. However, your request has {num_tokens} tokens. "
        "Please reduce its length."
    )
