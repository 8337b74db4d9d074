"""A request's fields and their bounds; token counts without a tokenizer."""

import contextlib
import json
from typing import Any

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.engines.apis import EngineApi
from glowplug.engines.drivers import api_of
from glowplug.services.router.request_body import (
    NotSupported,
    check_model,
    fields_named,
    lone_surrogate,
    num_texts,
    read_body,
    read_form,
    readers,
    sizes,
    unknown_fields,
)
from tests.contract.data_port_rig import a_model

CHAT, COMPLETION, EMBEDDING, RESPONSE = (
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/embeddings",
    b"/v1/responses",
)
MESSAGE, COUNT, RERANK, SPEECH = b"/v1/messages", b"/v1/messages/count_tokens", b"/v1/rerank", b"/v1/audio/speech"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}

USER = {"role": "user", "content": "x"}
BLOCKS = [  # of 109 characters, since an input left out counts as `null`
    {"type": "text", "text": "x" * 10},
    {"type": "thinking", "thinking": "x" * 20},
    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "x" * 22}},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x" * 32}]},
]
CHAT_BODY: dict[str, Any] = {"model": "m", "messages": [USER]}
BODIES: dict[bytes, dict[str, Any]] = {
    CHAT: CHAT_BODY,
    COMPLETION: {"model": "m", "prompt": "x"},
    EMBEDDING: {"model": "m", "input": "x"},
    RESPONSE: {"model": "m", "input": "x"},
}
MORE_BODIES: dict[bytes, dict[str, Any]] = {
    MESSAGE: CHAT_BODY | {"max_tokens": 9},
    COUNT: CHAT_BODY,
    RERANK: {"model": "m", "query": "x", "documents": ["x"]},
    SPEECH: {"model": "m", "input": "x"},
}


def read(path: bytes, fields: dict[str, Any]) -> Any:
    return read_body(path, json.dumps((BODIES | MORE_BODIES)[path] | fields).encode())


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 80}], "max_tokens": 7}, (20, 7)),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 80}], "max_completion_tokens": 9}, (20, 9)),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": None}]}, (10, 0)),
        (CHAT, {"n_predict": 8}, (0, 8)),
        (CHAT, {"n_predict": -1}, (0, 0)),
        (COMPLETION, {"prompt": "x" * 40, "max_tokens": 3}, (10, 3)),
        (COMPLETION, {"prompt": "x" * 40, "n_predict": 3}, (10, 3)),
        (COMPLETION, {"prompt": [1, 22, 333]}, (3, 0)),
        (EMBEDDING, {"input": "x" * 40}, (10, 1)),
        (CHAT, {"max_tokens": 7, "max_completion_tokens": 9}, (0, 9)),
        (COMPLETION, {"prompt": ["x" * 40, [1, 22], 3]}, (13, 0)),
        (COMPLETION, {"max_tokens": 0, "echo": True}, (0, 1)),
        (COMPLETION, {"max_tokens": 5, "n_predict": 5}, (0, 5)),
        (EMBEDDING, {"input": ["x" * 40, "x" * 6]}, (11, 1)),
        (MESSAGE, {"system": "x" * 8, "messages": [USER | {"content": "x" * 40}]}, (12, 9)),
        (MESSAGE, {"system": [{"type": "text", "text": "x" * 8}]}, (3, 9)),
        (MESSAGE, {"messages": [USER | {"content": BLOCKS}]}, (27, 9)),
        (COUNT, {"messages": [USER | {"content": "x" * 40}]}, (0, 1)),
        (RERANK, {"query": "x" * 6, "documents": ["x" * 10, {"text": "x" * 10}]}, (8, 1)),
        (SPEECH, {"input": "x" * 40}, (0, 1)),
    ],
)
def test_four_characters_are_a_token(path: bytes, body: dict[str, Any], wanted: tuple[int, int]) -> None:
    assert sizes(read(path, body)) == wanted


def test_an_image_is_no_text() -> None:
    text = {"type": "text", "text": "x" * 400}
    assert sizes(read(CHAT, {"messages": [{"role": "user", "content": [text, IMAGE]}]}))[0] == 100


WHOLE = 2**31 - 1


def a_tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def a_schema(num_bytes: int) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": {"description": "x" * num_bytes}}}


NUMBERS: list[tuple[bytes, str, tuple[Any, ...], tuple[Any, ...]]] = [
    # path, field, allowed at the bounds, refused
    (CHAT, "top_logprobs", (0, 20), (-1, 21, 49_152)),
    (CHAT, "logprobs", (True, False), (1, 49_152)),
    (COMPLETION, "logprobs", (0, 5), (-1, 6, 49_152, True)),
    (RESPONSE, "top_logprobs", (0, 20), (-1, 21)),
    (CHAT, "n", (1, 128), (0, 129, 1.5)),
    (COMPLETION, "n", (1, 128), (0, 129)),
    (COMPLETION, "best_of", (1, 20), (0, 21)),
    (CHAT, "max_tokens", (1, WHOLE), (0, -1, 2**31, 2**32 + 1, 2**64, "5", 1e2)),
    (CHAT, "max_completion_tokens", (1, WHOLE), (0, -1, 2**31, 2**32 + 1)),
    (COMPLETION, "max_tokens", (1, WHOLE), (0, -1, 2**32 + 1)),
    (RESPONSE, "max_output_tokens", (1, WHOLE), (0, -1, 2**32 + 1)),
    (CHAT, "temperature", (0, 2), (-0.1, 2.1, 1e300)),
    (CHAT, "top_p", (0, 1), (-0.1, 1.1)),
    (CHAT, "presence_penalty", (-2, 2), (-2.1, 2.1)),
    (CHAT, "frequency_penalty", (-2, 2), (-2.1, 2.1)),
    (CHAT, "seed", (-(2**63), 2**63 - 1), (2**63, -(2**63) - 1)),
    (CHAT, "top_k", (-1, WHOLE), (-2, 2**31)),
    (CHAT, "min_p", (0, 1), (-1, 2)),
    (CHAT, "min_tokens", (0, WHOLE), (-1, 2**31)),
    (CHAT, "repeat_penalty", (0.1, 2), (0, 3)),
    (CHAT, "repetition_penalty", (0.1, 2), (0, 3)),
    (CHAT, "stop", ("x", ["x"] * 4, "x" * 1024), (["x"] * 5, "x" * 1025, [5], 5)),
    (CHAT, "stop_token_ids", ([1] * 128,), ([1] * 129, [-1], [2**31])),
    (
        CHAT,
        "logit_bias",
        ({str(i): 100 for i in range(1024)}, {"5": -100}),
        ({str(i): 1 for i in range(1025)}, {"5": 101}, {"5": -101}, {"word": 1}, [[5, 1]]),
    ),
    (CHAT, "messages", ([USER] * 2048,), ([], [USER] * 2049)),
    (
        CHAT,
        "tools",
        ([], [a_tool()] * 128),
        ([a_tool()] * 129, [{"x": 1}], {}, [a_tool(name="")], [a_tool(name="f" * 65)]),
    ),
    (CHAT, "response_format", ({"type": "text"}, a_schema(16_000)), ({"type": "x"}, {}, 5, a_schema(17_000))),
    (CHAT, "chat_template_kwargs", ({"a": "x" * 16_375}, None), (5, [], {"a": "x" * 16_376})),
    (CHAT, "metadata", ({"a": "b"},), ({str(i): "" for i in range(17)}, {"a": "x" * 513})),
    (COMPLETION, "prompt", ("", ["a"] * 128, [1] * 5000, [[1, 2]]), ([], ["a"] * 129, [[1]] * 129, [-1], [2**40], 5)),
    (EMBEDDING, "input", (["a"] * 2048, [1] * 5000), ([], ["a"] * 2049, [[1]] * 2049)),
    (EMBEDDING, "encoding_format", ("float", "base64"), ("x",)),
    (EMBEDDING, "dimensions", (1,), (0,)),
    (RESPONSE, "input", ([{"content": "a"}] * 2048,), ([{"content": "a"}] * 2049, [5])),
    (RESPONSE, "tools", ([{"type": "web_search"}],), ([{"x": 1}], [{"type": "function"}])),
    (RESPONSE, "text", ({"format": {"type": "text"}},), (5, {"format": {"type": "json_schema", "schema": 5}})),
]


@pytest.mark.parametrize(("path", "field", "right", "wrong"), NUMBERS)
def test_every_field_has_its_bounds(path: bytes, field: str, right: tuple[Any, ...], wrong: tuple[Any, ...]) -> None:
    for value in right:
        read(path, {field: value})
    for value in wrong:
        with pytest.raises(BadRequest) as refused:
            read(path, {field: value})
        assert (refused.value.param or "").startswith(field), value
        assert refused.value.message.startswith((field, f"Invalid '{field}")), value


GREEDY: list[dict[str, Any]] = [  # engines' own fields that would bypass our bounds
    *({"n_probs": 49_152}, {"n_cmpl": 1000}, {"prompt_logprobs": -1}, {"n_predict": 2**40}),
    *({"grammar": "x" * 20_000}, {"guided_regex": "x" * 20_000}, {"json_schema": {"enum": ["x" * 20_000]}}),
    {"structured_outputs": {"choice": ["x" * 20_000]}},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("fields", GREEDY)
def test_fields_of_engines_have_bounds(path: bytes, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        read(path, fields)
    assert refused.value.param == next(iter(fields))


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_is_not_known_is_named_and_the_known_ones_are_still_checked(path: bytes) -> None:
    reader = readers()[path]
    body = json.dumps(BODIES[path] | {"of_next_month": {"model": 1}, "\u00e4\n:": 2}).encode()
    asked = read_body(path, body)
    assert asked.model == "m" and type(asked) is not reader.shape
    assert unknown_fields(reader, body) == b"x-glowplug-unknown-fields: of_next_month, ???\r\n"
    assert type(read(path, {})) is reader.shape
    with pytest.raises(BadRequest, match="stream"):
        read(path, {"of_next_month": 1, "stream": 7})
    with pytest.raises(BadRequest, match="of_next_month: 262147 bytes"):
        read(path, {"of_next_month": "x" * (256 * 1024 + 1)})


def test_what_openai_asks_for_is_said() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    with pytest.raises(BadRequest, match='which is "function" in OpenAI'):
        read(CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
    with pytest.raises(BadRequest, match="takes at most 4") as refused:
        read(CHAT, {"stop": ["a"] * 5})
    assert "function" not in refused.value.message
    with pytest.raises(BadRequest) as refused:
        read(CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [call | {"type": "function", "id": 5}]}]})
    assert "OpenAI" not in refused.value.message and refused.value.param == "messages[1].tool_calls[0].id"


@pytest.mark.parametrize("path", BODIES)
def test_a_setting_refuses_what_is_not_known(path: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        read_body(path, json.dumps(BODIES[path] | {"of_next_month": 1}).encode(), readers(strict=True))
    assert refused.value.param == "of_next_month"


NOTHING_SAID: list[tuple[bytes, dict[str, Any], str, str]] = [
    (CHAT, {"messages": []}, "messages", "empty_array"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "bad_request"),
    (CHAT, {"messages": [USER, {"role": "tool", "tool_call_id": "1"}]}, "messages[1].content", "bad_request"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty_array"),
    (CHAT, {"stop": ""}, "stop", "bad_request"),
    (CHAT, {"stop": ["", "zz"]}, "stop[0]", "bad_request"),
    (COMPLETION, {"stop": [""]}, "stop[0]", "bad_request"),
    (COMPLETION, {"prompt": []}, "prompt", "empty_array"),
    (COMPLETION, {"prompt": [[1], []]}, "prompt[1]", "empty_array"),
    (EMBEDDING, {"input": ""}, "input", "bad_request"),
    (EMBEDDING, {"input": ["a", ""]}, "input[1]", "bad_request"),
    (EMBEDDING, {"input": []}, "input", "empty_array"),
    (RESPONSE, {"input": ""}, "input", "missing_required_parameter"),
    (RESPONSE, {"input": []}, "input", "missing_required_parameter"),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), NOTHING_SAID)
def test_a_request_that_says_nothing_is_refused(path: bytes, fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(path, fields)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_what_may_be_empty_is_taken() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = read(CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert called.messages[1].tool_calls[0].function.name == "f"
    assert read(CHAT, {"messages": [{"role": "user", "content": ""}]}).messages[0].content == ""
    assert read(COMPLETION, {"prompt": ""}).prompt == ""


@pytest.mark.parametrize(
    ("body", "shown", "at"),
    [
        (b'{"a":"\\ud83d"}', "\\ud83d", 6),
        (b'{"a":"\\ud83d\\u0041"}', "\\ud83d", 6),
        (b'{"a":"\\ud83d\\ude00 \\udc00"}', "\\udc00", 19),
        (b'{"a":"\\ud83d \\ude00"}', "\\ud83d", 6),
        (b'{"a":"\\ud83d\\ud83d\\ude00"}', "\\ud83d", 6),
        (b'{"a":"\\udbff"}', "\\udbff", 6),
        (b'{"a":"\\ud800\\ue000"}', "\\ud800", 6),
        (b'{"a":"\\udfff"}', "\\udfff", 6),
        (b'{"a":"\\\\ud83d","b":"\\uDFFF"}', "\\uDFFF", 20),
        (b'{"a":"\xed\xa0\xbd"}', "U+D83D", 6),
    ],
)
def test_half_a_character_is_named_with_its_place(body: bytes, shown: str, at: int) -> None:
    assert f"`{shown}` at byte {at} is a surrogate" in lone_surrogate(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":"\\ud7ff\\ue000"}',
        b'{"a":"\\udbff\\udfff\\ud800\\udc00"}',
        b'{"a":"\\ud83d\\ude00"}',
        b'{"a":"\\\\ud83d"}',
        b'{"a":1,}',
        b"\xff",
    ],
)
def test_whole_characters_are_no_halves(body: bytes) -> None:
    assert lone_surrogate(body) == ""


@pytest.mark.parametrize(
    "twice",
    [b'"max_tokens":2,"max_tokens":-5', b'"max_tokens":-5,"max_tokens":2', b'"top_logprobs":49152,"top_logprobs":1'],
)
def test_of_a_name_given_twice_each_value_is_held_against_its_bound(twice: bytes) -> None:
    with pytest.raises(BadRequest, match=r"^(max_tokens|top_logprobs): "):
        read_body(CHAT, b'{"model":"m","messages":[],' + twice + b"}")


def test_of_a_model_given_twice_the_last_counts_as_it_does_for_engines() -> None:
    rest = json.dumps(USER).encode()
    assert read_body(CHAT, b'{"model":"a","messages":[' + rest + b'],"model":"b"}').model == "b"


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m","messages":[{"role":"user","content":"x","odd":"\xff"}]}',
        b'{"model":"m","messages":[],"\xff":1}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"\\udc00x"}]}]}',
        b'{"model":"m","messages":[],"temperature":NaN}',
        b'{"model":"m","messages":[],"temperature":Infinity}',
        b'{"model":"m","messages":[],"temperature":1e400}',
        b'{"model":"m","messages":[]} // comment',
        b'{"model":"m","messages":[],}',
        b'\xef\xbb\xbf{"model":"m","messages":[]}',
        b'{"model":"m","messages":[{"role":"user","content":"x","odd":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
        b'{"model":"m","messages":[],"chat_template_kwargs":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    ],
)
def test_what_engines_would_read_otherwise_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        read_body(CHAT, body)


def test_prompts_and_n_bound_each_other() -> None:
    prompts = {"prompt": ["a"] * 64}
    read(COMPLETION, prompts | {"n": 2})
    with pytest.raises(BadRequest, match="64 prompts with n=3 make more than 128 answers"):
        read(COMPLETION, prompts | {"n": 3})
    with pytest.raises(BadRequest, match="best_of: 2 is below n=3"):
        read(COMPLETION, {"n": 3, "best_of": 2})


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"max_tokens": 2, "n_predict": 400}, "n_predict"),
        (CHAT, {"max_completion_tokens": 2, "n_predict": -1}, "n_predict"),
        (COMPLETION, {"max_tokens": 2, "n_predict": 400}, "n_predict"),
        (COMPLETION, {"max_tokens": 2, "max_completion_tokens": 400}, "max_completion_tokens"),
        (COMPLETION, {"max_completion_tokens": -1}, "max_completion_tokens"),
    ],
)
def test_an_answer_has_one_bound(path: bytes, fields: dict[str, Any], param: str) -> None:
    """llama.cpp prefers the bound unseen by the limit on tokens."""
    with pytest.raises(BadRequest) as refused:
        read(path, fields)
    assert refused.value.param == param
    assert read(path, {"max_tokens": 2, "n_predict": 2}).n_predict == 2


@pytest.mark.parametrize("fields", [{"n": 2}, {"n_cmpl": 2}, {"n": 2, "prompt": ["", [1, 2]]}])
def test_several_answers_to_an_empty_prompt_are_refused(fields: dict[str, Any]) -> None:
    """llama.cpp never ends them."""
    with pytest.raises(BadRequest, match="input cannot be an empty string"):
        read(COMPLETION, {"prompt": ""} | fields)
    assert read(COMPLETION, {"prompt": ["", "x"]}).n is None


def test_all_tools_together_are_bounded() -> None:
    read(CHAT, {"tools": [a_tool(description="x" * 2000)] * 128})
    with pytest.raises(BadRequest, match=r"tools: \d+ bytes are more than 262144"):
        read(CHAT, {"tools": [a_tool(description="x" * 2100)] * 128})


ASSISTANT = {"role": "assistant", "content": "x"}


def a_call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def check(path: bytes, fields: dict[str, Any], **model: Any) -> str:
    made, body = a_model(**model), json.dumps((BODIES | MORE_BODIES)[path] | fields).encode()
    return check_model(read_body(path, body), made, api_of(made), path, len(body))


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "n_predict"),
        (MESSAGE, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (COMPLETION, "max_tokens"),
        (RESPONSE, "max_output_tokens"),
    ],
)
def test_no_answer_is_longer_than_the_context(path: bytes, field: str) -> None:
    check(path, {field: 2048}, context_tokens=2048)
    with pytest.raises(BadRequest, match=f"^{field}: 2049 is too large") as refused:
        check(path, {field: 2049}, context_tokens=2048)
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [USER | {"content": "x" * 6401}]}, "messages"),
        (CHAT, {"messages": [USER | {"content": [{"type": "text", "text": "x" * 3201}]}] * 2}, "messages"),
        (COMPLETION, {"prompt": ["a", "x" * 6401]}, "prompt"),
        (EMBEDDING, {"input": "x" * 6401}, "input"),
        (RESPONSE, {"input": [{"content": "x" * 6401}]}, "input"),
        (RESPONSE, {"instructions": "x" * 6401}, "input"),
        (RESPONSE, {"instructions": "x" * 3201, "input": "x" * 3201}, "input"),
        (CHAT, {"messages": [USER, USER | {"reasoning_content": "x" * 6401}]}, "messages"),
        (CHAT, {"messages": [USER, ASSISTANT | {"tool_calls": [a_call("x" * 3201)] * 2}]}, "messages"),
        (MESSAGE, {"system": "x" * 3201, "messages": [USER | {"content": "x" * 3201}]}, "messages"),
        (MESSAGE, {"messages": [USER | {"content": [{"type": "thinking", "thinking": "x" * 6401}]}]}, "messages"),
        (MESSAGE, {"messages": [USER | {"content": [{"type": "tool_use", "input": {"a": "x" * 6401}}]}]}, "messages"),
        (MESSAGE, {"messages": [USER | {"content": [{"type": "tool_result", "content": "x" * 6401}]}]}, "messages"),
        (RERANK, {"documents": ["a", {"text": "x" * 6401}]}, "documents"),
        (RERANK, {"query": "x" * 3201, "documents": ["x" * 3201]}, "documents"),
    ],
)
def test_a_text_that_cannot_fit_the_context_is_not_tokenized(path: bytes, fields: dict[str, Any], param: str) -> None:
    check(path, fields, context_tokens=101)
    with pytest.raises(BadRequest) as refused:
        check(path, fields, context_tokens=100)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [USER | {"content": [IMAGE]}]}, "messages[0].content[0]"),
        (RESPONSE, {"input": [{"content": [{"type": "input_image", "image_url": "data:"}]}]}, "input[0].content[0]"),
        (
            RESPONSE,
            {"input": [{"type": "function_call_output", "output": [{"type": "input_image"}]}]},
            "input[0].output[0]",
        ),
        (EMBEDDING, {}, "model"),
    ],
)
def test_what_a_text_model_of_llamacpp_cannot_do(path: bytes, fields: dict[str, Any], param: str) -> None:
    check(path, fields, engine="vllm")  # only the engine knows whether it sees images
    with pytest.raises((BadRequest, NotSupported)) as refused:
        check(path, fields, engine="llamacpp")
    assert refused.value.param == param
    check(EMBEDDING, {}, engine="llamacpp", engine_args={"embeddings": True})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": False}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": True, "add_generation_prompt": False}, ""),
        ({}, ""),
    ],
)
def test_an_engine_that_always_continues_a_last_message_is_not_told_to_close_it(
    fields: dict[str, Any], param: str
) -> None:
    check(CHAT, fields, engine="llamacpp")
    with pytest.raises(BadRequest) if param else contextlib.nullcontext() as refused:
        check(CHAT, {"messages": [USER, ASSISTANT]} | fields, engine="llamacpp")
    assert not param or refused.value.param == param
    check(CHAT, {"messages": [USER, ASSISTANT]} | fields, engine="vllm")


def test_a_text_may_fill_its_context_and_several_need_not_fit_together() -> None:
    for path, fields in (
        (CHAT, {"messages": [USER | {"content": "x" * 6400}]}),
        (COMPLETION, {"prompt": ["x" * 6400] * 2}),
        (COMPLETION, {"prompt": [[1] * 5000]}),
        (EMBEDDING, {"input": ["x" * 6400] * 2}),
        (RERANK, {"documents": ["x" * 3300] * 2}),
    ):
        check(path, fields, context_tokens=100)


@pytest.mark.parametrize(
    ("path", "fields", "refused_by"),
    [
        (COMPLETION, {"best_of": 1}, ""),
        (COMPLETION, {"best_of": 2}, "llamacpp vllm"),
        (COMPLETION, {"n": 2, "best_of": 2}, ""),
        (COMPLETION, {"n": 2, "best_of": 3}, "llamacpp vllm"),
        (COMPLETION, {"echo": False, "suffix": "", "guided_json": None}, ""),
        (COMPLETION, {"suffix": "x"}, "llamacpp"),
        (COMPLETION, {"echo": True}, "llamacpp"),
        (CHAT, {"guided_json": {}}, "llamacpp vllm"),
        (CHAT, {"json_schema": {}}, "vllm"),
        (CHAT, {"n_cmpl": 1}, ""),
        (CHAT, {"n_cmpl": 2}, "vllm"),
        (MESSAGE, {"output_format": {"type": "json_schema"}}, "vllm"),
    ],
)
def test_what_an_engine_would_ignore_is_refused(path: bytes, fields: dict[str, Any], refused_by: str) -> None:
    found = []
    for engine in ("llamacpp", "vllm"):
        try:
            check(path, fields, engine=engine)
        except BadRequest as error:
            found.append(engine)
            assert error.param == [*fields][-1] and engine in error.message
            assert ("Log-likelihoods" in error.message) is False
            assert ("output_config.format" in error.message) == ("output_format" in fields)
    assert found == refused_by.split()


FLAT, NAMED = {"type": "function", "name": "f"}, {"type": "tool", "name": "f"}
OF_ANTHROPIC = {"name": "f", "input_schema": {}}


@pytest.mark.parametrize(
    ("path", "fields", "needs"),
    [
        (CHAT, {}, ""),
        (CHAT, {"tools": [a_tool()], "tool_choice": "auto"}, ""),
        (CHAT, {"tools": [a_tool()], "tool_choice": "none"}, ""),
        (CHAT, {"tools": [a_tool()], "tool_choice": "required"}, "required"),
        (CHAT, {"tools": [a_tool()], "tool_choice": a_tool()}, "named"),
        (RESPONSE, {"tools": [FLAT], "tool_choice": FLAT}, "named"),
        (MESSAGE, {"tools": [OF_ANTHROPIC], "tool_choice": {"type": "auto"}}, ""),
        (MESSAGE, {"tools": [OF_ANTHROPIC], "tool_choice": {"type": "any"}}, "required"),
        (MESSAGE, {"tools": [OF_ANTHROPIC], "tool_choice": NAMED}, "required"),
        (MESSAGE, {"tools": [OF_ANTHROPIC, {"name": "g"}], "tool_choice": NAMED}, "named"),
        (COUNT, {"tools": [OF_ANTHROPIC], "tool_choice": NAMED}, ""),
        (EMBEDDING, {}, ""),
    ],
)
def test_a_forced_call_needs_an_instance_that_can_be_made_to_call(
    path: bytes, fields: dict[str, Any], needs: str
) -> None:
    made, asked = a_model(), read(path, fields)
    assert check_model(asked, made, EngineApi(), path, 1) == ("tool_choice" if needs else "")
    for kind in {"required", "named"} - {needs}:
        api = EngineApi(tool_choices=frozenset({kind}), translated=frozenset({CHAT} if kind == "named" else ()))
        if not needs:
            assert check_model(asked, made, api, path, 1) == ""
            continue
        with pytest.raises(BadRequest, match="any of its functions" if kind == "named" else "cannot be made") as found:
            check_model(asked, made, api, path, 1)
        assert (found.value.code, found.value.param) == ("unsupported_tool_choice", "tool_choice")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tool_choice": "any", "tools": [a_tool()]}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "allowed_tools"}, "tools": []}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [a_tool()]}, "tool_choice"),
        (CHAT, {"tools": [a_tool(parameters=5)]}, "tools[0].function.parameters"),
        (CHAT, {"tools": [a_tool(), a_tool(parameters={"a": "x" * 17_000})]}, "tools[1].function.parameters"),
        (RESPONSE, {"tools": [FLAT | {"parameters": []}]}, "tools[0].parameters"),
        (RESPONSE, {"tools": [FLAT], "tool_choice": FLAT | {"name": "g"}}, "tool_choice"),
        (RESPONSE, {"tools": [{"type": "custom"}, {"type": "function"}]}, "tools[1].name"),
        (RESPONSE, {"input": [{"content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        (RESPONSE, {"input": [{"type": "x", "output": [{"type": "output_text"}]}]}, "input[0].output[0].text"),
        (RESPONSE, {"input": [{"role": "user"}]}, "input[0].content"),
        (RESPONSE, {"truncation": "auto"}, "truncation"),
        (RESPONSE, {"text": {"format": {"type": "json_schema", "schema": []}}}, "text.format.schema"),
        (CHAT, {"messages": [USER, USER | {"content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
        (CHAT, {"response_format": {"type": "json_schema", "schema": 5}}, "response_format.schema"),
        (MESSAGE, {"system": [{"type": "text"}]}, "system[0].text"),
        (MESSAGE, {"messages": [USER | {"content": [{"type": "tool_result", "content": [{"type": "text"}]}]}]},
         "messages[0].content[0].content[0].text"),
        (MESSAGE, {"tools": [{"name": "f", "type": "bash_1"}], "tool_choice": NAMED}, "tool_choice"),
        (MESSAGE, {"tools": [OF_ANTHROPIC, {"name": "f", "input_schema": 5}]}, "tools[1].input_schema"),
        (MESSAGE, {"tools": [OF_ANTHROPIC], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (MESSAGE, {"tools": [OF_ANTHROPIC], "tool_choice": NAMED | {"name": "g"}}, "tool_choice"),
        (MESSAGE, {"tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGE, {"messages": [USER | {"content": ""}]}, "messages[0].content"),
        (MESSAGE, {"messages": [USER, ASSISTANT | {"content": []}, USER]}, "messages[1].content"),
        (MESSAGE, {"messages": [USER, USER | {"content": ""}]}, "messages[1].content"),
        (RESPONSE, {"input": "", "previous_response_id": "r"}, "previous_response_id"),
        (RESPONSE, {"input": [], "conversation": "c"}, "conversation"),
        (RESPONSE, {"background": True}, "background"),
        (CHAT, {"model": ""}, "model"),
        (CHAT, {"model": None}, "model"),
        (COMPLETION, {"max_tokens": 0}, "max_tokens"),
        (COMPLETION, {"prompt": ["x"] * 65, "n_cmpl": 2}, "prompt"),
        (COMPLETION, {"n_cmpl": 3, "best_of": 2}, "best_of"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_by_its_place(path: bytes, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        read(path, fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [USER, ASSISTANT | {"content": []}, USER]}),
        (CHAT, {"messages": [USER | {"content": [{"type": "text", "text": "x"}]}, USER | {"content": ""}]}),
        (RESPONSE, {"background": False}),
        (CHAT, {"tools": [a_tool(), a_tool(name="g")], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
        (CHAT, {"tools": [a_tool()], "tool_choice": {"type": "allowed_tools"}}),
        (CHAT, {"tools": [a_tool()], "tool_choice": {"type": "function", "function": {}}}),
        (CHAT, {"tools": [a_tool()], "tool_choice": {"type": "function", "function": {"name": 5}}}),
        (CHAT, {"messages": [USER | {"content": [{"type": "image_url"}, {"type": "text", "text": ""}]}]}),
        (MESSAGE, {"messages": [USER, ASSISTANT | {"content": ""}]}),
        (MESSAGE, {"tools": [{"name": "f", "type": "custom"}], "tool_choice": {"type": "any"}}),
        (MESSAGE, {"tool_choice": {"type": "auto"}}),
        (RESPONSE, {"tools": [{"type": "custom"}]}),
        (COMPLETION, {"n": 2, "best_of": 2}),
        (COMPLETION, {"prompt": ["x"] * 64, "n_cmpl": 2}),
        (COMPLETION, {"max_tokens": 0, "echo": True}),
    ],
)
def test_what_is_right_is_taken(path: bytes, fields: dict[str, Any]) -> None:
    assert read(path, fields).model == "m"


@pytest.mark.parametrize(("path", "tool"), [(CHAT, None), (RESPONSE, FLAT), (MESSAGE, OF_ANTHROPIC)])
def test_the_tools_of_every_api_are_bounded_together_to_the_byte(path: bytes, tool: dict[str, Any] | None) -> None:
    """A schema is `null` in four bytes, or `{}` in two."""

    def tools(num_chars: int) -> dict[str, Any]:
        texts = ["x" * 2000] * 127 + ["x" * (num_chars - 127 * 2000)]
        return {"tools": [a_tool(description=text) if tool is None else tool | {"description": text} for text in texts]}

    most = 262_144 - 128 * (2 if path == MESSAGE else 4)
    read(path, tools(most))
    with pytest.raises(BadRequest, match="262145 bytes are more than 262144"):
        read(path, tools(most + 1))


def test_unknown_fields_are_named_in_part() -> None:
    names = [f"{number:02d}" + "n" * 63 for number in range(17)]
    line = fields_named(names).decode().removeprefix("x-glowplug-unknown-fields: ").removesuffix("\r\n").split(", ")
    assert line == [name[:64] for name in names[:16]] + ["and 1 more"]
    assert b"more" not in fields_named(names[:16])


@pytest.mark.parametrize(
    ("text", "num"), [("x", 1), (["x", "y"], 2), ([1, 2, 3], 1), ([[1], [2]], 2), (["x", 1, 2], 2), ([], 0)]
)
def test_token_ids_together_are_one_text(text: Any, num: int) -> None:
    assert num_texts(text) == num


FORM = b'--b\r\nContent-Disposition: form-data; name="model"\r\n%b\r\n%b\r\n--b--\r\n'


@pytest.mark.parametrize(
    ("body", "kind", "model"),
    [
        (FORM % (b"", b" m "), b"Multipart/Form-Data; boundary=b", "m"),
        (FORM % (b"content-type: text/plain\r\nx: y\r\n", b"m" * 512), b"multipart/form-data", "m" * 512),
        (FORM % (b"", b"m" * 513), b"multipart/form-data", ""),
        (FORM % (b"", b" "), b"multipart/form-data", ""),
        (FORM % (b"", b"m"), b"application/json", ""),
        (b"", b"multipart/form-data", ""),
    ],
)
def test_of_a_form_the_model_is_read(body: bytes, kind: bytes, model: str) -> None:
    if model:
        assert read_form(body, kind).model == model
        return
    with pytest.raises(BadRequest) as refused:
        read_form(body, kind)
    assert refused.value.param == (None if kind == b"application/json" else "model")
