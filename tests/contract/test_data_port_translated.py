"""Translated requests and answers."""

import asyncio
import json
from typing import Any

import pytest

from glowplug.events.facts import ModelKeepAliveAsked
from glowplug.services.router import intake, ollama
from glowplug.services.router.settings import Limits
from tests.contract.continuation_rig import sse
from tests.contract.data_port_rig import (
    DONE,
    Answer,
    FakeEngine,
    Rig,
    a_model,
    a_rig,
    answering,
    data_events,
    get,
    hang,
    post,
    sending,
    streaming,
)
from tests.waiting import WAIT_S

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
TIMES = {"prompt_ms": 10.0, "predicted_ms": 20.0}
LLAMACPP = (a_model(engine="llamacpp"),)


def asking(path: str, **fields: Any) -> bytes:
    return post(path, json.dumps({"model": "m", **fields}).encode())


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, index: int = 0) -> bytes:
    return event(object="chat.completion.chunk", choices=[{"index": index, "delta": {"content": text}}])


def ended(index: int = 0, reason: str = "stop") -> bytes:
    choice = {"index": index, "delta": {}, "finish_reason": reason}
    return event(object="chat.completion.chunk", choices=[choice])


def counted(**more: Any) -> bytes:
    return event(object="chat.completion.chunk", choices=[], usage=USAGE, **more)


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.complete
    return [json.loads(line) for line in answer.body.splitlines()]


def body_of(engine: FakeEngine, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(engine.served[number].body)
    return found


WHOLE = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "length"}],
    "usage": USAGE,
    "timings": TIMES,
}


# Ollama

FIELDS = (
    *("model", "messages", "prompt", "system", "images", "tools", "format", "options", "stream", "think", "keep_alive"),
    *("suffix", "raw", "input", "dimensions", "messages.role", "messages.content", "messages.images"),
    *("messages.tool_calls", "messages.tool_name", "messages.tool_call_id", "options.num_predict", "options.stop"),
)
VALUES = (5, -1, True, 1.5, 10**12, None, "x", "", [], [5], [None], [[]], {}, {"a": 1}, [{"a": 1}], [{"function": 5}])
ASKED = ("chat", "generate", "embed", "embeddings", "show", "pull", "delete")


@pytest.mark.parametrize("call", ASKED)
async def test_a_field_of_any_type_gets_an_answer(call: str) -> None:
    """`images: 5` once ended the connection unanswered, and its bytes counted as held for ever."""
    async with a_rig() as rig:
        await rig.engine(answering({**WHOLE, "data": [{"index": 0, "embedding": [0.5]}]}))
        for field in FIELDS:
            outer, _, inner = field.partition(".")
            for value in VALUES:
                message = {"role": "user", "content": "hi"} | ({inner: value} if outer == "messages" else {})
                body = {"model": "m", "prompt": "hi", "messages": [message], "stream": False}
                body |= {} if outer == "messages" and inner else {outer: {inner: value} if inner else value}
                answer = await rig.ask(post(f"/api/{call}", json.dumps(body).encode()))
                assert answer.status in (200, 400, 404, 405, 501), (field, value, answer.status, answer.body)
                assert answer.status == 200 or set(json.loads(answer.body)) == {"error"}, (field, value)
        assert rig.port.context.buffered_bytes == 0


async def test_a_chat_streams_lines_unless_it_is_asked_not_to() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(streaming(token("Hel"), token("lo"), ended(), counted(timings=TIMES), DONE))
        *parts, last = lines(await rig.ask(asking("/api/chat", messages=MESSAGES)))
        engine.reply = answering(WHOLE)
        whole = await rig.ask(asking("/api/chat", messages=MESSAGES, stream=False))
    assert [part["message"] for part in parts] == [{"role": "assistant", "content": text} for text in ("Hel", "lo")]
    assert [part["done"] for part in parts] == [False, False] and {part["model"] for part in parts} == {"m"}
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (5, 2)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (10_000_000, 20_000_000)
    assert last["total_duration"] > last["load_duration"] == 0
    found = whole.json()
    assert (found["message"]["content"], found["done"], found["done_reason"]) == ("Hello", True, "length")
    assert whole.headers["content-type"] == "application/json"
    assert engine.served[0].head.startswith(b"POST %b HTTP/1.1\r\n" % intake.CHAT)
    assert body_of(engine)["stream_options"] == {"include_usage": True} and body_of(engine, 1)["stream"] is False


async def test_options_go_to_the_fields_that_they_mean_and_the_others_are_named() -> None:
    options = {"temperature": 0.5, "num_predict": 7, "stop": ["x"], "repeat_penalty": 1.1, "num_ctx": 99, "seed": None}
    async with a_rig() as rig:
        engine = await rig.engine(answering(WHOLE))
        asked = asking("/api/chat", messages=MESSAGES, stream=False, options=options, keep_alive="5m", format="json")
        answer = await rig.ask(asked)
        unbounded = await rig.ask(asking("/api/generate", prompt="x", stream=False, options={"num_predict": -1}))
    asked_for = body_of(engine)
    assert {name: asked_for[name] for name in ("temperature", "max_tokens", "stop", "repeat_penalty")} == {
        "temperature": 0.5, "max_tokens": 7, "stop": ["x"], "repeat_penalty": 1.1
    }  # fmt: skip
    assert asked_for["response_format"] == {"type": "json_object"} and "seed" not in asked_for
    assert answer.headers["x-glowplug-unknown-fields"] == "keep_alive, options.num_ctx"
    assert "max_tokens" not in body_of(engine, 1) and unbounded.json()["response"] == "Hello"


async def test_a_generate_is_a_chat_of_one_message_and_raw_a_completion() -> None:
    text = {"choices": [{"index": 0, "text": " world", "finish_reason": "stop"}], "usage": USAGE}
    async with a_rig() as rig:
        engine = await rig.engine(answering(WHOLE))
        await rig.ask(asking("/api/generate", prompt="hi", system="Be brief", stream=False))
        engine.reply = answering(text)
        raw = await rig.ask(asking("/api/generate", prompt="Hello", raw=True, stream=False))
    assert body_of(engine)["messages"] == [{"role": "system", "content": "Be brief"}, *MESSAGES]
    assert engine.served[1].head.startswith(b"POST /v1/completions ") and body_of(engine, 1)["prompt"] == "Hello"
    assert raw.json()["response"] == " world"


async def test_calls_and_their_results_are_told_in_each_apis_way() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    first, second = ({"function": {"name": name, "arguments": {"b": 2}}} for name in "fg")
    conversation = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [first, second]},
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "tool_name": "f", "content": "1"},
    ]
    parts = [
        {"index": 0, "function": {"name": "f", "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    pieces = [event(choices=[{"index": 0, "delta": {"tool_calls": [part]}}]) for part in parts]
    async with a_rig() as rig:
        engine = await rig.engine(
            answering({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
        )
        whole = (await rig.ask(asking("/api/chat", messages=conversation, stream=False, tools=[]))).json()
        engine.reply = streaming(*pieces, ended(reason="tool_calls"), DONE)
        streamed = lines(await rig.ask(asking("/api/chat", messages=MESSAGES)))
    made = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert whole["message"]["tool_calls"] == made and whole["done_reason"] == "stop"
    assert streamed[0]["message"]["tool_calls"] == made and streamed[-1]["done"]
    _, calls, result_g, result_f = body_of(engine)["messages"]
    assert json.loads(calls["tool_calls"][0]["function"]["arguments"]) == {"b": 2}
    assert [result_f["tool_call_id"], result_g["tool_call_id"]] == [one["id"] for one in calls["tool_calls"]]


async def test_embeddings_of_both_paths() -> None:
    vectors = {
        "data": [{"index": 1, "embedding": [2.0]}, {"index": 0, "embedding": [1.0]}],
        "usage": {"prompt_tokens": 3},
    }
    async with a_rig() as rig:
        engine = await rig.engine(answering(vectors))
        several = (await rig.ask(asking("/api/embed", input=["a", "b"]))).json()
        one = (await rig.ask(asking("/api/embeddings", prompt="a"))).json()
    assert several["embeddings"] == [[1.0], [2.0]] and several["prompt_eval_count"] == 3
    assert one == {"embedding": [1.0]} and body_of(engine)["input"] == ["a", "b"] and body_of(engine, 1)["input"] == "a"


async def test_a_request_that_says_nothing_loads_its_model() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(answering(WHOLE))
        for asked in (asking("/api/generate", keep_alive="1h"), asking("/api/chat", messages=[])):
            found = (await rig.ask(asked)).json()
            assert (found["done"], found["done_reason"]) == (True, "load")
            assert (found.get("response"), found.get("message")) in (
                ("", None),
                (None, {"role": "assistant", "content": ""}),
            )
        unloaded = [await rig.ask(asking("/api/generate", keep_alive=none)) for none in (0, 0.0, "0", "0s", "-0h0m")]
        wrong = [await rig.ask(asking("/api/generate", keep_alive=odd)) for odd in ODD]
        assert rig.published == []
        raw = await rig.ask(asking("/api/generate", prompt="x", raw=True, system="Be brief", stream=False))
    assert body_of(engine)["max_tokens"] == 1 and len(engine.served) == 3
    assert {(one.status, one.json()["error"]) for one in unloaded} == {(501, ollama.IS_KEPT)}
    assert {one.status for one in wrong} == {400}
    assert raw.headers["x-glowplug-unknown-fields"] == "system"


ODD: tuple[Any, ...] = ("5", "-", "1s-", "--1s", [], True, "1" * 100_000)
MAY_SAY = Limits(client_keep_alive_s=600.0)


def kept(rig: Rig) -> list[float]:
    said = [effect.payload for effect in rig.published if isinstance(effect.payload, ModelKeepAliveAsked)]
    assert {one.model_key for one in said} <= {"m"}
    return [one.keep_alive_s for one in said]


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [("5m", 300), ("1m1.5s", 61.5), (7, 7), (0.5, 0.5), ("0", 0), ("2h", 600), (-1, 600), ("-1m", 600), (10**30, 600)],
)
async def test_a_keep_alive_is_said_once_its_request_is_over_within_what_an_operator_allows(
    asked: Any, seconds: float
) -> None:
    async with a_rig(MAY_SAY) as rig:
        go = asyncio.Event()
        await rig.engine(streaming(token("a"), go, ended(), DONE))
        client = await rig.sent(asking("/api/chat", messages=MESSAGES, keep_alive=asked))
        await client.head()
        assert kept(rig) == []
        go.set()
        await client.rest()
        assert kept(rig) == [seconds]
        gone = await rig.sent(asking("/api/generate", prompt="x", keep_alive=asked))
        await rig.until(lambda: rig.num_in_flight == 1)
        gone.close()
        await rig.until(lambda: len(kept(rig)) == 2)
        answer = await rig.ask(asking("/api/embed", input="a"))
    assert kept(rig) == [seconds, seconds] and "x-glowplug-unknown-fields" not in answer.headers


@pytest.mark.parametrize(("models", "longest"), [(-1, -1), (900, 900)])
async def test_a_model_that_stays_longer_of_itself_may_be_asked_to(models: float, longest: float) -> None:
    async with a_rig(MAY_SAY, models=(a_model(keep_alive_s=models),)) as rig:
        await rig.engine(answering(WHOLE))
        answer = await rig.ask(asking("/api/chat", messages=MESSAGES, stream=False, keep_alive=-1, template="x"))
        assert kept(rig) == [longest] and answer.headers["x-glowplug-unknown-fields"] == "template"
        await rig.ask(asking("/api/chat", messages=MESSAGES, stream=False, keep_alive=60))
        assert kept(rig) == [longest, 60]


async def test_a_model_is_loaded_and_unloaded_by_a_client_where_it_may_say_so() -> None:
    async with a_rig(MAY_SAY) as rig:
        engine = await rig.engine(answering(WHOLE))
        loaded = (await rig.ask(asking("/api/generate", keep_alive="10m"))).json()
        unloaded = (await rig.ask(asking("/api/generate", keep_alive=0))).json()
        chat = (await rig.ask(asking("/api/chat", messages=[], keep_alive="0s"))).json()
        assert kept(rig) == [600, 0, 0] and len(engine.served) == 1
        wrong = [await rig.ask(asking("/api/chat", messages=MESSAGES, keep_alive=odd)) for odd in ODD]
        assert kept(rig) == [600, 0, 0]
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert (unloaded["model"], unloaded["response"]) == ("m", "") and unloaded["created_at"]
    assert {(one["done"], one["done_reason"]) for one in (unloaded, chat)} == {(True, "unload")}
    assert chat["message"] == {"role": "assistant", "content": ""}
    assert {one.status for one in wrong} == {400} and all("keep_alive" in one.json()["error"] for one in wrong)


@pytest.mark.parametrize("path", ["/api/chat", "/api/chat/"])
async def test_errors_have_ollamas_shape_before_and_within_a_stream(path: str) -> None:
    failing = event(error={"code": 500, "message": "it broke", "type": "server_error"})
    async with a_rig() as rig:
        engine = await rig.engine(answering({"error": {"message": "too hot"}}, "400 Bad Request"))
        unknown = await rig.ask(post(path, b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}'))
        refused = await rig.ask(asking(path, messages=MESSAGES))
        wrong = await rig.ask(asking(path, messages="x"))
        refused_here = await rig.ask(asking(path, messages=MESSAGES, options={"temperature": 99}))
        broken = await rig.ask(post(path, b"{"))
        engine.reply = streaming(token("a"), failing)
        cut = await rig.ask(asking(path, messages=MESSAGES))
        engine.reply = sending(b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{", then="die")
        lost = await rig.ask(asking(path, messages=MESSAGES, stream=False))
        method = await rig.ask(get(path))
    assert unknown.status == 404 and "`nope` does not exist" in unknown.json()["error"]
    assert refused.status == 400 and refused.json() == {"error": "too hot"}
    assert (wrong.status, wrong.json()) == (400, {"error": "messages is not a list of objects."})
    assert refused_here.status == 400 and refused_here.json()["error"].startswith("temperature")
    assert broken.status == 400 and "not JSON" in broken.json()["error"]
    assert "error" in lines(cut)[-1] and cut.status == 200
    assert lost.status >= 500 and lost.complete and isinstance(lost.json()["error"], str)
    assert method.status == 405 and isinstance(method.json()["error"], str)


async def test_models_are_listed_shown_and_pulled() -> None:
    async with a_rig(models=(a_model(), a_model("other"))) as rig:
        await rig.engine(answering(WHOLE))
        tags = (await rig.ask(get("/api/tags"))).json()["models"]
        loaded = (await rig.ask(get("/api/ps"))).json()["models"]
        shown = (await rig.ask(asking("/api/show"))).json()
        pulled = await rig.ask(asking("/api/pull"))
        absent = await rig.ask(post("/api/pull", b'{"model": "nope"}'))
        version = (await rig.ask(get("/api/version"))).json()
        not_ours = await rig.ask(asking("/api/create"))
    assert [row["name"] for row in tags] == ["m:latest", "other:latest"] and tags[0]["size"] > 0
    assert [row["name"] for row in loaded] == ["m:latest"]
    assert "completion" in shown["capabilities"] and shown["model_info"]["fake.context_length"] > 0
    assert lines(pulled)[-1] == {"status": "success"}
    assert (absent.status, not_ours.status, not_ours.json()) == (404, 501, {"error": ollama.IS_OPERATORS})
    assert version["version"]


async def test_the_key_is_asked_for_on_ollamas_paths_too() -> None:
    async with a_rig(api_key="secret") as rig:
        await rig.engine(answering(WHOLE))
        for asked in (get("/api/tags"), asking("/api/chat", messages=MESSAGES), asking("/api/show")):
            refused = await rig.ask(asked)
            assert refused.status == 401 and isinstance(refused.json()["error"], str)
        key = b"authorization: Bearer secret\r\n"
        assert (await rig.ask(get("/api/tags", extra=key))).status == 200


async def test_a_connection_goes_on_after_translated_answers_and_an_old_client_gets_the_same() -> None:
    asked = asking("/api/chat", messages=MESSAGES)
    async with a_rig() as rig:
        engine = await rig.engine(streaming(token("a"), ended(), DONE))
        client = await rig.sent(asked + asked)
        first, second = await client.answer(), await client.answer()
        engine.reply = answering(WHOLE)
        await client.send(asking("/api/chat", messages=MESSAGES, stream=False))
        third = await client.answer()
        engine.reply = streaming(token("a"), ended(), DONE)
        old = await rig.ask(asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert lines(first)[0]["message"] == lines(second)[0]["message"] == {"role": "assistant", "content": "a"}
    assert third.json()["message"]["content"] == "Hello"
    assert "transfer-encoding" not in old.headers and lines(old)[-1]["done"]


async def test_a_client_that_leaves_a_translated_stream_ends_it_at_the_engine(rig: Rig) -> None:
    engine = await rig.engine(streaming(token("a"), then="hang"))
    client = await rig.sent(asking("/api/chat", messages=MESSAGES))
    await client.head()
    client.close()
    await asyncio.wait_for(engine.served[0].left.wait(), WAIT_S)
    assert rig.port.context.buffered_bytes == 0


async def test_a_lines_client_is_held_like_any_other() -> None:
    async with a_rig() as rig:
        client = await rig.held(asking("/api/chat", messages=MESSAGES))
        await rig.engine(streaming(token("a"), ended(), counted(), DONE))
        last = lines(await client.answer())[-1]
    assert 0 < last["load_duration"] <= last["total_duration"]


# several sequences


def several() -> list[bytes]:
    return [token("a", 0), token("b", 1), token("c", 1), token("d", 0), ended(0), counted(), ended(1), counted(), DONE]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1}}, {"enable_thinking": False, "a": 1}),
    ],
)
async def test_whether_and_how_long_a_message_is_thought_about_reaches_the_template(
    path: str, fields: dict[str, Any], settings: dict[str, Any] | None
) -> None:
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(answering({"type": "message", "content": [], "input_tokens": 1}))
        more = {"max_tokens": 2} if path == "/v1/messages" else {}
        assert (await rig.ask(asking(path, messages=MESSAGES, **more, **fields))).status == 200
        assert json.loads(engine.served[0].body).get("chat_template_kwargs") == settings


async def test_one_call_at_a_time_is_asked_for_as_of_a_chat() -> None:
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(answering({"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}))
        tools = [{"name": "f", "input_schema": {"type": "object"}}]
        choice = {"type": "auto", "disable_parallel_tool_use": True}
        fields = {"messages": MESSAGES, "max_tokens": 2, "tools": tools, "tool_choice": choice}
        answer = (await rig.ask(asking("/v1/messages", **fields))).json()
        asked = json.loads(engine.served[0].body)
        assert asked["parallel_tool_calls"] is False and "tool_choice" not in asked
        assert answer["content"] == [{"type": "text", "text": "a"}]


async def test_documents_go_to_the_engine_as_texts() -> None:
    async with a_rig(models=(a_model(engine="llamacpp", engine_args={"embeddings": True, "pooling": "rank"}),)) as rig:
        engine = await rig.engine(answering({"results": []}))
        await rig.ask(asking("/v1/rerank", query="q", documents=["a", {"text": "b"}]))
        assert json.loads(engine.served[0].body)["documents"] == ["a", "b"]
        odd = await rig.ask(asking("/v1/rerank", query="q", documents=[{"text": "b", "title": "c"}]))
        assert (odd.status, odd.json()["error"]["param"]) == (400, "documents[0].title")
        assert (await rig.ask(asking("/v1/embeddings", input="a"))).status == 501, "a reranker has no embeddings"


async def test_a_chat_of_several_answers_has_one_usage_in_one_piece_and_as_a_stream() -> None:
    total = {
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(streaming(*several()))
        whole = (await rig.ask(asking(CHAT, messages=MESSAGES, n=2))).json()
        streamed = await rig.ask(
            asking(CHAT, messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True})
        )
        plain = await rig.ask(asking(CHAT, messages=MESSAGES, n=2, stream=True))
        await rig.until(lambda: len(rig.finished) == 3)
        assert [one.token_counts()[:3] for one in rig.finished] == [(5, 4, True)] * 3
    assert whole["usage"] == total and whole["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["ad", "bc"]
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"stop"}
    *rest, usage, done = [event.removeprefix(b"data: ") for event in data_events(streamed.body)]
    assert done == b"[DONE]" and json.loads(usage)["usage"] == total and json.loads(usage)["choices"] == []
    assert not any(b"usage" in event for event in rest) and b"usage" not in plain.body
    assert body_of(engine)["stream"] is True and body_of(engine)["n"] == 2


async def test_completions_of_several_prompts_count_each_prompt_once() -> None:
    def piece(index: int, text: str, usage: dict[str, int] | None = None) -> bytes:
        choice = {"index": index, "text": text, "finish_reason": "length" if usage else None, "logprobs": None}
        return event(object="text_completion", choices=[choice], **({"usage": usage} if usage else {}))

    one = {"prompt_tokens": 3, "completion_tokens": 2}
    events = [piece(i, text) for i, text in enumerate("abcd")] + [piece(i, "!", one) for i in range(4)]
    async with a_rig(models=LLAMACPP) as rig:
        await rig.engine(streaming(*events, DONE))
        found = (await rig.ask(asking(COMPLETIONS, prompt=["x", "y"], n=2))).json()
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (6, 8)
    assert [choice["text"] for choice in found["choices"]] == ["a!", "b!", "c!", "d!"]


async def test_an_engine_lost_among_several_answers_is_an_error_and_never_a_half() -> None:
    async with a_rig(models=LLAMACPP) as rig:
        await rig.engine(streaming(*several()[:4], then="die"))
        lost = await rig.ask(asking(CHAT, messages=MESSAGES, n=2))
        cut = await rig.ask(asking(CHAT, messages=MESSAGES, n=2, stream=True))
    assert lost.status >= 500 and lost.complete and lost.json()["error"]["message"]
    assert b'"error"' in data_events(cut.body)[-1] and cut.complete


@pytest.mark.parametrize("fields", [{"messages": MESSAGES}, {"messages": MESSAGES, "n": 1}])
async def test_one_answer_passes_untouched(fields: dict[str, Any]) -> None:
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(answering(WHOLE))
        assert (await rig.ask(asking(CHAT, **fields))).json() == WHOLE
    assert "stream" not in body_of(engine)


# tools that have to be called

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"in": {"$ref": "#/$defs/p"}},
            "$defs": {"p": {"type": "string"}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '{ "name": "weather", "arguments": {"in": "Paris}"} }'


def called(text: str, reason: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": USAGE}


async def test_a_forced_call_is_held_to_the_tools_schema_and_comes_as_a_call() -> None:
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(answering(called(CALL)))
        fields = {"messages": MESSAGES, "tools": [WEATHER, CLOCK], "tool_choice": "required"}
        (choice,) = (await rig.ask(asking(CHAT, **fields))).json()["choices"]
        engine.reply = streaming(*(token(text) for text in ("", CALL[:9], CALL[9:])), ended(), counted(), DONE)
        streamed = await rig.ask(asking(CHAT, **fields, stream=True))
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert call["function"] == {"name": "weather", "arguments": '{"in": "Paris}"}'} and call["id"]
    asked = body_of(engine)
    assert not {"tools", "tool_choice"} & set(asked)
    schema = asked["response_format"]["json_schema"]["schema"]
    assert schema["$defs"] == {"p": {"type": "string"}} and len(schema["anyOf"]) == 2
    assert schema["anyOf"][0]["properties"]["name"] == {"const": "weather"}
    assert asked["messages"][0]["role"] == "system" and '"weather"' in asked["messages"][0]["content"]
    *_, made, usage, _done = (json.loads(e[6:]) if e[6:7] == b"{" else {} for e in data_events(streamed.body))
    (last,) = made["choices"]
    assert last["delta"]["tool_calls"][0]["function"] == call["function"] and last["finish_reason"] == "tool_calls"
    assert usage["usage"] == USAGE and b'"content": "{' not in streamed.body


async def test_a_tool_by_name_is_the_only_one_that_may_be_called() -> None:
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(answering(called('{"name":"clock","arguments":{', "length")))
        earlier = [
            {"role": "system", "content": "Be brief."},
            *MESSAGES,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", **CLOCK, "function": {"name": "clock", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
        ]
        fields = {"messages": earlier, "tools": [WEATHER, CLOCK], "tool_choice": CLOCK}
        (choice,) = (await rig.ask(asking(CHAT, **fields))).json()["choices"]
        both = await rig.ask(asking(CHAT, **fields, n=2))
    asked = body_of(engine)
    assert asked["response_format"]["json_schema"]["schema"]["properties"]["name"] == {"const": "clock"}
    assert asked["messages"][0]["content"].startswith("Be brief.\n\n") and "noon" in asked["messages"][3]["content"]
    assert {message["role"] for message in asked["messages"]} == {"system", "user", "assistant"}
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"][0]["function"]["arguments"] == "{"
    assert (both.status, both.json()["error"]["param"]) == (400, "n")


async def test_what_an_engine_answers_that_is_no_answer_is_an_error() -> None:
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(answering({"nothing": 1}))
        fields = {"messages": MESSAGES, "tools": [CLOCK], "tool_choice": "required"}
        odd = await rig.ask(asking(CHAT, **fields))
        engine.reply = hang
        client = await rig.sent(asking(CHAT, **fields))
        await rig.until(lambda: len(engine.served) == 2)
        client.close()
        await asyncio.wait_for(engine.served[1].left.wait(), WAIT_S)
    assert odd.status >= 500 and "not match its API" in odd.json()["error"]["message"]


# custom tools of chats


CUSTOM = {"type": "custom", "custom": {"name": "run", "description": "Runs it."}}
GRAMMAR = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {}}}}
RUNS = {"id": "1", "type": "custom", "custom": {"name": "run", "input": 'say "a"'}}
AS_FUNCTION = {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"input":"say \\"a\\""}'}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
EARLIER = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": None, "tool_calls": [RUNS]},
    {"role": "tool", "tool_call_id": "1", "content": "a"},
]


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "emulated"])
async def test_a_custom_tool_of_a_chat_is_a_function_with_one_text(engine: str) -> None:
    asked = {"messages": EARLIER, "tools": [CLOCK, CUSTOM, GRAMMAR], "max_tokens": 5, "x": 1}
    told = {"index": 0, "finish_reason": "tool_calls", "message": {"content": None, "tool_calls": [AS_FUNCTION]}}
    pieces = [AS_FUNCTION["function"]["arguments"][i : i + 5] for i in range(0, 23, 5)]  # type: ignore[index]
    head = {"index": 0, "id": "1", "type": "function", "function": {"name": "run", "arguments": ""}}
    deltas = [{"tool_calls": [head]}, *({"tool_calls": [{"index": 0, "function": {"arguments": p}}]} for p in pieces)]
    other = {"index": 1, "id": "2", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    chunks = [sse({"choices": [{"index": 0, "delta": one}]}) for one in [*deltas, {"tool_calls": [other]}]]
    chunks += [sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}), DONE]
    async with a_rig(models=(a_model(engine=engine),)) as rig:
        fake = await rig.engine(answering({"choices": [told]}))
        whole = await rig.ask(asking(CHAT, **asked))
        fake.reply = streaming(*chunks)
        stream = await rig.ask(asking(CHAT, **asked, stream=True))
        none = await rig.ask(asking(CHAT, messages=EARLIER[:1], tools=[GRAMMAR], tool_choice="auto"))
    assert whole.json()["choices"][0]["message"]["tool_calls"] == [RUNS]
    assert whole.headers["x-glowplug-dropped-tools"] == "custom" and whole.headers["x-glowplug-unknown-fields"] == "x"
    found = [json.loads(line[6:]) for line in stream.body.splitlines() if line.startswith(b"data: {")]
    calls = [call for one in found for call in one["choices"][0]["delta"].get("tool_calls", ())]
    assert calls == [other, RUNS | {"index": 0}] and stream.body.endswith(DONE) and none.status == 200
    first, _, last = (json.loads(served.body) for served in fake.served)
    assert [tool["function"]["name"] for tool in first["tools"]] == ["clock", "run"]
    assert first["messages"][1]["tool_calls"] == [AS_FUNCTION] and not {"tools", "tool_choice"} & set(last)
