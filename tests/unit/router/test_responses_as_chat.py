"""Responses as chats and back. Over a data port: tests/contract/test_data_port_responses.py"""

import json
from typing import Any

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.services.router import responses_as_chat
from glowplug.services.router.responses_as_chat import ResponseAnswer

USER = {"role": "user", "content": "Hi"}
PARAMETERS = {"type": "object", "properties": {"a": {"const": 1}}}
FLAT = {"type": "function", "name": "f", "description": "d", "parameters": PARAMETERS}
FREE = {"type": "custom", "name": "patch", "description": "any text"}
CALL = '{"name": "f", "arguments": {"a": 1}}'


def translated(forces: bool = True, **fields: Any) -> tuple[dict[str, Any], ResponseAnswer, list[str]]:
    body = json.dumps({"model": "m", "input": "Hi"} | fields).encode()
    made, answer, dropped = responses_as_chat.translate(body, "r", 70, lambda: 77.5, forces=forces)
    return json.loads(made), answer, dropped


def chat_of(**fields: Any) -> dict[str, Any]:
    return translated(**fields)[0]


def messages_of(*items: Any, **fields: Any) -> Any:
    return chat_of(input=[*items], **fields)["messages"]


def delta(reason: str | None = None, *, logprobs: Any = None, **said: Any) -> bytes:
    choice = {"index": 0, "delta": said, "finish_reason": reason, "logprobs": logprobs}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
USED = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"


def events_of(data: bytes) -> list[dict[str, Any]]:
    found = []
    for block in data.split(b"\n\n"):
        if block:
            name, _, said = block.partition(b"\ndata: ")
            found.append(json.loads(said))
            assert name == b"event: " + found[-1]["type"].encode()
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(*pieces: bytes, **fields: Any) -> list[dict[str, Any]]:
    _, answer, _ = translated(stream=True, **fields)
    return events_of(b"".join(map(answer.events, pieces)) + answer.end())


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in found]


# -- the request -------------------------------------------------------------------------------------------------------


def test_only_fields_of_a_chat_go_to_the_engine_and_unknown_ones_as_they_are() -> None:
    ours = {"store": False, "metadata": {"a": "b"}, "client_metadata": {}, "truncation": "disabled", "include": ["x"]}
    foreign = {"messages": [], "n": 3, "n_cmpl": 3, "stream_options": {"a": 1}, "logprobs": True}
    assert chat_of(**ours, **foreign, temperature=0, top_k=4, user="u", parallel_tool_calls=True) == {
        "model": "m", "messages": [USER], "temperature": 0, "top_k": 4, "user": "u",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_output_tokens": 5}, {"max_tokens": 5}),
        ({"reasoning": {"effort": "low"}, "text": {"verbosity": "high"}},
         {"reasoning_effort": "low", "verbosity": "high"}),
        ({"reasoning": {"effort": None}, "text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        ({"text": {"format": {"type": "json_schema", "schema": PARAMETERS}}},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": PARAMETERS}}}),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": False, "description": None}}},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": False}}}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 1}),
        ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
        ({"tools": [FLAT], "parallel_tool_calls": False},
         {"parallel_tool_calls": False, "tool_choice": "auto",
          "tools": [{"type": "function", "function": {name: FLAT[name] for name in FLAT if name != "type"}}]}),
    ],
)  # fmt: skip
def test_a_field_becomes_a_chats(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat_of(**fields) == {"model": "m", "messages": [USER]} | expected


def test_the_first_instructions_are_one_message() -> None:
    developer, system = (
        {"role": "developer", "content": "d"},
        {"role": "system", "content": [{"type": "input_text", "text": "s"}]},
    )
    assert messages_of(developer, system, USER, developer, instructions="i") == [
        {"role": "system", "content": "i\n\nd\n\ns"}, USER, {"role": "system", "content": "d"}
    ]  # fmt: skip


def test_reasoning_text_and_calls_in_a_row_are_one_message() -> None:
    reasoning = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "a", "annotations": []}],
    }
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": i * '{"a": 1}'} for i in (0, 1)]
    free = {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"}
    results = [
        {"type": "function_call_output", "call_id": "c0", "output": "o"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "p"}]},
    ]
    empty = {"type": "reasoning", "id": "rs", "summary": []}
    found = messages_of(USER, reasoning, said, *calls, free, *results, empty, said, said)
    made = [("c0", "f", "{}"), ("c1", "f", '{"a": 1}'), ("c2", "patch", '{"input":"x"}')]
    tool_calls = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in made]
    assert found == [
        USER,
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": tool_calls},
        {"role": "tool", "tool_call_id": "c0", "content": "o"},
        {"role": "tool", "tool_call_id": "c2", "content": "p"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "a"},
    ]


def test_parts_that_are_not_text_stay_parts() -> None:
    image = {"type": "input_image", "image_url": "data:x", "detail": "low"}
    sound, file = (
        {"type": "input_audio", "input_audio": {"data": "y"}},
        {"type": "input_file", "file_data": "z", "filename": "f"},
    )
    text = {"type": "input_text", "text": "a"}
    (found,) = messages_of({"role": "user", "content": [text, image, sound, file]})
    assert found["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "y"}},
        {"type": "file", "file": {"file_data": "z", "filename": "f"}},
    ]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "x"}, "input[1].type"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}, "input[1].content[0]"),
        ({"type": "function_call", "call_id": "c"}, "input[1].name"),
        ({"type": "function_call", "name": "f"}, "input[1].call_id"),
    ],
)
def test_an_item_that_cannot_be_read_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        messages_of(USER, item)
    assert refused.value.param == param and refused.value.message.startswith(param)


def test_tools_that_nobody_here_runs_are_dropped_and_named() -> None:
    grammar = FREE | {"format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
    foreign = [{"type": "web_search"}, {"type": "mcp", "server_url": "x"}, {"type": "web_search"}, grammar]
    called = {"type": "web_search_call", "id": "ws", "status": "completed"}
    chat, answer, dropped = translated(tools=[*foreign, FLAT, FREE], input=[USER, called])
    assert dropped == ["custom", "mcp", "web_search", "web_search_call"] and chat["messages"] == [USER]
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["f", "patch"]
    assert chat["tools"][1]["function"]["parameters"]["required"] == ["input"]
    echoed = json.loads(answer.whole(json.dumps({"choices": [{"message": {"content": "x"}}]}).encode()))["tools"]
    assert echoed == [FLAT | {"strict": None}, FREE]
    assert "tools" not in chat_of(tools=foreign)


def test_functions_of_a_namespace_are_called_within_it() -> None:
    space = {"type": "namespace", "name": "files", "description": "d", "tools": [FLAT, FREE, {"x": 1}, 5]}
    earlier = {"type": "function_call", "call_id": "c", "name": "f", "namespace": "files", "arguments": "{}"}
    chat, answer, dropped = translated(tools=[space, {"type": "namespace"}], input=[USER, earlier], stream=True)
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["files__f", "files__patch"] and not dropped
    assert chat["messages"][1]["tool_calls"][0]["function"]["name"] == "files__f"
    call = [{"index": 0, "id": "c1", "function": {"name": "files__f", "arguments": "{}"}}]
    *_, last = events_of(answer.events(delta("tool_calls", tool_calls=call)) + answer.end())
    (item,) = last["response"]["output"]
    assert (item["name"], item["namespace"]) == ("f", "files") and last["response"]["tools"][0] == space


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, "auto", ["f", "patch"]),
        ("none", "none", ["f", "patch"]),
        ("required", "required", ["f", "patch"]),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}, ["f", "patch"]),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}, ["f", "patch"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, "auto", ["f"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "f"}, "x"]}, "required", ["f"]),
    ],
)
def test_a_choice_is_a_chats(choice: Any, expected: Any, names: list[str]) -> None:
    chat, answer, _ = translated(forces=False, tools=[FLAT, FREE], tool_choice=choice)
    assert chat["tool_choice"] == expected and answer.call is None
    assert [tool["function"]["name"] for tool in chat["tools"]] == names
    forced, answer, _ = translated(tools=[FLAT, FREE], tool_choice=choice)
    assert ("tool_choice" not in forced) == (answer.call is not None) == (expected not in ("auto", "none"))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        {"tools": [FLAT, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"name": "g"}]}},
    ],
)
def test_a_call_that_nothing_can_answer_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="a call is demanded") as refused:
        translated(**fields)
    assert refused.value.param in ("tools", "tool_choice")


def test_a_structure_without_its_schema_is_refused() -> None:
    with pytest.raises(BadRequest) as refused:
        translated(text={"format": {"type": "json_schema", "name": "n"}})
    assert refused.value.param == "text.format.schema"


# -- the answer --------------------------------------------------------------------------------------------------------


def test_a_streamed_text_has_every_event_in_order() -> None:
    chance = {"token": "a", "bytes": [97], "logprob": -0.1, "top_logprobs": []}
    given = chance | {"top_logprobs": [{"token": "b"}]}
    found = streamed(
        delta(role="assistant", content=None), delta(content="a", logprobs={"content": [given]}), delta(content="b"),
        delta("stop"), USED, max_output_tokens=9, instructions="i",
    )  # fmt: skip
    assert kinds(found) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    created, _, added, part, first, second, text, whole, item, last = found
    assert (created["response"]["status"], created["response"]["output"], created["response"]["usage"]) == (
        "in_progress", [], None
    )  # fmt: skip
    assert added["item"] == {
        "type": "message", "id": "msg_r_0", "role": "assistant", "status": "in_progress", "content": []
    }  # fmt: skip
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert (first["delta"], first["logprobs"], second["delta"], second["logprobs"]) == ("a", [chance], "b", [])
    assert (text["text"], text["logprobs"]) == ("ab", [chance]) and whole["part"]["text"] == "ab"
    places = [(e["item_id"], e["output_index"], e["content_index"]) for e in (part, first, second, text, whole)]
    assert places == [("msg_r_0", 0, 0)] * 5
    assert item["item"] == added["item"] | {"status": "completed", "content": [whole["part"]]}
    response = last["response"]
    assert response["output"] == [item["item"]] and response["status"] == "completed"
    assert (response["id"], response["created_at"], response["completed_at"]) == ("resp_r", 70, 77)
    assert (response["max_output_tokens"], response["instructions"], response["model"]) == (9, "i", "m")
    assert response["usage"] == {
        "input_tokens": 5, "output_tokens": 2, "total_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 1},
    }  # fmt: skip


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    calls = [
        [{"index": 0, "id": "c0", "function": {"name": "f", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"a":'}}],
        [{"index": 0, "function": {"arguments": " 1}"}}],
        [{"index": 1, "function": {"name": "patch", "arguments": '{"inp'}}],
        [{"index": 1, "function": {"arguments": 'ut": "x"}'}}],
    ]
    pieces = [delta(reasoning_content="h"), delta(reasoning="m"), delta(content="t")]
    pieces += [delta(tool_calls=call) for call in calls]
    found = streamed(*pieces, delta("tool_calls"), tools=[FLAT, FREE])
    assert kinds(found)[2:] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    output = found[-1]["response"]["output"]
    assert [event["item"] for event in found if event["type"].endswith("item.done")] == output
    assert output[0] == {
        "type": "reasoning", "id": "rs_r_0", "summary": [], "status": "completed",
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }  # fmt: skip
    assert output[2:] == [
        {"type": "function_call", "id": "fc_r_2", "call_id": "c0", "name": "f", "status": "completed",
         "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "id": "ctc_r_3", "call_id": "call_r_3", "name": "patch", "status": "completed",
         "input": "x"},
    ]  # fmt: skip
    assert [event["output_index"] for event in found if event["type"].endswith("item.added")] == [0, 1, 2, 3]
    assert found[-1]["response"]["usage"] is None


@pytest.mark.parametrize(("reason", "told"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_a_cut_answer_is_incomplete(reason: str, told: str) -> None:
    *_, item, last = streamed(delta(content="a"), delta(reason))
    assert last["type"] == "response.incomplete" and item["item"]["status"] == "incomplete"
    response = last["response"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": told})
    assert response["completed_at"] is None


def test_a_cut_call_is_incomplete_and_an_empty_answer_is_complete() -> None:
    cut = [{"index": 0, "function": {"name": "f", "arguments": '{"a'}}]
    response = streamed(delta("length", tool_calls=cut))[-1]["response"]
    assert response["output"][0] | {"arguments": '{"a', "status": "incomplete"} == response["output"][0]
    custom = streamed(delta("length", tool_calls=[{"function": {"name": "patch", "arguments": '{"in'}}]), tools=[FREE])
    assert custom[-1]["response"]["output"][0]["input"] == '{"in'
    assert kinds(streamed()) == ["created", "in_progress", "completed"]
    assert kinds(streamed(b"data: null\n\n", b"data: [DONE]\n\n")) == ["created", "in_progress", "completed"]


def test_a_forced_call_is_an_item() -> None:
    found = streamed(delta(content=CALL[:9]), delta("stop", content=CALL[9:]), tools=[FLAT], tool_choice="required")
    (call,) = found[-1]["response"]["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
    _, answer, _ = translated(tools=[FLAT], tool_choice="required")
    raw = {"choices": [{"index": 0, "message": {"content": CALL}, "finish_reason": "stop"}], "usage": USAGE}
    whole = json.loads(answer.whole(json.dumps(raw).encode()))
    assert [item["name"] for item in whole["output"]] == ["f"] and whole["usage"]["total_tokens"] == 7


def test_an_answer_in_one_piece_has_the_items_of_a_streamed_one() -> None:
    _, answer, _ = translated(text={"format": {"type": "json_schema", "name": "n", "schema": {}}}, temperature=0.5)
    message = {"role": "assistant", "content": "t", "reasoning_content": "hm", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}  # fmt: skip
    raw = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    found = json.loads(answer.whole(json.dumps(raw).encode()))
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    assert (found["status"], found["completed_at"], found["temperature"]) == ("completed", 77, 0.5)
    assert found["text"]["format"] == {
        "type": "json_schema", "name": "n", "schema": {}, "strict": False, "description": None
    }  # fmt: skip


def test_a_failed_stream_ends_with_the_response_and_an_error_that_clients_raise() -> None:
    _, answer, _ = translated(stream=True)
    error = {"message": "lost", "code": "engine_error", "type": "server_error", "param": None}
    found = events_of(answer.events(delta(content="a")) + answer.error_event(json.dumps({"error": error}).encode()))
    *_, item, failed, last = found
    assert item["item"]["status"] == "incomplete" and failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "engine_error", "message": "lost"}
    assert (failed["response"]["status"], failed["response"]["output"]) == ("failed", [item["item"]])
    assert last["type"] == "error" and last["error"] == error and last["message"] == "lost"
    _, answer, _ = translated(stream=True)
    bare = events_of(answer.error_event(b'{"error":{"message":"no"}}'))
    assert kinds(bare) == ["created", "in_progress", "failed", "error"]
    assert bare[2]["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"param": "messages", "message": "messages: long"}, "input", "input: long"),
        ({"param": "max_tokens", "message": "no"}, "max_output_tokens", "no"),
        ({"param": "temperature", "message": "temperature: no"}, "temperature", "temperature: no"),
        ({"param": None, "message": "no"}, None, "no"),
    ],
)
def test_an_error_names_the_responses_field(given: dict[str, Any], param: str | None, message: str) -> None:
    _, answer, _ = translated()
    assert json.loads(answer.error(json.dumps({"error": given}).encode())) == {
        "error": {"param": param, "message": message}
    }
