"""Forced calls and structures, translated to chats of llama.cpp and back. Over a data port:
tests/contract/test_data_port_forced.py"""

import json
from typing import Any

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.services.router import forced_tools, messages_as_chat
from glowplug.services.router.forced_tools import ForcedCall, one_call_of, read_call
from glowplug.services.router.messages_as_chat import MessageAnswer
from glowplug.services.router.request_body import read_body

USER = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
CALL = '{"name": "f", "arguments": {"a": 1}}'
FORM = {"type": "json_schema", "schema": SCHEMA}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2}
DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def told(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.partition(b"data: ")[2]) for block in data.split(b"\n\n") if b"data: {" in block]


# -- calls of chats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL, ("f", '{"a": 1}', True)),
        (' ```json\n{"name":"f","arguments":{"a": 1}}', ("f", '{"a": 1}}', False)),
        ('{"name": "f", "arguments": {"a": ', ("f", '{"a": ', False)),
        ('{"name": "\\"f", "arguments": {} }  ', ('"f', "{}", True)),
        ('{"name": "f"', ("", '{"name": "f"', False)),
        ("", ("", "", False)),
    ],
)
def test_a_call_is_read_from_its_text_or_its_beginning(text: str, expected: tuple[str, str, bool]) -> None:
    assert read_call(text) == expected


def test_definitions_move_to_the_root_once_for_all_tools() -> None:
    shared = {"p": {"type": "string"}}
    tools: list[dict[str, Any]] = [
        {"name": "f", "parameters": SCHEMA | {"$defs": shared}},
        {"name": "g", "parameters": SCHEMA | {"$defs": shared | {"q": {}}, "definitions": shared}},
        {"name": "h"},
        {"name": "i", "parameters": {"$defs": None}},
    ]
    schema = one_call_of(tools)["json_schema"]["schema"]
    assert schema.keys() == {"anyOf", "$defs", "definitions"}
    assert (schema["$defs"], schema["definitions"]) == (shared | {"q": {}}, shared)
    assert [one["properties"]["arguments"] for one in schema["anyOf"]] == [SCHEMA, SCHEMA, NOTHING, {}]
    assert all(one["required"] == ["name", "arguments"] for one in schema["anyOf"])
    assert one_call_of(tools[2:3])["json_schema"]["schema"]["properties"]["name"] == {"const": "h"}
    assert tools[0]["parameters"]["$defs"] == shared, "the client's tools stay"
    with pytest.raises(BadRequest, match="`p` differently") as refused:
        one_call_of([tools[0], {"name": "g", "parameters": {"$defs": {"p": {}}}}])
    assert refused.value.param == "tools"


def test_the_schema_of_a_call_has_no_texts_for_the_reader() -> None:
    one = {
        "type": "string",
        "description": "A city.",
        "title": "C",
        "default": "Rome",
        "enum": ["Rome", {"title": "R"}],
    }
    names = {"description": one, "title": {"type": "array", "items": one, "prefixItems": [one]}}
    schema = {"$schema": "https://json-schema.org", "type": "object", "description": "It.", "properties": names}
    form = one_call_of([{"name": "f", "parameters": schema, "description": "F"}])["json_schema"]["schema"]
    left = {"type": "string", "enum": one["enum"]}
    expected = {"description": left, "title": {"type": "array", "items": left, "prefixItems": [left]}}
    assert form["properties"]["arguments"] == {"type": "object", "properties": expected}


def test_too_large_a_schema_of_calls_names_the_tools() -> None:
    parameters = {"type": "object", "properties": {"a": {"enum": ["x" * 9000]}}}
    with pytest.raises(BadRequest, match=r"^tools: \d+ bytes") as refused:
        one_call_of([{"name": name, "parameters": parameters} for name in "fg"])
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("first", "system"),
    [
        ({"role": "system", "content": "s"}, "s\n\n"),
        ({"role": "developer", "content": "s"}, "s\n\n"),
        ({"role": "system", "content": [{"type": "text", "text": "s"}]}, ""),
        (USER, ""),
    ],
)
def test_a_chat_is_told_its_tools_beside_its_own_instructions(first: dict[str, Any], system: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [
        first,
        {"role": "assistant", "content": [{"type": "text", "text": "so"}, 5], "tool_calls": [call, call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}, {"type": "image"}]},
        {"role": "tool", "tool_call_id": "1", "content": None},
        USER,
    ]
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]
    fields = {"messages": chat, "tools": tools, "parallel_tool_calls": True, "stream": True}
    choice = {"type": "function", "function": {"name": "g"}}
    body, made = forced_tools.translate(json.dumps(fields | {"tool_choice": choice}).encode(), "r")
    asked = json.loads(body)
    assert made.streams and asked.keys() == {"messages", "stream", "response_format"}
    assert asked["response_format"]["json_schema"]["schema"]["properties"]["name"] == {"const": "g"}
    said, *rest = asked["messages"]
    assert said["role"] == "system" and said["content"].startswith(f"{system}Answer by calling")
    assert said["content"].endswith('{"name":"g"}')
    line = '{"name": "f", "arguments": {}}'
    assert rest == [
        *([] if system else [first]),
        {"role": "assistant", "content": f"so\n{line}\n{line}"},
        {"role": "assistant", "content": line},
        {"role": "user", "content": "The function's result: x"},
        {"role": "user", "content": "The function's result: "},
        USER,
    ]


def test_a_chats_only_forced_choices_are_translated() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice, can in (("required", True), (tools[0], True), ("auto", False), (None, False), ({"type": "x"}, False)):
        asked = {"model": "m", "messages": [USER], "tools": tools, "tool_choice": choice}
        assert forced_tools.can(read_body(b"/v1/chat/completions", json.dumps(asked).encode())) is can


def test_a_streamed_call_comes_whole_with_its_end() -> None:
    made = ForcedCall(True, "r")

    def part(index: int, reason: str | None = None, **delta: Any) -> bytes:
        return event(choices=[{"index": index, "delta": delta, "finish_reason": reason}])

    first = told(made.events(part(0, role="assistant", content=None) + part(1, role="assistant")))
    assert [one["choices"][0]["delta"] for one in first] == [{"role": "assistant", "content": None}] * 2
    assert (
        made.events(part(0, content=CALL[:9]) + part(1, content='{"name": "g", "arguments": {') + b"data: [5]\n\n")
        == b""
    )
    assert told(made.events(part(0, reasoning_content="hm")))[0]["choices"][0]["delta"] == {"reasoning_content": "hm"}
    assert made.events(part(0, content=CALL[9:])) == b""
    data = made.events(part(0, "stop") + part(1, "length", x=1) + event(choices=[], usage=USAGE) + DONE)
    whole, cut, usage = told(data)
    call = {"id": "call_r", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert whole["choices"] == [
        {"index": 0, "delta": {"tool_calls": [{"index": 0, **call}]}, "finish_reason": "tool_calls"}
    ]
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["delta"]["x"]) == ("length", 1)
    assert cut["choices"][0]["delta"]["tool_calls"][0]["function"] == {"name": "g", "arguments": "{"}
    assert usage["usage"] == USAGE and data.endswith(DONE) and made.end() == b""


def test_a_call_in_one_piece_replaces_the_text() -> None:
    choices = [
        {"index": 0, "message": {"role": "assistant", "content": CALL}, "finish_reason": "stop"},
        {"index": 1, "message": {"role": "assistant", "content": None}, "finish_reason": "length"},
    ]
    found = json.loads(ForcedCall(False, "r").whole(json.dumps({"choices": choices, "usage": USAGE}).encode()))
    assert [one["finish_reason"] for one in found["choices"]] == ["tool_calls", "length"]
    assert [one["message"]["content"] for one in found["choices"]] == [None, None] and found["usage"] == USAGE
    (call,) = found["choices"][0]["message"]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call_r", "f")


# -- messages ----------------------------------------------------------------------------------------------------------


def message(**over: Any) -> tuple[dict[str, Any], MessageAnswer]:
    fields = {"model": "m", "max_tokens": 9, "messages": [USER], "output_config": {"format": FORM}} | over
    body = json.dumps(fields).encode()
    made, answer = messages_as_chat.translate(body, read_body(b"/v1/messages", body), "r", 12)
    return json.loads(made), answer


@pytest.mark.parametrize(
    ("fields", "can"),
    [
        ({}, False),
        ({"tool_choice": {"type": "auto"}}, False),
        ({"tool_choice": {"type": "any"}, "tools": [{"name": "f"}]}, True),
        ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [{"name": "f"}]}, True),
        ({"output_config": {"effort": "low"}}, False),
        ({"output_config": {"format": FORM}}, True),
        ({"output_format": FORM}, True),
        ({"output_format": {}}, False),
    ],
)
def test_a_message_is_translated_for_a_structure_or_a_call(fields: dict[str, Any], can: bool) -> None:
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": [USER]} | fields).encode()
    assert messages_as_chat.can(read_body(b"/v1/messages", body)) is can


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"tools": None, "tool_choice": None, "stop": None, "stream_options": None, "temperature": None}),
        ({"temperature": 0, "top_p": None, "stream": False}, {"temperature": 0, "top_p": None, "stream": False}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"stop_sequences": []}, {"stop": None}),
        ({"tools": [{"name": "f"}], "tool_choice": {"type": "none"}}, {"tools": None}),
        ({"tools": []}, {"tools": None}),
        ({"tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}]},
         {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "description": "d"}}]}),
        ({"tools": [{"name": "f", "description": ""}]},
         {"tools": [{"type": "function", "function": {"name": "f", "parameters": NOTHING}}]}),
        ({"output_config": {"format": {}}, "output_format": FORM},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}),
        ({"output_config": None}, {"response_format": None}),
    ],
)  # fmt: skip
def test_a_message_has_a_chats_fields(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found, _ = message(**fields)
    assert {name: found.get(name) for name in expected} == expected


def test_a_message_with_a_forced_call_may_have_any_of_its_tools_or_the_named_one() -> None:
    tools = [{"name": "f"}, {"name": "g"}]
    for choice, names in (({"type": "any"}, "fg"), ({"type": "tool", "name": "g"}, "g")):
        found, answer = message(tools=tools, tool_choice=choice, output_config=None)
        schema = found["response_format"]["json_schema"]["schema"]
        assert [one["properties"]["name"]["const"] for one in schema.get("anyOf", [schema])] == [*names]
        assert answer.call is not None
    assert message(tools=tools)[1].call is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"output_config": {"format": FORM | {"type": "json_object"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"format": [1]}}, "output_config.format"),
        ({"output_config": None, "output_format": {"type": "json_schema", "schema": []}}, "output_format"),
        ({"output_config": {"format": FORM | {"schema": {"a": "x" * (16 * 1024 - 7)}}}}, "output_config.format.schema"),
    ],
)
def test_a_structure_that_is_none_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        message(**fields)
    assert refused.value.param == param
    message(output_config={"format": FORM | {"schema": {"a": "x" * (16 * 1024 - 8)}}})


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def test_turns_become_messages_with_calls_results_and_thoughts_of_their_own() -> None:
    data = {"type": "base64", "media_type": "image/png", "data": "AA"}
    turns = [
        {"role": "user", "content": [block("text", text="a"), block("text", text="b")]},
        {"role": "assistant", "content": [
            block("thinking", thinking="x"), block("thinking", thinking="y"), block("redacted_thinking", data="z"),
            block("tool_use", id="1", name="f", input={"a": 1}), block("tool_use", id="2")]},
        {"role": "user", "content": [
            block("tool_result", tool_use_id="1", content="one"), block("tool_result", tool_use_id="2"),
            block("text", text="go"), block("image", source=data)]},
        {"role": "user", "content": [block("image", source={"type": "url", "url": "http://x/y"})]},
        {"role": "assistant", "content": [block("thinking", thinking="only")]},
        {"role": "user", "content": [block("tool_result", tool_use_id="3", content=[block("text", text="t")])]},
    ]  # fmt: skip
    found, _ = message(system=[block("text", text="s1"), block("text", text="s2")], messages=turns)
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "2", "type": "function", "function": {"name": "", "arguments": "{}"}},
    ]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    assert found["messages"] == [
        {"role": "system", "content": "s1s2"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "xy"},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": [block("text", text="go"), picture]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]},
        {"role": "assistant", "content": "", "reasoning_content": "only"},
        {"role": "tool", "tool_call_id": "3", "content": "t"},
    ]
    assert message(system="s")[0]["messages"] == [{"role": "system", "content": "s"}, USER]


def chunk(reason: str | None = None, **delta: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": reason}])


def test_a_streamed_message_numbers_its_blocks() -> None:
    _, made = message(stream=True)
    calls = [{"index": n, "function": {"name": name, "arguments": "{"}} for n, name in enumerate("fg")]
    data = chunk(role="assistant") + chunk(reasoning_content="a") + chunk(reasoning_content="b") + chunk(content="c")
    data += (
        chunk(content="d") + chunk(tool_calls=calls) + chunk(tool_calls=[{"index": 1, "function": {"arguments": "}"}}])
    )
    data += chunk("tool_calls") + event(choices=[], usage=USAGE) + b"data: [1]\n\n" + DONE + event(choices=[])
    start, *seen = told(made.events(data) + made.end())
    assert (start["message"]["id"], start["message"]["model"], start["message"]["usage"]["input_tokens"]) == (
        "msg_r",
        "m",
        12,
    )

    def begun(index: int, **block: Any) -> dict[str, Any]:
        return {"type": "content_block_start", "index": index, "content_block": block}

    def piece(index: int, **delta: Any) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": delta}

    def stopped(index: int) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": index}

    assert seen == [
        begun(0, type="thinking", thinking="", signature=""),
        piece(0, type="thinking_delta", thinking="a"), piece(0, type="thinking_delta", thinking="b"), stopped(0),
        begun(1, type="text", text=""),
        piece(1, type="text_delta", text="c"), piece(1, type="text_delta", text="d"), stopped(1),
        begun(2, type="tool_use", id="toolu_r_0", name="f", input={}),
        piece(2, type="input_json_delta", partial_json="{"), stopped(2),
        begun(3, type="tool_use", id="toolu_r_1", name="g", input={}),
        piece(3, type="input_json_delta", partial_json="{"), piece(3, type="input_json_delta", partial_json="}"),
        stopped(3),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None},
         "usage": {"input_tokens": 5, "output_tokens": 2}},
        {"type": "message_stop"},
    ]  # fmt: skip


def test_an_empty_stream_is_a_message_all_the_same() -> None:
    _, made = message(stream=True)
    start, delta, stop = told(made.end())
    assert [one["type"] for one in (start, delta, stop)] == ["message_start", "message_delta", "message_stop"]
    assert delta["delta"]["stop_reason"] == "end_turn" and delta["usage"] == {"input_tokens": 0, "output_tokens": 0}


@pytest.mark.parametrize(
    ("reason", "told_as"), [("length", "max_tokens"), ("stop", "end_turn"), ("tool_calls", "tool_use")]
)
def test_a_message_in_one_piece_has_a_block_of_each_kind(reason: str, told_as: str) -> None:
    _, made = message()
    calls = [
        {"function": {"name": name, "arguments": text}} for name, text in (("f", '{"a":1}'), ("g", ""), ("h", "{"))
    ]
    said = {"reasoning_content": "a", "content": "b", "tool_calls": calls}
    raw = {"choices": [{"message": said, "finish_reason": reason}], "usage": USAGE}
    found = json.loads(made.whole(json.dumps(raw).encode()))
    assert found == {
        "id": "msg_r", "type": "message", "role": "assistant", "model": "m", "stop_reason": told_as,
        "stop_sequence": None, "usage": {"input_tokens": 5, "output_tokens": 2},
        "content": [
            block("thinking", thinking="a", signature=""), block("text", text="b"),
            block("tool_use", id="toolu_r_0", name="f", input={"a": 1}),
            block("tool_use", id="toolu_r_1", name="g", input={}),
            block("tool_use", id="toolu_r_2", name="h", input={}),
        ],
    }  # fmt: skip
    raw = {"choices": [{"message": {"content": None}, "finish_reason": None}]}
    empty = json.loads(made.whole(json.dumps(raw).encode()))
    assert (empty["content"], empty["stop_reason"], empty["usage"]["input_tokens"]) == ([], "end_turn", 0)


@pytest.mark.parametrize(
    ("kind", "told_as"),
    [
        ("service_unavailable", "overloaded_error"),
        ("server_error", "api_error"),
        ("requests", "rate_limit_error"),
        ("tokens", "rate_limit_error"),
        ("insufficient_quota", "rate_limit_error"),
        ("x", "x"),
    ],
)
def test_an_error_has_anthropics_type(kind: str, told_as: str) -> None:
    raw = json.dumps({"error": {"type": kind, "message": "no", "code": "c"}}).encode()
    expected = {"type": "error", "error": {"type": told_as, "message": "no"}}
    assert json.loads(messages_as_chat.anthropic_error(raw)) == expected
    assert told(message(stream=True)[1].error_event(raw)) == [expected]
