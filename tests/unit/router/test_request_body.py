"""Tokens of a request without a tokenizer."""

import json
from typing import Any

import pytest

from services.router.request_body import read_body, sizes

CHAT, COMPLETION, EMBEDDING, RESPONSE = (
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/embeddings",
    b"/v1/responses",
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 80}], "max_tokens": 7}, (20, 7)),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 80}], "max_completion_tokens": 9}, (20, 9)),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": None}]}, (10, 0)),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 40}], "max_tokens": -5}, (10, 0)),
        (CHAT, {"messages": []}, (0, 0)),
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 3}, (10, 3)),
        (COMPLETION, {"prompt": [1, 22, 333]}, (3, 0)),
        (EMBEDDING, {"input": "x" * 40}, (10, 1)),
        (RESPONSE, {"input": "x" * 40}, (10, 0)),
    ],
)
def test_four_characters_are_a_token(path: bytes, body: dict[str, Any], wanted: tuple[int, int]) -> None:
    assert sizes(read_body(path, json.dumps({"model": "m"} | body).encode())) == wanted


def test_an_image_is_no_text() -> None:
    text = {"type": "text", "text": "x" * 400}
    body = {"model": "m", "messages": [{"role": "user", "content": [text, IMAGE]}]}
    assert 100 <= sizes(read_body(CHAT, json.dumps(body).encode()))[0] < 120
