"""Several answers as one: their parts, their calls and one usage."""

import json
from typing import Any

import pytest

from glowplug.services.router import request_body, sequences
from glowplug.services.router.continuation import DONE_EVENT
from glowplug.services.router.sequences import Sequences, add_call, num_sequences
from tests.contract.continuation_rig import decoded, sse

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"


def asked(path: bytes, **fields: Any) -> tuple[bytes, Any]:
    body = json.dumps(
        {"model": "m", **({"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {}), **fields}
    ).encode()
    return body, request_body.read_body(path, body, request_body.readers())


@pytest.mark.parametrize(
    ("path", "fields", "num"),
    [
        (CHAT, {}, 1),
        (CHAT, {"n": 3}, 3),
        (CHAT, {"n": 2, "n_cmpl": 3}, 3),
        (COMPLETIONS, {"prompt": "a", "n": 2}, 2),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2}, 6),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 2),
    ],
)
def test_each_prompt_has_its_answers(path: bytes, fields: dict[str, Any], num: int) -> None:
    assert num_sequences(asked(path, **fields)[1]) == num


def test_the_engine_is_asked_for_a_stream_with_its_usage() -> None:
    for fields, streams, wants in (
        ({}, False, False),
        ({"stream": True, "stream_options": {"include_usage": False}}, True, False),
        ({"stream": True, "stream_options": {"include_usage": True}}, True, True),
    ):
        body, made = sequences.translate(*asked(CHAT, n=2, **fields))
        found = json.loads(body)
        assert (found["stream"], found["stream_options"], found["n"]) == (True, {"include_usage": True}, 2)
        assert (made.streams, bool(made._usage_event()), made.counts_all) == (streams, wants, True)


def chunk(index: int, usage: Any = None, **choice: Any) -> dict[str, Any]:
    more = {} if usage is None else {"usage": usage}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": index, **choice}], **more}


def used(prompt: int, made: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": made, **details}


TOTAL = ("prompt_tokens", "completion_tokens", "total_tokens")


def told(made: Sequences, *events: Any) -> list[Any]:
    return decoded(made.events(b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)))


def test_each_prompt_counts_once_and_every_answer() -> None:
    made = Sequences(True, True, 2)
    events = [
        chunk(0, used(5, 1, 2)),
        chunk(1, used(4, 2)),
        chunk(2, used(7, 3, 1)),
        chunk(3, used(0, 4)),
        chunk(0, "x"),
    ]
    shown = told(made, *events, 5, {"choices": [], "usage": None, "timings": {}})
    assert shown == [{name: value for name, value in one.items() if name != "usage"} for one in events]
    usage, done = decoded(made.events(b"data: [DONE]\n\n"))
    assert done == "[DONE]" and made.counts == (12, 10) and made.end() == b""
    total = {"prompt_tokens": 12, "completion_tokens": 10, "total_tokens": 22}
    assert usage == {"choices": [], "usage": total | {"prompt_tokens_details": {"cached_tokens": 2}}}


def test_a_chat_has_one_prompt_and_what_is_not_counted_is_nothing() -> None:
    for streams in (True, False):
        made = Sequences(streams, False, 2)
        none: dict[str, Any] = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": {}}
        assert told(made, {"choices": None, "usage": {}}, {"choices": [], "usage": none}) == []
        assert made._usage() == {**dict.fromkeys(TOTAL, 0), "prompt_tokens_details": {"cached_tokens": 0}}
        told(made, chunk(0, used(5, 1)), {"choices": [], "usage": used(5, 2)})
        assert made.events(DONE_EVENT) == (DONE_EVENT if streams else b"") and made.counts == (5, 3)


def test_parts_become_whole_choices_in_order() -> None:
    made = Sequences(False, False, 3)
    call: dict[str, Any] = {"index": 0, "id": "1", "function": {"name": "f", "arguments": "{"}}
    later = {"index": 0, "function": {"arguments": "}"}}
    assert told(
        made,
        chunk(1, delta={"role": "assistant", "content": "a"}, logprobs={"content": [1], "x": 1}),
        chunk(0, delta={"reasoning_content": "hm"}),
        chunk(1, delta={"content": "b"}, logprobs={"content": [2], "x": 2}, finish_reason="stop"),
        chunk(1, delta={"content": None}),
        chunk(2, delta={"tool_calls": [call]}),
        chunk(2, delta={"tool_calls": [later]}, finish_reason="tool_calls"),
        chunk(0, delta={"reasoning_content": "m"}) | {"timings": {}},
    ) == []  # fmt: skip
    whole = json.loads(made.end())
    assert (whole["id"], whole["object"]) == ("c", "chat.completion") and "timings" not in whole
    first, second, third = whole["choices"]
    assert first["message"] == {"role": "assistant", "content": None, "reasoning_content": "hmm"}
    assert (first["index"], first["finish_reason"], first["logprobs"]) == (0, None, None)
    assert (second["message"]["content"], second["finish_reason"]) == ("ab", "stop")
    assert second["logprobs"] == {"content": [1, 2], "x": 2}
    assert third["message"]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]


def test_completions_are_texts() -> None:
    made = Sequences(False, False, 1)
    made.events(sse({"object": "text_completion", "choices": [{"index": 0, "text": "a"}]}) * 2)
    whole = json.loads(made.end())
    assert whole["object"] == "text_completion"
    assert whole["choices"] == [{"index": 0, "logprobs": None, "finish_reason": None, "text": "aa"}]


def test_a_call_comes_in_pieces_and_others_beside_it() -> None:
    calls: list[dict[str, Any]] = []
    add_call(calls, {"index": 1, "id": "b", "function": {"name": "g"}})
    add_call(calls, {"id": "a", "function": {"name": "f", "arguments": "{"}})
    add_call(calls, {"index": 0, "function": None})
    add_call(calls, {"function": {"arguments": "}"}})
    assert calls == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
    ]
