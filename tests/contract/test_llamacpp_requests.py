"""Odd and greedy requests against a real llama.cpp behind a data port: none causes a 5xx, exhausts the memory or takes
a minute."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from tests.contract.data_port_rig import Answer, Rig, a_model, a_rig, an_instance, post
from tests.contract.engine_rig import engine_case
from tests.waiting import WAIT_S

pytestmark = [pytest.mark.llamacpp, pytest.mark.timeout(180)]
MIB = 1 << 20
USER = {"role": "user", "content": "Hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CHAT, COMPLETION, EMBEDDING, RESPONSE = "chat/completions", "completions", "embeddings", "responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER], "max_tokens": 2},
    COMPLETION: {"model": "m", "prompt": "Hi", "max_tokens": 2},
    EMBEDDING: {"model": "m", "input": "Hi"},
    RESPONSE: {"model": "m", "input": "Hi", "max_output_tokens": 2},
}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"} | message, USER]}


def tools(*given: Any) -> dict[str, Any]:
    return {"tools": list(given), "tool_choice": "required"}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}}


async def ask(rig: Rig, path: str, fields: dict[str, Any]) -> Answer:
    body = json.dumps(BODIES.get(path, {}) | fields).encode()
    async with asyncio.timeout(WAIT_S):
        return await rig.ask(post(f"/v1/{path}", body))


@pytest.fixture
async def pid_and_rig() -> AsyncIterator[tuple[int, Rig]]:
    models = (a_model(engine="llamacpp", context_tokens=1024),)
    async with engine_case("llamacpp") as case, a_rig(models=models) as rig:
        report = await case.start()
        rig.tell(an_instance("i-1", report.handle.url))
        yield report.handle.pid, rig


async def test_anthropics_api_is_answered_and_refused_in_its_shape(pid_and_rig: tuple[int, Rig]) -> None:
    _, rig = pid_and_rig
    message = {"model": "m", "messages": [USER], "max_tokens": 4}
    whole = await ask(rig, "messages", message)
    stream = await ask(rig, "messages", message | {"stream": True})
    counted = await ask(rig, "messages/count_tokens", {"model": "m", "messages": [USER]})
    long = await ask(rig, "messages", message | {"messages": [USER | {"content": "word " * 3000}]})
    assert whole.json()["type"] == "message" and rig.finished[0].token_counts()[0] == counted.json()["input_tokens"]
    assert b"event: message_stop" in stream.body and rig.finished[1].token_counts()[2]
    assert long.status == 400 and long.json()["type"] == "error"
    assert "maximum context length is 1024 tokens" in long.json()["error"]["message"]
    assert all("server" not in answer.headers for answer in (whole, stream, counted, long))


async def test_a_response_keeps_to_the_structure_that_is_asked_for(pid_and_rig: tuple[int, Rig]) -> None:
    _, rig = pid_and_rig
    wanted = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    form = {"type": "json_schema", "name": "place", "schema": wanted, "strict": True}
    fields = {"text": {"format": form}, "max_output_tokens": 200, "temperature": 0}  # the grammar allows blanks
    whole = await ask(rig, RESPONSE, fields)
    stream = await ask(rig, RESPONSE, fields | {"stream": True})
    loose = await ask(rig, RESPONSE, {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 8})
    assert json.loads(whole.json()["output"][0]["content"][0]["text"]) == {"city": "Paris"}
    events = [json.loads(line[6:]) for line in stream.body.splitlines() if line.startswith(b"data: {")]
    assert json.loads("".join(e["delta"] for e in events if e["type"].endswith("text.delta"))) == {"city": "Paris"}
    begun = loose.json()["output"][0]["content"][0]["text"].strip()
    assert begun.startswith(("{", "```")), "llama.cpp allows a fence, and takes it off an answer that is whole"


PLACE = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}


def events_of(answer: Answer) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: {")]


async def test_a_completion_keeps_to_the_structure_that_is_asked_for(pid_and_rig: tuple[int, Rig]) -> None:
    _, rig = pid_and_rig
    fields = schema(PLACE) | {"max_tokens": 200, "temperature": 0}
    whole = await ask(rig, COMPLETION, fields)
    stream = await ask(rig, COMPLETION, fields | {"stream": True})
    loose = await ask(rig, COMPLETION, {"response_format": {"type": "json_object"}, "max_tokens": 8})
    assert json.loads(whole.json()["choices"][0]["text"]) == {"city": "Paris"}
    assert json.loads("".join(e["choices"][0]["text"] for e in events_of(stream) if e["choices"])) == {"city": "Paris"}
    assert loose.json()["choices"][0]["text"].startswith("{")


async def test_a_message_keeps_to_the_structure_that_is_asked_for(pid_and_rig: tuple[int, Rig]) -> None:
    _, rig = pid_and_rig
    form = {"output_config": {"format": {"type": "json_schema", "schema": PLACE}, "effort": "low"}}
    fields = {"model": "m", "messages": [USER], "max_tokens": 200, "temperature": 0, "stop_sequences": ["zzz"]} | form
    whole = (await ask(rig, "messages", fields)).json()
    stream = events_of(await ask(rig, "messages", fields | {"stream": True}))
    text = "".join(e["delta"]["text"] for e in stream if e["type"] == "content_block_delta")
    assert json.loads(whole["content"][0]["text"]) == json.loads(text) == {"city": "Paris"}
    assert whole["usage"]["input_tokens"] > 1 and stream[-2]["usage"] == whole["usage"]


def texts(answer: Answer) -> list[str]:
    """Return a plain answer's texts, or a stream's text."""
    if not answer.body.startswith((b"data:", b"event:")):
        found = answer.json()
        return [one["message"]["content"] for one in found.get("choices", ())] or [found["content"][0]["text"]]
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: {")]
    deltas = [event["choices"][0]["delta"] if event.get("choices") else event.get("delta", {}) for event in events]
    return ["".join(delta.get("content") or delta.get("text") or "" for delta in deltas)]


BEGUN = "Sure, my name is"


@pytest.mark.parametrize("path", [CHAT, "messages"])
@pytest.mark.parametrize(
    "content", [BEGUN, [{"type": "text", "text": "Sure, my "}, {"type": "text", "text": "name is"}]]
)
async def test_an_answer_with_a_given_beginning_is_the_rest_alone(
    pid_and_rig: tuple[int, Rig], path: str, content: Any
) -> None:
    _, rig = pid_and_rig
    turns = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": content}]
    fields = {"model": "m", "messages": turns, "max_tokens": 6, "temperature": 0}
    whole, stream = [await ask(rig, path, fields | {"stream": streams}) for streams in (False, True)]
    assert texts(whole) == texts(stream) != [""] and not texts(whole)[0].startswith("Sure")
    if path == CHAT:
        several = await ask(rig, path, fields | {"n": 2})
        assert texts(several) == texts(whole) * 2
        logged = await ask(rig, path, fields | {"logprobs": True})
        assert texts(logged) == texts(whole)
        assert len(logged.json()["choices"][0]["logprobs"]["content"]) == 6
    nothing = [*turns[:1], {"role": "assistant", "content": ""}]
    fresh, asked = [await ask(rig, path, fields | {"messages": given}) for given in (nothing, turns[:1])]
    assert texts(fresh) == texts(asked)


async def test_calls_of_earlier_turns_whose_arguments_are_no_object_are_read(pid_and_rig: tuple[int, Rig]) -> None:
    _, rig = pid_and_rig
    for arguments in ("{a", "", "[1]"):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": "c", "content": "1"}
        chat = await ask(rig, CHAT, {"messages": [*turns, result]})
        called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        output = {"type": "function_call_output", "call_id": "c", "output": "1"}
        response = await ask(rig, RESPONSE, {"input": [USER, called, output]})
        assert (chat.status, response.status) == (200, 200), (arguments, chat.body, response.body)


async def test_tokens_are_asked_for_by_the_engines_own_field(pid_and_rig: tuple[int, Rig]) -> None:
    _, rig = pid_and_rig
    found = [
        await rig.ask(post(path, json.dumps({"model": "m"} | fields).encode()))
        for path, fields in (
            ("/tokenize", {"content": "Hi"}),
            ("/tokenize", {"prompt": "Hi"}),
            ("/detokenize", {"tokens": [28120]}),
            ("/detokenize", {"content": "Hi"}),
        )
    ]
    assert [one.status for one in found] == [200, 400, 200, 400]
    assert [one.json()["error"]["param"] for one in found[1::2]] == ["content", "tokens"]


async def test_a_message_that_met_a_stop_sequence_names_it(pid_and_rig: tuple[int, Rig]) -> None:
    _, rig = pid_and_rig
    fields = {"model": "m", "messages": [USER], "max_tokens": 20, "temperature": 0}
    whole = (await ask(rig, "messages", fields | {"stop_sequences": ["e"]})).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "e")
    stream = await ask(rig, "messages", fields | {"stop_sequences": ["e"], "stream": True})
    assert b'"stop_reason":"stop_sequence","stop_sequence":"e"' in stream.body
    plain = (await ask(rig, "messages", fields | {"max_tokens": 3, "stop_sequences": ["zzz"]})).json()
    assert (plain["stop_reason"], plain["stop_sequence"]) == ("max_tokens", None)


async def test_a_forced_call_is_made_in_responses_and_in_messages(pid_and_rig: tuple[int, Rig]) -> None:
    _, rig = pid_and_rig
    flat = {"type": "function", "name": "weather", "parameters": PLACE}
    earlier = [
        {"role": "user", "content": "Hi"},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]
    fields = {"tools": [flat], "tool_choice": "required", "max_output_tokens": 200, "temperature": 0, "input": earlier}
    whole = (await ask(rig, RESPONSE, fields)).json()
    *_, last = events_of(await ask(rig, RESPONSE, fields | {"stream": True}))
    for response in (whole, last["response"]):
        (call,) = response["output"]
        assert (call["type"], call["name"], json.loads(call["arguments"])) == (
            "function_call", "weather", {"city": "Paris"}
        )  # fmt: skip
        assert response["status"] == "completed" and response["usage"]["output_tokens"] > 5
    told = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "rain"}]},
    ]
    fields = {"model": "m", "messages": [USER, *told], "max_tokens": 200, "temperature": 0}
    fields |= {"tools": [{"name": "weather", "input_schema": PLACE}], "tool_choice": {"type": "any"}}
    message = (await ask(rig, "messages", fields)).json()
    stream = events_of(await ask(rig, "messages", fields | {"stream": True}))
    (block,) = message["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert message["stop_reason"] == stream[-2]["delta"]["stop_reason"] == "tool_use"
    assert json.loads("".join(e["delta"]["partial_json"] for e in stream if e["type"] == "content_block_delta"))


GREEDY: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"logprobs": True, "top_logprobs": 49_152, "max_tokens": 150}),
    (CHAT, {"logprobs": 49_152, "max_tokens": 150}),  # llama.cpp takes the number for `n_probs`
    (CHAT, {"n_probs": 49_152, "max_tokens": 150}),
    (COMPLETION, {"logprobs": 49_152, "max_tokens": 150}),
    (COMPLETION, {"prompt": ["a"] * 2000}),
    (CHAT, {"messages": [{"role": "user", "content": "word " * 1_800_000}]}),  # 40 s of tokenizing
    (CHAT, schema({"enum": [f"v{i}" for i in range(20_000)]})),  # minutes of compiling
    (CHAT, schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})),
    (CHAT, {"grammar": "root ::= " + "x* " * 10_000}),
    (CHAT, {"max_tokens": 2**32 + 1}),
    (CHAT, {"stop": ["x"] * 5000}),
]


async def test_a_greedy_request_is_refused_and_the_engine_does_not_grow(pid_and_rig: tuple[int, Rig]) -> None:
    pid, rig = pid_and_rig
    process = psutil.Process(pid)
    before = process.memory_info().rss
    for path, fields in GREEDY:
        answer = await ask(rig, path, fields)
        error = answer.json()["error"]
        assert (answer.status, error["type"]) == (400, "invalid_request_error"), error
        assert error["param"] and error["message"].startswith(error["param"]), error
        assert process.memory_info().rss - before < 20 * MIB, error


async def test_what_openai_allows_is_answered(pid_and_rig: tuple[int, Rig]) -> None:
    rig = pid_and_rig[1]
    answer = await ask(rig, CHAT, {"logprobs": True, "top_logprobs": 20})
    assert answer.status == 200
    assert len(answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20
    assert (await ask(rig, CHAT, tools(function(parameters={"type": "object"})))).status == 200


async def test_a_log_probability_comes_with_as_many_alternatives_as_are_asked_for(pid_and_rig: tuple[int, Rig]) -> None:
    rig = pid_and_rig[1]
    bare, two = {"logprobs": True}, {"logprobs": True, "top_logprobs": 2}
    for path, fields, num in (
        (CHAT, bare, 0),
        (CHAT, bare | {"top_logprobs": 0}, 0),
        (CHAT, two, 2),
        (CHAT, bare | {"n": 2}, 0),
    ):
        whole = (await ask(rig, path, fields)).json()
        streamed = events_of(await ask(rig, path, fields | {"stream": True}))
        for answers in ([whole], streamed):
            tokens = [
                token
                for answer in answers
                for choice in answer["choices"]
                for token in (choice.get("logprobs") or {}).get("content") or ()
            ]
            assert tokens and {len(token["top_logprobs"]) for token in tokens} == {num}, (path, fields)


@pytest.mark.parametrize("more", [{"logprobs": 0}, {"logprobs": 2}, {"logprobs": 2, "n": 2}, {"logprobs": 1, "n": 2}])
async def test_a_completions_log_probabilities_have_its_own_form(
    more: dict[str, int], pid_and_rig: tuple[int, Rig]
) -> None:
    rig, fields = pid_and_rig[1], {"temperature": 0, "max_tokens": 4} | more
    whole = (await ask(rig, COMPLETION, fields)).json()["choices"]
    said: dict[int, dict[str, list[Any]]] = {}
    for event in events_of(await ask(rig, COMPLETION, fields | {"stream": True})):
        for choice in event["choices"]:
            for name, values in (choice.get("logprobs") or {}).items():
                said.setdefault(choice["index"], {}).setdefault(name, []).extend(values)
    assert len(whole) == more.get("n", 1)
    for choice in whole:
        told = choice["logprobs"]
        assert (
            said[choice["index"]].keys() == told.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        )
        assert "".join(told["tokens"]) == choice["text"] and len(told["tokens"]) == 4
        for token, at, likely, alternatives in zip(
            told["tokens"], told["text_offset"], told["token_logprobs"], told["top_logprobs"], strict=True
        ):
            assert choice["text"][at:].startswith(token)
            assert alternatives[token] == likely <= 0
            assert max(1, more["logprobs"]) <= len(alternatives) <= more["logprobs"] + 1
        assert said[choice["index"]]["tokens"] == told["tokens"]
        assert said[choice["index"]]["text_offset"] == told["text_offset"]


def each(field: str, *values: Any) -> list[dict[str, Any]]:
    return [{field: value} for value in values]


def calls(*given: Any) -> dict[str, Any]:
    return said(role="assistant", tool_calls=list(given))


ODD: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        *map(tools, ({"x": 1}, {"type": "function"}, function(name=5), function(parameters="x"))),
        *map(tools, (5, None, [], {"type": "banana"}, function(name='"\\<|im_end|>{{x}}'))),
        *each("tools", {}, 5, "x"),
        *each("tool_choice", "banana", 5, {"type": "function", "function": {"name": "g"}}),
        *(said(content=[part]) for part in (IMAGE, {"type": "input_audio", "input_audio": {}}, {"type": "text"})),
        *(said(content=[part]) for part in ({"type": "text", "text": 5}, {"type": "x"}, {}, 5, None, [])),
        *(said(**{name: 5}) for name in ("role", "content", "name", "reasoning_content", "tool_call_id", "refusal")),
        said(role="assistant", tool_calls="x"),
        *map(calls, ({"x": 1}, 5, {"type": "function"}, function(arguments="no json"), function(arguments=5))),
        *each("messages", [{"role": "tool"}], [{"role": "user"}], [{}], [{"role": "assistant"}]),
        *each("response_format", 5, {}, {"type": "x"}, {"type": "json_schema", "json_schema": 5}),
        *map(schema, (5, {"type": "banana"}, {"$ref": "#/a"}, {"enum": 5}, {"pattern": "^((("})),
        *map(schema, ({"properties": 5}, {"anyOf": 5}, {"type": "string", "minLength": 10**9})),
        *each("chat_template_kwargs", 5, {"messages": 5}, {"enable_thinking": "x"}),
        *each("stream_options", 5, {"include_usage": "x"}),
        {"stream": True, "logprobs": True} | tools(function()),
        {"continue_final_message": True},
        {"n": 100},
    ],
    COMPLETION: [
        *each("prompt", [{"prompt_string": "a", "multimodal_data": ["x"]}], [], [[]], [""], [99_999_999]),
        *each("prompt", [2**40], [-1], [None], ["a", 1], 5),
        {"echo": True},
        {"suffix": "x"},
        {"best_of": 2},
        {"n": 100},
    ],
    EMBEDDING: each("input", "x", [], [""], [[]], [99_999_999], 5),
    RESPONSE: [
        *each("input", [{}], [5], [{"type": "x"}], [{"type": "function_call"}], [{"type": "reasoning"}]),
        *each("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]),
        *each("input", [{"role": "assistant", "content": "x"}]),
        *each("tools", [{"x": 1}], [{"type": "function"}], [{"type": "web_search"}]),
        {"previous_response_id": "r"},
    ],
}


async def test_no_odd_request_is_the_servers_fault(pid_and_rig: tuple[int, Rig]) -> None:
    rig = pid_and_rig[1]
    for path, fields in ((path, fields) for path, bodies in ODD.items() for fields in bodies):
        answer = await ask(rig, path, fields)
        assert answer.status < 500 or answer.status == 501, (path, fields, answer.body[:300])
        if answer.status != 200 and b"data: " not in answer.body:
            assert answer.json()["error"]["message"], (path, fields)
