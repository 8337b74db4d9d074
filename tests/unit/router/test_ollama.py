"""Ollama's requests and answers, translated. Over a data port: tests/contract/test_data_port_translated.py"""

import itertools
import json
from typing import Any

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.services.router import ollama
from glowplug.services.router.api_errors import ApiError
from glowplug.services.router.ollama import CHAT, EMBED, EMBEDDINGS, GENERATE, OllamaAnswer, Translated
from tests.fleet_builder import a_model

USER = {"role": "user", "content": "hi"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
COMPLETIONS, VECTORS = b"/v1/completions", b"/v1/embeddings"


def translated(path: bytes, *, keeps: bool = False, engine: str = "fake", **fields: Any) -> Translated:
    return ollama.translate(path, {"model": "m", **fields}, a_model(engine=engine), lambda: 0.0, keeps=keeps)


def body(path: bytes, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(translated(path, **fields).body)
    return found


def messages(*given: dict[str, Any]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = body(CHAT, messages=list(given))["messages"]
    return made


@pytest.mark.parametrize(
    ("said", "keep_alive_s", "most_s", "expected"),
    [
        (None, 300.0, 600.0, None),
        ("", 300.0, 600.0, None),
        (5, 300.0, 0.0, None),
        (0, 300.0, 600.0, 0.0),
        (-5, 300.0, 600.0, 600.0),
        (601, 300.0, 600.0, 600.0),
        (900, 900.0, 600.0, 900.0),
        (901, 900.0, 600.0, 900.0),
        (-1, -1.0, 600.0, -1.0),
        (-7, -1.0, 600.0, -1.0),
        (0, -1.0, 600.0, 0.0),
        (7000, -1.0, 600.0, 7000.0),
        (10**12, -1.0, 600.0, 1e9),
        ("1000000h", -1.0, 600.0, 1e9),
        ("1h1m1s1ms1us1\u00b5s1ns", -1.0, 600.0, 3661.001002001),
        ("+1.5m", -1.0, 600.0, 90.0),
        (".5s", -1.0, 600.0, 0.5),
        ("-0s", -1.0, 600.0, 0.0),
        ("-1s", -1.0, 600.0, -1.0),
        ("0" * 39 + "s", -1.0, 600.0, 0.0),
    ],
)
def test_a_keep_alive_is_bounded_by_the_operator(
    said: Any, keep_alive_s: float, most_s: float, expected: float | None
) -> None:
    found = ollama.keep_alive_s({"keep_alive": said}, a_model(keep_alive_s=keep_alive_s), most_s)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("said", ["x", "1", "+-1s", "--1s", "-", "1s1", True, False, [], {}, "0" * 40 + "s"])
def test_a_keep_alive_that_is_none_is_refused(said: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        ollama.keep_alive_s({"keep_alive": said}, a_model(), 600.0)
    assert refused.value.param == "keep_alive"


@pytest.mark.parametrize(
    ("path", "fields", "nothing"),
    [
        (CHAT, {}, True),
        (CHAT, {"messages": [USER]}, False),
        (CHAT, {"prompt": "x"}, True),
        (GENERATE, {"prompt": ""}, True),
        (GENERATE, {"prompt": "x"}, False),
        (GENERATE, {"images": ["AA"]}, False),
        (EMBED, {}, False),
    ],
)
def test_a_request_without_a_prompt_says_nothing(path: bytes, fields: dict[str, Any], nothing: bool) -> None:
    assert ollama.says_nothing(path, fields) is nothing


@pytest.mark.parametrize("raw", [b"{", b"\xff", b"[" * 100_000, b"[]", b"5"])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        ollama.read(raw)
    assert ollama.read(b'{"a": 1}') == {"a": 1}


def test_a_model_has_either_name() -> None:
    assert [ollama.name_of(one) for one in ({"model": "a", "name": "b"}, {"model": "", "name": "b"})] == ["a", "b"]
    for wrong in ({}, {"model": 5}):
        with pytest.raises(BadRequest):
            ollama.name_of(wrong)


def test_an_empty_request_asks_for_one_token_and_unloads_only_where_it_may() -> None:
    for path in (CHAT, GENERATE):
        made = translated(path, keep_alive="5m", context=[1])
        assert made.path == b"/v1/chat/completions" and json.loads(made.body) == {
            "model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1
        }  # fmt: skip
        assert made.ignored == ("keep_alive", "context") and not made.answer.streams
        assert translated(path, keeps=True, keep_alive=0, context=[1]).ignored == ("context",)
        for said in (0, "0", "0s"):
            with pytest.raises(ApiError, match="operator") as refused:
                translated(path, keep_alive=said)
            assert (refused.value.status, refused.value.code) == (501, "not_supported")
        translated(path, keep_alive="")
        line = json.loads(made.answer.whole(b""))
        assert (line["done"], line["done_reason"], line.get("response")) == (
            True,
            "load",
            None if path == CHAT else "",
        )
    assert translated(GENERATE, prompt="x", keep_alive=0).ignored == ("keep_alive",)


def test_fields_without_effect_are_named() -> None:
    said: dict[str, Any] = {"keep_alive": "", "template": None, "context": [], "truncate": False}
    assert translated(CHAT, messages=[USER], **said).ignored == ("truncate",)
    raw: dict[str, Any] = {"raw": True, "prompt": "x", "images": ["AA"], "tools": [{}], "think": True, "system": "s"}
    assert translated(GENERATE, **raw).ignored == ("images", "tools", "think", "system")
    assert translated(GENERATE, raw=True, prompt="x", tools=[]).ignored == ()


@pytest.mark.parametrize(
    ("options", "fields", "ignored"),
    [
        ({"num_predict": 1}, {"max_tokens": 1}, ()),
        ({"num_predict": 0}, {}, ()),
        ({"num_predict": -1}, {}, ()),
        ({"num_predict": 1.5}, {}, ()),
        ({"temperature": 0}, {"temperature": 0}, ()),
        ({"seed": None, "num_ctx": None}, {}, ()),
        ({"num_ctx": 5, "top_k": 3}, {"top_k": 3}, ("options.num_ctx",)),
        ({"repeat_penalty": 1.1}, {"repeat_penalty": 1.1}, ()),
    ],
)
def test_options_have_their_fields(options: dict[str, Any], fields: dict[str, Any], ignored: tuple[str, ...]) -> None:
    made = translated(CHAT, messages=[USER], stream=False, options=options)
    assert json.loads(made.body) == {"model": "m", "stream": False, "messages": [USER]} | fields
    assert made.ignored == ignored


def test_a_repeat_penalty_has_the_engines_name() -> None:
    assert body(CHAT, engine="vllm", messages=[USER], options={"repeat_penalty": 1.1})["repetition_penalty"] == 1.1


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"messages": [USER], "stream": None}, {"stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {"messages": [USER], "stream": False}, {"stream": False, "stream_options": None}),
        (CHAT, {"messages": [USER], "format": ""}, {"response_format": None}),
        (CHAT, {"messages": [USER], "format": "json"}, {"response_format": {"type": "json_object"}}),
        (CHAT, {"messages": [USER], "format": {"a": 1}},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"a": 1}}}}),
        (CHAT, {"messages": [USER], "think": False},
         {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": None}),
        (CHAT, {"messages": [USER], "think": "low"},
         {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"}),
        (CHAT, {"messages": [USER], "tools": [{"a": 1}], "raw": True}, {"tools": [{"a": 1}], "messages": [USER]}),
        (CHAT, {"messages": [USER], "tools": []}, {"tools": None, "chat_template_kwargs": None}),
        (GENERATE, {"prompt": "hi"}, {"messages": [USER]}),
        (GENERATE, {"prompt": "hi", "system": "s"}, {"messages": [{"role": "system", "content": "s"}, USER]}),
        (GENERATE, {"images": ["AA"]}, {"messages": [{"role": "user", "content": [PICTURE]}]}),
        (GENERATE, {"prompt": "hi", "raw": True}, {"prompt": "hi", "suffix": None, "messages": None}),
        (GENERATE, {"prompt": "hi", "raw": 1}, {"prompt": None, "messages": [USER]}),
        (GENERATE, {"prompt": "hi", "suffix": "end"}, {"prompt": "hi", "suffix": "end", "messages": None}),
        (EMBED, {"input": ["a"], "dimensions": 7},
         {"model": "m", "encoding_format": "float", "input": ["a"], "dimensions": 7}),
        (EMBED, {"prompt": "a"}, {"input": "", "dimensions": None}),
        (EMBEDDINGS, {"prompt": "a", "input": "b"}, {"input": "a"}),
    ],
)  # fmt: skip
def test_a_request_has_openais_fields(path: bytes, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = body(path, **fields)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [5]}, "messages"),
        (CHAT, {"messages": {"a": 1}}, "messages"),
        (CHAT, {"messages": [USER], "options": [1]}, "options"),
        (CHAT, {"messages": [USER], "format": "xml"}, "format"),
        (CHAT, {"messages": [USER], "tools": "x"}, "tools"),
        (CHAT, {"messages": [USER | {"images": "AA"}]}, "images"),
        (CHAT, {"messages": [USER | {"images": [5]}]}, "images"),
        (CHAT, {"messages": [USER | {"tool_calls": [{"function": {}}]}]}, "messages"),
        (CHAT, {"messages": [USER | {"tool_calls": [{"function": 5}]}]}, "messages"),
    ],
)
def test_a_field_of_another_type_is_named(path: bytes, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        translated(path, **fields)
    assert refused.value.param == param


def test_images_stand_behind_their_text() -> None:
    text = {"type": "text", "text": "hi"}
    url = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,BB"}}
    both, alone = messages(
        USER | {"images": ["AA", "data:image/jpeg;base64,BB"]}, USER | {"content": "", "images": ["AA"]}
    )
    assert both["content"] == [text, PICTURE, url] and alone["content"] == [PICTURE]
    assert messages(USER | {"images": []}) == [USER]


def test_results_go_to_the_calls_that_they_answer() -> None:
    calls: list[dict[str, Any]] = [
        {"function": {"name": name, "arguments": args}} for name, args in (("f", {"a": 1}), ("g", "{}"), ("f", None))
    ]
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_name": "f", "content": "1"},
        {"role": "tool", "name": "unknown", "content": "2"},
        {"role": "tool", "tool_call_id": 7, "content": "3"},
        {"role": "tool", "tool_name": "f", "content": "4"},
        {"role": "tool", "tool_name": "f", "content": "5"},
    ]
    _, asked, *told = messages(USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results)
    assert [(call["id"], call["type"]) for call in asked["tool_calls"]] == [
        (f"call_1_{n}", "function") for n in range(3)
    ]
    assert [call["function"]["arguments"] for call in asked["tool_calls"]] == ['{"a":1}', "{}", "{}"]
    assert [one["tool_call_id"] for one in told] == ["call_1_0", "call_1_1", "7", "call_1_2", "call_0_0"]
    assert "tool_call_id" not in messages(USER)[0]


# -- answers -----------------------------------------------------------------------------------------------------------


def answer(*, streams: bool = True, is_chat: bool = True) -> OllamaAnswer:
    """Its clock ticks seconds."""
    ticks = itertools.count(10)
    return OllamaAnswer("m", lambda: float(next(ticks)), streams=streams, is_chat=is_chat)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(reason: str | None = None, **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": reason}])


def told(data: bytes) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in data.splitlines()]
    assert all(row.pop("model") == "m" and row.pop("created_at").endswith("Z") for row in found)
    return found


def test_an_answer_without_the_engines_times_has_those_of_the_router() -> None:
    made = answer()
    made.began(0.5)  # at 11
    assert told(made.end()) == [
        {
            "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop",
            "total_duration": 2_000_000_000, "load_duration": 500_000_000, "prompt_eval_count": 0,
            "prompt_eval_duration": 0, "eval_count": 0, "eval_duration": 1_000_000_000,
        }
    ]  # fmt: skip
    made = answer()
    made.began(-1.0)
    usage, timings = {"prompt_tokens": 5, "completion_tokens": 2}, {"prompt_ms": 250}
    assert made.events(event(choices=[], usage=usage, timings=timings) + event(choices=[])) == b""
    (last,) = told(made.end())
    assert (last["prompt_eval_count"], last["eval_count"], last["load_duration"]) == (5, 2, 0)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (250_000_000, 750_000_000)
    made = answer()
    made.events(event(timings={"prompt_ms": 5000}))
    assert told(made.end())[0]["eval_duration"] == 0
    made.events(event(timings={"prompt_ms": 5000, "predicted_ms": 7}))
    assert told(made.end())[0]["eval_duration"] == 7_000_000


def test_a_stream_has_a_line_for_each_text_and_thought() -> None:
    made = answer()
    data = delta(content="a", reasoning_content="b") + delta(reasoning="c") + delta(role="assistant") + delta("length")
    said = told(made.events(data + event(x=1) + b"data: [1]\n\ndata: [DONE]\n\n" + delta()))
    assert said == [
        {"message": {"role": "assistant", "content": "a", "thinking": "b"}, "done": False},
        {"message": {"role": "assistant", "content": "", "thinking": "c"}, "done": False},
    ]
    assert told(made.end())[-1]["done_reason"] == "length"


def test_a_completions_stream_has_its_text_in_response() -> None:
    made = answer(is_chat=False)
    assert told(made.events(event(choices=[{"index": 0, "text": "a"}]))) == [{"response": "a", "done": False}]
    assert told(made.events(delta(reasoning="c"))) == [{"response": "", "thinking": "c", "done": False}]
    assert told(made.end())[0]["response"] == ""


def test_calls_come_before_the_end_with_what_can_be_read_of_their_arguments() -> None:
    made = answer()
    for index, name, arguments in ((0, "f", '{"a": 1}'), (1, "g", '{"cut'), (2, "h", "")):
        call = {"index": index, "function": {"name": name, "arguments": arguments}}
        assert made.events(delta(tool_calls=[call])) == b""
    calls, last = told(made.end())
    assert calls["message"]["tool_calls"] == [
        {"function": {"name": name, "arguments": arguments}}
        for name, arguments in (("f", {"a": 1}), ("g", {"": '{"cut'}), ("h", {}))
    ]
    assert not calls["done"] and last["done"] and "tool_calls" not in last["message"]


def test_an_answer_in_one_piece() -> None:
    message = {
        "content": None,
        "reasoning": "b",
        "tool_calls": [{"function": {"name": n, "arguments": "{}"}} for n in "fg"],
    }
    (found,) = told(
        answer(streams=False).whole(event(choices=[{"message": message, "finish_reason": "tool_calls"}])[6:])
    )
    assert found["message"] == {
        "role": "assistant", "content": "", "thinking": "b",
        "tool_calls": [{"function": {"name": name, "arguments": {}}} for name in "fg"],
    }  # fmt: skip
    assert (found["done"], found["done_reason"]) == (True, "stop")
    text = {"choices": [{"text": "a", "finish_reason": "length"}], "usage": {"prompt_tokens": 3}}
    (found,) = told(answer(is_chat=False).whole(json.dumps(text).encode()))
    assert (found["response"], found["done_reason"], found["prompt_eval_count"]) == ("a", "length", 3)


def test_an_error_is_its_message() -> None:
    for error in (b'{"error": {"message": "no"}}', b'{"error": "no"}'):
        assert answer().error_event(error) == b'{"error":"no"}\n'


def test_embeddings_come_in_the_order_of_their_texts_with_their_counts() -> None:
    rows = [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}]
    raw = json.dumps({"data": rows, "usage": {"prompt_tokens": 3}}).encode()
    found = json.loads(translated(EMBED, input=["a", "b"]).answer.whole(raw))
    assert found == {"model": "m", "embeddings": [[1.0], [2.0]], "total_duration": 0, "load_duration": 0,
                     "prompt_eval_count": 3}  # fmt: skip
    assert json.loads(translated(EMBEDDINGS, prompt="a").answer.whole(raw)) == {"embedding": [1.0]}


def test_a_model_is_shown_as_ollamas_clients_expect_it() -> None:
    model = a_model(engine="llamacpp", context_tokens=77)
    row = ollama.row(model, 0.0)
    assert (row["name"], row["model"], row["modified_at"]) == ("m:latest", "m:latest", "1970-01-01T00:00:00Z")
    assert ollama.tag(a_model("m:8b")) == "m:8b"
    assert [ollama.details(a_model(engine=engine))["format"] for engine in ("llamacpp", "vllm")] == [
        "gguf",
        "safetensors",
    ]
    shown = ollama.shown(model, ["tools"], 0.0)
    assert shown["model_info"] == {"general.architecture": "llamacpp", "llamacpp.context_length": 77}
    assert (shown["capabilities"], shown["details"]["families"]) == (["tools"], ["llamacpp"])


def test_an_unloaded_model_says_so() -> None:
    for path, field in ((CHAT, "message"), (GENERATE, "response")):
        (found,) = told(ollama.unloaded(path, {"model": "m"}, lambda: 0.0))
        assert (found["done"], found["done_reason"]) == (True, "unload") and field in found
