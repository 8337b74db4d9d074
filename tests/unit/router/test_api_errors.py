"""Errors of engines, read into one shape, and each API's own."""

import json
from typing import Any

import pytest

from glowplug.domain.errors import BadRequest, EngineFailed, GlowplugError, NoCapacity
from glowplug.services.router import api_errors
from glowplug.services.router.api_errors import ApiError, read, refused

CHAT, MESSAGE = b"/v1/chat/completions", b"/v1/messages"
INVALID, SERVER = "invalid_request_error", "server_error"
LLAMA: dict[str, Any] = {"type": "exceed_context_size_error", "message": "no", "n_prompt_tokens": 31, "n_ctx": 10}
LARGE = "input (31 tokens) is too large to process. increase it (current batch size: 10)"
TOLD = "This model's maximum context length is 10 tokens. However, your request has 31 tokens."


def said(status: int, answer: Any, path: bytes = CHAT) -> ApiError:
    return read(status, answer if isinstance(answer, bytes) else json.dumps(answer).encode(), path)


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (400, {"error": {"message": "no", "code": "own", "param": "x"}}, (400, INVALID, "own", "x")),
        (400, {"error": {"message": "no", "code": 400, "param": ""}}, (400, INVALID, "bad_request", None)),
        (400, {"error": {"message": "no", "param": 5}}, (400, INVALID, "bad_request", None)),
        (499, {}, (499, INVALID, "bad_request", None)),
        (500, {}, (500, SERVER, "engine_error", None)),
        (504, {}, (504, SERVER, "engine_error", None)),
        (200, {"error": {"message": "no", "code": 400}}, (400, INVALID, "bad_request", None)),
        (200, {"error": {"message": "no", "code": 599}}, (599, SERVER, "engine_error", None)),
        (200, {"error": {"message": "no", "code": 399}}, (502, SERVER, "engine_error", None)),
        (200, {"error": {"message": "no", "code": 600}}, (502, SERVER, "engine_error", None)),
        (200, {"error": {"message": "no", "code": True}}, (502, SERVER, "engine_error", None)),
        (399, {"error": {"message": "no", "code": "own"}}, (502, SERVER, "own", None)),
        (400, {"error": {"message": "no", "code": 500}}, (400, INVALID, "bad_request", None)),
        (403, {"error": {"message": "no"}}, (502, SERVER, "engine_refused_key", None)),
        (404, {"error": {"message": "no", "code": "own"}}, (501, SERVER, "not_supported", None)),
        (405, {"error": {"message": "no"}}, (501, SERVER, "not_supported", None)),
        (406, {"error": {"message": "no"}}, (406, INVALID, "bad_request", None)),
        (405, {"error": {"message": "It does not exist."}}, (405, INVALID, "bad_request", None)),
        (404, {"error": {"message": "It does not exist.", "code": "own"}}, (404, INVALID, "model_not_found", None)),
        (413, {}, (413, INVALID, "request_too_large", None)),
        (400, {"error": LLAMA}, (400, INVALID, "context_length_exceeded", "messages")),
        (413, {"error": LLAMA}, (400, INVALID, "context_length_exceeded", "messages")),
        (422, {"error": LLAMA}, (400, INVALID, "context_length_exceeded", "messages")),
        (500, {"error": LLAMA}, (500, SERVER, "engine_error", None)),
        (500, {"error": {"message": LARGE}}, (400, INVALID, "context_length_exceeded", "messages")),
        (500, {"error": {"message": "the context window is small"}}, (500, SERVER, "engine_error", None)),
    ],
)
def test_an_engines_error_tells_the_requests_fault_from_its_own(
    status: int, answer: Any, expected: tuple[int, str, str, str | None]
) -> None:
    error = said(status, answer)
    assert (error.status, error.type, error.code, error.param) == expected
    assert error.retry_after_s is None


@pytest.mark.parametrize(
    ("status", "retry_after_s", "kind"),
    [(429, 1.0, "rate_limit_error"), (503, 1.0, "service_unavailable"), (502, None, SERVER)],
)
def test_a_busy_engine_may_be_asked_again(status: int, retry_after_s: float | None, kind: str) -> None:
    error = said(status, {"error": {"message": "busy"}})
    assert (error.retry_after_s, error.type) == (retry_after_s, kind)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": {"message": "a"}, "detail": "b"}, "a"),
        ({"error": None, "detail": {"message": "b"}}, "b"),
        ({"error": "a", "code": "own"}, "a"),
        ({"detail": [{"loc": ["body"]}]}, '[{"loc":["body"]}]'),
        ({"error": {"message": 5}}, '{"error": {"message": 5}}'),
        ({"message": "top"}, "top"),
        ([1], "[1]"),
        (b" plain \n", "plain"),
        (b"  ", "HTTP status 400"),
        ({"error": {"message": "x" * 2001}}, "x" * 2000),
        ({"error": LLAMA}, TOLD + " Please reduce its length."),
        ({"error": LLAMA | {"type": "x", "code": "context_length_exceeded"}}, TOLD + " Please reduce its length."),
        ({"error": LLAMA | {"type": "x"}}, "no"),
        ({"error": LLAMA | {"type": "x", "message": "beyond max_model_len"}}, "beyond max_model_len"),
        ({"error": LLAMA | {"n_ctx": "10"}}, "no"),
        ({"error": LLAMA | {"n_prompt_tokens": True}}, "no"),
        ({"error": {"message": LARGE}}, TOLD + " Please reduce its length."),
        ({"error": {"message": "over the Context Window"}}, "over the Context Window"),
    ],
)
def test_the_message_is_the_innermost_one(answer: Any, message: str) -> None:
    assert said(400, answer).message == message


def test_a_code_beside_a_text_is_kept() -> None:
    assert said(400, {"error": "a", "code": "own"}).code == "own"


@pytest.mark.parametrize(
    ("path", "param"),
    [(CHAT, "messages"), (b"/v1/completions", "prompt"), (b"/v1/rerank", "documents"), (b"/v1/embeddings", "input")],
)
def test_a_prompt_too_long_is_named_by_its_field(path: bytes, param: str) -> None:
    assert said(400, {"error": LLAMA}, path).param == param


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (refused(400, "no"), INVALID),
        (refused(404, "no"), "not_found_error"),
        (refused(418, "no"), INVALID),
        (refused(500, "no"), "api_error"),
        (NoCapacity("no"), "overloaded_error"),
        (refused(429, "no"), "rate_limit_error"),
    ],
)
def test_an_error_has_the_shape_of_its_path(error: GlowplugError, kind: str) -> None:
    assert json.loads(api_errors.body(MESSAGE, error)) == {"type": "error", "error": {"type": kind, "message": "no"}}
    assert json.loads(api_errors.body(b"/api/chat", error)) == {"error": "no"}
    assert json.loads(api_errors.body(CHAT, error)) == {
        "error": {"message": "no", "type": error.type, "param": None, "code": error.code}
    }


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("/srv/glow/models/a.gguf: no such file", "a.gguf: no such file"),
        ("weights: file:///srv/models/a.gguf, 'file:/srv/b.gguf'", "weights: a.gguf, 'b.gguf'"),
        ("\nllamacpp i-1: it ended (/usr/bin/x)\nload: /srv/a.gguf\n", "llamacpp i-1: it ended (x)"),
        ("https://hub.example/a/b: HTTP 404; s3://bucket/a/b", "https://hub.example/a/b: HTTP 404; s3://bucket/a/b"),
        ("The engine does not answer /v1/audio/speech: and/or /health", None),
    ],
)
def test_no_folder_of_a_node_and_no_engines_log_reach_a_client(message: str, told: str | None) -> None:
    assert json.loads(api_errors.body(CHAT, refused(503, message)))["error"]["message"] == (told or message)
    assert json.loads(api_errors.body(CHAT, refused(400, message)))["error"]["message"] == message, "the client's own"


def test_a_refusal_is_the_servers_fault_from_500_on() -> None:
    assert [refused(status, "no").type for status in (499, 500, 503)] == [INVALID, SERVER, SERVER]


@pytest.mark.parametrize(
    ("retry_after_s", "line"), [(None, b""), (0.0, b""), (1.6, b"retry-after: 2\r\n"), (60.0, b"retry-after: 60\r\n")]
)
def test_a_pause_is_told_in_whole_seconds(retry_after_s: float | None, line: bytes) -> None:
    assert api_errors.retry_after(BadRequest("no", retry_after_s=retry_after_s)) == line


def test_only_what_is_not_supported_is_not_to_be_tried_again() -> None:
    assert [bool(api_errors.no_retry(refused(status, "no"))) for status in (500, 501, 502)] == [False, True, False]


def test_an_error_event_has_the_shape_of_its_api() -> None:
    error = api_errors.body(CHAT, EngineFailed("lost", param="p"))
    assert api_errors.event(CHAT, error) == b"data: " + error + b"\n\n"
    assert api_errors.event(MESSAGE, error) == b"event: error\ndata: " + error + b"\n\n"
