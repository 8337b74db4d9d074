"""Errors in each API's own shape, and 501 where an engine cannot."""

import asyncio
import json
from typing import Any

import pytest

from glowplug.domain.instance import InstanceState
from glowplug.domain.model import OnCold
from glowplug.runtime.settings import ServiceSettings
from glowplug.services.router import wire
from glowplug.services.router.settings import Limits
from tests.contract.data_port_rig import (
    DONE,
    TOKEN,
    Answer,
    FakeEngine,
    Rig,
    a_model,
    a_rig,
    an_instance,
    answering,
    chat,
    die_at_once,
    get,
    post,
    sending,
    streaming,
)

CHAT, COMPLETION, EMBEDDING, RESPONSE, MESSAGE, COUNT, RERANK = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
)
USER = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    COMPLETION: {"model": "m", "prompt": "Hi"},
    EMBEDDING: {"model": "m", "input": "Hi"},
    RESPONSE: {"model": "m", "input": "Hi"},
    MESSAGE: {"model": "m", "messages": [USER], "max_tokens": 8},
    COUNT: {"model": "m", "messages": [USER]},
    RERANK: {"model": "m", "query": "Hi", "documents": ["a", {"text": "b"}]},
}
WHERE = {
    CHAT: "messages", COMPLETION: "prompt", EMBEDDING: "input", RESPONSE: "input", MESSAGE: "messages",
    COUNT: "messages", RERANK: "documents",
}  # fmt: skip
QUICK = Limits(keepalive_after_s=0.02, keepalive_every_s=0.02)
LLAMA = {
    "code": 400, "message": "request (31 tokens) exceeds the available context size (10 tokens), try increasing",
    "type": "exceed_context_size_error", "n_prompt_tokens": 31, "n_ctx": 10,
}  # fmt: skip
TOO_LARGE = "input (31 tokens) is too large to process. increase the physical batch size (current batch size: 10)"
INVALID = "invalid_request_error"
VLLM = "This model's maximum context length is 10 tokens. However, you requested 31 tokens."


def asking(path: str, extra: bytes = b"", **fields: Any) -> bytes:
    return post(path, json.dumps(BODIES[path] | fields).encode(), extra)


def error_of(answer: Answer, path: str) -> dict[str, Any]:
    found = answer.json()
    if path in (MESSAGE, COUNT):
        assert found.keys() == {"type", "error"} and found["type"] == "error"
        assert found["error"].keys() == {"type", "message"}
    else:
        assert found.keys() == {"error"} and found["error"].keys() == {"message", "type", "param", "code"}
        assert isinstance(found["error"]["code"], str)
    return dict(found["error"])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "said",
    [
        {"error": LLAMA},
        {"error": {"code": 500, "message": TOO_LARGE, "type": "server_error"}},
        {"error": {"message": VLLM, "type": "BadRequestError", "param": None, "code": 400}},
        {"object": "error", "message": VLLM, "type": "BadRequestError", "param": None, "code": 400},
        {"type": "error", "error": {"type": "BadRequestError", "message": VLLM}},
        {"error": {"message": VLLM, "type": "invalid_request_error", "param": "x", "code": "context_length_exceeded"}},
    ],
)
async def test_a_prompt_too_long_is_the_same_error_whichever_engine_says_so(rig: Rig, path: str, said: Any) -> None:
    await rig.engine(answering(said, "400 Bad Request"))
    answer = await rig.ask(asking(path))
    error = error_of(answer, path)
    assert answer.status == 400 and error["type"] == "invalid_request_error"
    assert "maximum context length is 10 tokens" in error["message"] and "31 tokens" in error["message"]
    if path not in (MESSAGE, COUNT):
        assert (error["code"], error["param"]) == ("context_length_exceeded", WHERE[path])


@pytest.mark.parametrize(
    ("said_status", "said", "status", "code", "kind"),
    [
        ("400", {"error": {"code": 400, "message": "no", "type": "x"}}, 400, "bad_request", INVALID),
        ("422", {"detail": [{"loc": ["body", "n"]}]}, 422, "bad_request", INVALID),
        ("500", {"error": {"code": 500, "message": "no"}}, 500, "engine_error", "server_error"),
        ("500", b"Traceback", 500, "engine_error", "server_error"),
        ("503", {"error": {"code": 503, "message": "Loading model"}}, 503, "engine_unavailable", "service_unavailable"),
        ("429", {"message": "slow down"}, 429, "engine_overloaded", "rate_limit_error"),
        ("404", {"error": {"message": "File Not Found", "code": 404}}, 501, "not_supported", "server_error"),
        ("404", {"detail": "Not Found"}, 501, "not_supported", "server_error"),
        ("405", {"detail": "Method Not Allowed"}, 501, "not_supported", "server_error"),
        ("404", {"error": {"message": "The model `x` does not exist.", "code": 404}}, 404, "model_not_found", INVALID),
        ("501", {"error": {"code": 501, "message": "no"}}, 501, "not_supported", "server_error"),
        ("401", {"error": "Unauthorized"}, 502, "engine_refused_key", "server_error"),
        ("400", b"[" * 5000, 400, "bad_request", INVALID),
        ("400", b"\xff\xfe", 400, "bad_request", INVALID),
        ("400", b"", 400, "bad_request", INVALID),
    ],
)  # fmt: skip
async def test_every_refusal_of_an_engine_is_an_error_object_of_openai(
    rig: Rig, said_status: str, said: Any, status: int, code: str, kind: str
) -> None:
    extra = b"server: llama.cpp\r\naccess-control-allow-headers: *\r\n"
    await rig.engine(answering(said, f"{said_status} Odd", extra))
    answers = [await rig.ask(chat()), await rig.ask(chat(stream=True))]
    for answer in answers:
        error = error_of(answer, CHAT)
        assert (answer.status, error["code"], error["type"]) == (status, code, kind) and error["message"]
        assert not {"server", "access-control-allow-headers"} & answer.headers.keys()
        assert ("retry-after" in answer.headers) == (status in (429, 503))
        assert (answer.headers.get("x-should-retry") == "false") == (status == 501)


@pytest.mark.parametrize("path", BODIES)
async def test_no_answer_says_which_server_made_it(rig: Rig, path: str) -> None:
    extra = b"Server: llama.cpp\r\nAccess-Control-Expose-Headers: x\r\nx-own: 1\r\n"
    await rig.engine(answering({"usage": {"prompt_tokens": 3}, "choices": [{"message": {}}]}, extra=extra))
    answer = await rig.ask(asking(path))
    assert answer.status == 200 and answer.headers["x-own"] == "1"
    assert not {"server", "access-control-expose-headers"} & answer.headers.keys()


async def test_an_engine_that_dies_within_its_refusal_is_502_and_not_half_an_answer(rig: Rig) -> None:
    await rig.engine(sending(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 100\r\n\r\n{", then="die"))
    answer = await rig.ask(chat())
    assert (answer.status, answer.code, answer.complete) == (502, "engine_failed", True)


@pytest.mark.parametrize(
    "first",
    [
        b'data: {"error":{"code":400,"message":"no","type":"x"}}\n\n',
        b'error: {"code":400,"message":"no","type":"x"}\n\n',
        b'event: error\ndata: {"type":"error","error":{"type":"x","message":"no","code":400}}\n\n',
    ],
)
async def test_a_stream_that_begins_with_an_error_is_an_error_with_a_status(rig: Rig, first: bytes) -> None:
    await rig.engine(streaming(first, DONE))
    answer = await rig.ask(chat(stream=True))
    assert answer.status == 400 and error_of(answer, CHAT)["message"] == "no"
    assert rig.endings[0].status == 400


dying = streaming(b'event: message_start\ndata: {"type":"message_start"}\n\n', then="die")


async def test_a_message_that_breaks_off_ends_with_anthropics_error_event(rig: Rig) -> None:
    await rig.engine(dying)
    answer = await rig.ask(asking(MESSAGE, stream=True))
    events = answer.body.decode().split("\n\n")
    assert answer.complete and events[0].startswith("event: message_start") and events[2] == ""
    name, data = events[1].split("\n")
    assert name == "event: error" and json.loads(data[6:])["error"]["type"] == "api_error"


async def test_a_message_begins_with_its_first_event_also_where_an_engine_leaves_it_out(rig: Rig) -> None:
    late = b'event: content_block_start\ndata: {"type":"content_block_start"}\n\n'
    rest = b'event: message_delta\ndata: {"usage":{"output_tokens":1}}\n\nevent: message_stop\ndata: {}\n\n'
    await rig.engine(streaming(late, rest))
    answer = await rig.ask(asking(MESSAGE, stream=True))
    start, _, passed = answer.body.partition(b"\n\n")
    name, data = start.decode().split("\n")
    message = json.loads(data[6:])["message"]
    assert name == "event: message_start" and passed == late + rest
    assert (message["role"], message["content"], message["stop_reason"]) == ("assistant", [], None)
    assert message["usage"]["input_tokens"] > 0 and message["model"]


async def test_a_message_is_over_with_its_last_event_whoever_leaves_then(rig: Rig) -> None:
    """Its prompt is counted at its start and its answer at its end."""
    start = {
        "type": "message_start",
        "message": {"usage": {"input_tokens": 1, "cache_read_input_tokens": 30, "output_tokens": 0}},
    }
    sent = [f"event: message_start\ndata: {json.dumps(start)}\n\n"]
    delta = 'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"%s"}}\n\n'
    sent += [delta % ("x" * 50)] * 200
    sent += ['event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":200}}\n\n']
    sent += ['event: message_stop\ndata: {"type":"message_stop"}\n\n']

    await rig.engine(streaming(*(event.encode() for event in sent), then="hang", every_s=0.0))
    client = await rig.sent(asking(MESSAGE, stream=True))
    status, _ = await client.head()
    body = b""
    while not body.endswith(sent[-1].encode()):
        body += await client.chunk()
    client.close()
    await rig.until(lambda: bool(rig.finished))
    assert status == 200 and body.decode() == "".join(sent)
    assert (rig.endings[0].status, rig.finished[0].token_counts()[:3]) == (200, (31, 200, True))


@pytest.mark.parametrize("path", [MESSAGE, RESPONSE, COUNT, RERANK])
async def test_what_has_no_byte_of_an_answer_is_sent_to_another_instance(rig: Rig, path: str) -> None:
    first = await rig.engine(die_at_once)
    told = {"usage": {"input_tokens": 3, "output_tokens": 1}, "choices": [{"message": {"content": "a"}}]}
    second = await rig.engine(answering(told), instance_id="i-2")
    answer = await rig.ask(asking(path))
    assert answer.status == 200 and len(first.served) + len(second.served) == 2


@pytest.mark.parametrize("path", BODIES)
async def test_a_held_request_that_times_out_says_so_in_its_own_shape(path: str) -> None:
    async with a_rig(QUICK, models=(a_model(max_wait_s=0.03),)) as rig:
        client = await rig.held(asking(path))
        await asyncio.sleep(0.04)
        rig.tick()
        answer = await client.answer()
    error = error_of(answer, path)
    assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
    assert error["type"] == ("overloaded_error" if path in (MESSAGE, COUNT) else "service_unavailable")


async def test_a_held_message_is_kept_alive_and_ends_with_an_error_event() -> None:
    async with a_rig(QUICK, models=(a_model(max_wait_s=0.06),)) as rig:
        client = await rig.sent(asking(MESSAGE, stream=True))
        status, headers = await client.head()
        assert status == 200 and headers["content-type"].startswith("text/event-stream")
        assert (await client.chunk()).startswith(b": glowplug waiting model=m ")
        await asyncio.sleep(0.08)
        rig.tick()
        body = await client.rest()
    assert b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"' in body


async def test_a_message_begins_after_the_comments_of_an_engine_that_reads_a_long_prompt() -> None:
    """llama.cpp writes one every half minute."""
    begun = {"type": "message_start", "message": {"id": "chatcmpl-1", "usage": {"input_tokens": 7}}}
    ended = {"type": "message_delta", "usage": {"output_tokens": 2}}
    events = tuple(map(wire.named_event, (begun, ended, {"type": "message_stop"})))
    async with a_rig(models=(a_model(engine="llamacpp"),)) as rig:
        engine = await rig.engine(streaming(b":\n\n", b":\n\n" + events[0], *events[1:]))
        answer = await rig.ask(asking(MESSAGE, stream=True))
        replies = iter((streaming(b":\n\n", then="die"), streaming(*events)))
        engine.reply = lambda served: next(replies)(served)
        other = await rig.engine(engine.reply, instance_id="i-2")
        again = await rig.ask(asking(MESSAGE, stream=True))
    assert answer.body == b":\n\n:\n\n" + b"".join(events).replace(b"chatcmpl-", b"msg_")
    assert [row.token_counts()[:3] for row in rig.finished] == [(7, 2, True)] * 2
    assert again.body.endswith(events[-1]) and len(engine.served + other.served) == 3


# -- what an engine cannot do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "args", "cannot"),
    [
        ("emulated", {}, {COUNT, RERANK}),
        ("llamacpp", {}, {EMBEDDING, RERANK}),
        ("llamacpp", {"embeddings": True}, {RERANK}),
        ("llamacpp", {"embeddings": True, "pooling": "rank"}, {EMBEDDING}),
        ("vllm", {}, set()),
        ("vllm", {"runner": "pooling"}, {CHAT, COMPLETION, RESPONSE, MESSAGE, COUNT}),
        ("vllm", {"runner": "generate"}, {EMBEDDING, RERANK}),
        ("one-of-a-newer-version", {}, set()),
    ],
)
async def test_what_an_engine_does_not_answer_is_501_with_the_reason_and_wakes_nobody(
    engine: str, args: dict[str, Any], cannot: set[str]
) -> None:
    async with a_rig(models=(a_model(engine=engine, engine_args=args, on_cold=OnCold.REFUSE),)) as rig:
        found = set()
        for path in BODIES:
            answer = await rig.ask(asking(path))
            error = error_of(answer, path)
            assert answer.status in (501, 503), "503: it came as far as the model, which is cold"
            if answer.status == 501:
                found.add(path)
                assert error["message"].startswith("`m` ") and answer.headers["x-should-retry"] == "false"
                assert path in (MESSAGE, COUNT) or (error["code"], error["param"]) == ("not_supported", "model")
    assert found == cannot


FUNCTION = {"type": "function", "function": {"name": "f"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
OTHER = TOOL | {"name": "g"}
CUSTOM = {"type": "custom", "custom": {"name": "f"}}
FLAT = {"type": "function", "name": "f"}


@pytest.mark.parametrize(
    ("path", "fields", "engines"),
    [
        (CHAT, {"tools": [FUNCTION], "tool_choice": "auto"}, "emulated llamacpp vllm"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": "none"}, "emulated llamacpp vllm"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": "required"}, "llamacpp vllm"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": FUNCTION}, "llamacpp vllm"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}, "vllm"),
        (CHAT, {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}}, ""),
        (CHAT, {"tools": [FUNCTION], "tool_choice": "any"}, ""),
        (CHAT, {"tool_choice": "required"}, ""),
        (CHAT, {"tool_choice": FUNCTION}, ""),
        (RESPONSE, {"tools": [FLAT], "tool_choice": "required"}, "llamacpp vllm"),
        (RESPONSE, {"tools": [FLAT], "tool_choice": FLAT}, "llamacpp vllm"),
        (
            RESPONSE,
            {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "tools": [FLAT]}},
            "emulated llamacpp vllm",
        ),
        (RESPONSE, {"tools": [FLAT, {"type": "mcp"}], "tool_choice": "required"}, "llamacpp vllm"),
        (RESPONSE, {"tools": [FLAT], "tool_choice": {"type": "function", "name": "g"}}, ""),
        (RESPONSE, {"tools": [{"type": "web_search"}]}, "emulated llamacpp vllm"),
        (RESPONSE, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, ""),
        (CHAT, {"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "llamacpp vllm"),
        (CHAT, {"tools": [CUSTOM], "tool_choice": {"type": "custom", "custom": {"name": "g"}}}, ""),
        (CHAT, {"tools": [FUNCTION, {"type": "web_search"}]}, ""),
        (MESSAGE, {"tools": [TOOL], "tool_choice": {"type": "auto"}}, "emulated llamacpp vllm"),
        (MESSAGE, {"tools": [TOOL], "tool_choice": {"type": "any"}}, "llamacpp vllm"),
        (MESSAGE, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "llamacpp vllm"),
        (
            MESSAGE,
            {"tools": [TOOL, OTHER], "tool_choice": {"type": "tool", "name": "f"}},
            "llamacpp vllm",
        ),
        (MESSAGE, {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, ""),
        (MESSAGE, {"tools": [TOOL], "tool_choice": {"type": "tool"}}, ""),
        (
            MESSAGE,
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "emulated llamacpp vllm",
        ),
        (MESSAGE, {"tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}}, ""),
        (MESSAGE, {"tool_choice": {"type": "any"}}, ""),
    ],
)
async def test_a_tool_choice_that_cannot_be_honoured_is_refused(
    path: str, fields: dict[str, Any], engines: str
) -> None:
    honoured = set()
    for engine in ("emulated", "llamacpp", "vllm"):
        async with a_rig(models=(a_model(engine=engine),)) as rig:
            message = {"role": "assistant", "content": '{"name": "f", "arguments": {}}'}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            await rig.engine(answering({"usage": {"input_tokens": 3}, "choices": choices}))
            answer = await rig.ask(asking(path, **fields))
        if answer.status == 200:
            honoured.add(engine)
        else:
            assert answer.status == 400 and "tool" in error_of(answer, path)["message"]
    assert honoured == set(engines.split())


@pytest.mark.parametrize("path", [MESSAGE, COUNT])
async def test_tools_that_anthropic_runs_are_dropped_and_named(path: str) -> None:
    foreign = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}, {"type": "bash_1", "name": "bash"}]
    async with a_rig(models=(a_model(engine="vllm"),)) as rig:
        engine = await rig.engine(answering({"usage": {"input_tokens": 3}}))
        some = await rig.ask(asking(path, tools=[*foreign, TOOL], x=1))
        none = await rig.ask(asking(path, tools=foreign, tool_choice={"type": "auto"}))
        own = await rig.ask(asking(path, tools=[TOOL]))
    assert some.headers["x-glowplug-dropped-tools"] == "bash_1, web_search_20250305"
    assert some.headers["x-glowplug-unknown-fields"] == "x" and none.status == 200
    sent = [json.loads(served.body) for served in engine.served]
    assert sent[0]["tools"] == [TOOL] and not {"tools", "tool_choice"} & set(sent[1])
    assert "x-glowplug-dropped-tools" not in own.headers and sent[2]["tools"] == [TOOL]


SEARCH = [
    {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "a"}},
    {"type": "web_search_tool_result", "tool_use_id": "1", "content": [{"type": "web_search_result", "url": "u"}]},
]


@pytest.mark.parametrize("path", [MESSAGE, COUNT])
async def test_calls_that_anthropics_servers_made_are_left_out_of_a_conversation_and_named(path: str) -> None:
    said, user = {"type": "text", "text": "a web_search_tool_result"}, {"role": "user", "content": "hi"}
    result = {"type": "tool_result", "tool_use_id": "2", "content": "b"}
    turns = [user, {"role": "assistant", "content": [*SEARCH, said]}, {"role": "assistant", "content": SEARCH}]
    turns.append({"role": "user", "content": [result]})
    async with a_rig(models=(a_model(engine="llamacpp"),)) as rig:
        engine = await rig.engine(answering({"usage": {"input_tokens": 3}}))
        answer = await rig.ask(asking(path, messages=turns, tools=[TOOL]))
        refused = await rig.ask(asking(path, messages=turns[2:3]))
        again = await rig.ask(asking(path, messages=[user, {"role": "user", "content": [said, result]}]))
    assert answer.headers["x-glowplug-dropped-tools"] == "server_tool_use, web_search_tool_result"
    sent = json.loads(engine.served[0].body)
    assert sent["messages"] == [user, {"role": "assistant", "content": [said]}, turns[3]] and sent["tools"] == [TOOL]
    assert refused.status == 400 and "messages" in error_of(refused, path)["message"]
    assert again.status == 200 and "x-glowplug-dropped-tools" not in again.headers


async def test_a_call_that_llamacpp_cannot_be_made_to_make_is_refused_with_those_that_it_can() -> None:
    """llama.cpp answers in prose, which must not pass for the requested call."""
    async with a_rig(models=(a_model(engine="llamacpp"),)) as rig:
        engine = await rig.engine(answering({}))
        asked: dict[str, Any] = {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}
        for fields in (asked, asked | {"stream": True}):
            error = error_of(await rig.ask(asking(CHAT, **fields)), CHAT)
            assert error["code"] == "unsupported_tool_choice"
            assert "required" in error["message"] and "auto" in error["message"]
        assert engine.served == []


SCHEMA = {"type": "object", "properties": {"city": {"const": "Paris"}}}
FORM = {"type": "json_schema", "schema": SCHEMA}


async def test_a_response_held_to_a_schema_that_is_missing_wakes_no_llamacpp() -> None:
    async with a_rig(models=(a_model(engine="llamacpp"),)) as rig:
        answer = await rig.ask(asking(RESPONSE, text={"format": {"type": "json_schema", "name": "place"}}))
    assert (answer.status, error_of(answer, RESPONSE)["param"]) == (400, "text.format.schema")


@pytest.mark.parametrize(
    ("form", "written"),
    [
        ({"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}, SCHEMA),
        ({"type": "json_schema", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "text"}, None),
    ],
)
async def test_the_structure_of_a_completion_stands_where_llamacpp_reads_it(
    form: dict[str, Any], written: dict[str, Any] | None
) -> None:
    for engine in ("llamacpp", "vllm"):
        async with a_rig(models=(a_model(engine=engine),)) as rig:
            fake = await rig.engine(answering({"choices": [{"index": 0, "text": "{}"}]}))
            asked = asking(COMPLETION, response_format=form)
            assert (await rig.ask(asked)).status == 200
        sent = asked.partition(b"\r\n\r\n")[2]
        if engine == "vllm" or written is None:
            assert fake.served[0].body == sent
        else:
            assert json.loads(fake.served[0].body) == json.loads(sent) | {"json_schema": written}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "json_schema": SCHEMA}, "response_format"),
        ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "a"'}, "response_format"),
    ],
)
async def test_the_structure_of_a_completion_that_is_none_or_another_wakes_no_llamacpp(
    fields: dict[str, Any], param: str
) -> None:
    async with a_rig(models=(a_model(engine="llamacpp"),)) as rig:
        answer = await rig.ask(asking(COMPLETION, **fields))
    assert (answer.status, error_of(answer, COMPLETION)["param"]) == (400, param)


async def test_the_structure_of_a_message_passes_to_vllm_in_the_field_that_it_heeds() -> None:
    async with a_rig(models=(a_model(engine="vllm"),)) as rig:
        fake = await rig.engine(answering({"usage": {"input_tokens": 3}}))
        heeded = asking(MESSAGE, output_config={"format": FORM})
        assert (await rig.ask(heeded)).status == 200
        refused = await rig.ask(asking(MESSAGE, output_format=FORM))
    assert fake.served[0].body == heeded.partition(b"\r\n\r\n")[2] and len(fake.served) == 1
    assert refused.status == 400 and "output_config.format" in error_of(refused, MESSAGE)["message"]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_log_likelihoods_of_a_prompt_pass_to_vllm_and_are_refused_where_the_engine_has_none(
    max_tokens: int,
) -> None:
    """As lm-eval asks for them. llama.cpp's server gives the log-probability of one added token."""
    fields: dict[str, Any] = {"prompt": [[5, 6, 7]], "echo": True, "logprobs": 1, "max_tokens": max_tokens, "seed": 1}
    told = {"choices": [{"index": 0, "text": "abc", "logprobs": {"token_logprobs": [None, -1.0, -2.0]}}]}
    for engine in ("emulated", "llamacpp", "vllm"):
        async with a_rig(models=(a_model(engine=engine),)) as rig:
            fake = await rig.engine(answering(told))
            answer = await rig.ask(asking(COMPLETION, **fields))
            if engine == "vllm":
                assert answer.json() == told and json.loads(fake.served[0].body).items() >= fields.items()
                continue
            error = error_of(answer, COMPLETION)
            assert (answer.status, error["param"], fake.served) == (400, "echo", [])
            assert "Log-likelihoods" in error["message"] and engine in error["message"]
            nothing = await rig.ask(asking(COMPLETION, max_tokens=0))
            assert (nothing.status, error_of(nothing, COMPLETION)["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("held", [False, True])
async def test_a_tool_choice_is_refused_by_an_instance_whose_chat_template_knows_no_tools(held: bool) -> None:
    fake = await FakeEngine(answering({"choices": [{"message": {"content": "a"}}]})).start()
    able = an_instance("i-2", fake.url)
    async with a_rig(models=(a_model(engine="vllm"),)) as rig:
        lacking = an_instance("i-1", fake.url, lacks=("tool_choice",))
        if not held:
            rig.tell(lacking)
        client = await rig.sent(asking(RESPONSE, tools=[FLAT], tool_choice="required"))
        if held:
            await rig.until(lambda: rig.num_held == 1)
            rig.tell(lacking)
        refused = await client.answer()
        left_open = await rig.ask(asking(RESPONSE, tools=[FLAT], tool_choice="auto"))
        assert not rig.num_in_flight and not rig.num_held
        rig.tell(an_instance("i-1", fake.url, InstanceState.STOPPED, revision=2))
        rig.tell(able)
        taken = await rig.ask(asking(RESPONSE, tools=[FLAT], tool_choice="required"))
    await fake.stop()
    error = error_of(refused, RESPONSE)
    assert (refused.status, error["code"], error["param"]) == (400, "unsupported_tool_choice", "tool_choice")
    assert (left_open.status, taken.status, len(fake.served)) == (200, 200, 2)


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (MESSAGE, {"max_tokens": None}, "max_tokens"),
        (MESSAGE, {"messages": "no"}, "messages"),
        (MESSAGE, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (MESSAGE, {"max_tokens": 100_000}, "max_tokens"),
        (RERANK, {"documents": []}, "documents"),
        (RERANK, {"documents": [{"body": "x"}]}, "documents"),
        (RESPONSE, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSE, {"background": True}, "background"),
        (RESPONSE, {"conversation": "c"}, "conversation"),
    ],
)
async def test_a_wrong_field_is_named_in_the_shape_of_its_api(
    rig: Rig, path: str, fields: dict[str, Any], names: str
) -> None:
    answer = await rig.ask(asking(path, **fields))
    assert answer.status == 400 and names in error_of(answer, path)["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_text_that_cannot_fit_its_context_is_too_long_before_a_model_is_woken(path: str) -> None:
    long = {"prompt": "x" * 9000, "input": "x" * 9000, "documents": ["x" * 9000]}
    given = long.get(WHERE[path], [{"role": "user", "content": "x" * 9000}])
    async with a_rig(models=(a_model(context_tokens=128),)) as rig:
        answer = await rig.ask(asking(path, **{WHERE[path]: given}))
    error = error_of(answer, path)
    assert answer.status == 400 and "128 tokens" in error["message"]
    assert path in (MESSAGE, COUNT) or (error["code"], error["param"]) == ("context_length_exceeded", WHERE[path])


async def test_images_are_refused_for_a_text_model_also_within_a_tools_result() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
    async with a_rig(
        models=(a_model(engine="llamacpp"), a_model("eyes", engine="llamacpp", engine_args={"mmproj": "/p"}))
    ) as rig:
        await rig.engine(answering({}), instance_id="i-9", model_key="eyes")
        for content in ([image], [result]):
            messages = [{"role": "user", "content": content}]
            refused = await rig.ask(asking(MESSAGE, messages=messages))
            assert refused.status == 400 and "takes text only" in error_of(refused, MESSAGE)["message"]
            assert (await rig.ask(asking(MESSAGE, messages=messages, model="eyes"))).status == 200


# -- keys, pages and paths --------------------------------------------------------------------------------------------


async def test_anthropics_clients_send_the_key_in_a_header_of_their_own_which_no_engine_sees() -> None:
    async with a_rig(api_key="k") as rig:
        engine = await rig.engine(answering({}))
        keys = (b"", b"x-api-key: no", b"authorization: Bearer no", b"x-api-key: k", b"authorization: Bearer k")
        answers = [await rig.ask(asking(MESSAGE, key + b"\r\n" if key else b"")) for key in keys]
    assert [a.status for a in answers] == [401, 401, 401, 200, 200]
    assert error_of(answers[0], MESSAGE)["type"] == "authentication_error"
    assert all(served.header("x-api-key") is None for served in engine.served)


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/messages/batches", "not_found_error"), ("/v1/messages", "invalid_request_error")]
)
async def test_other_paths_and_methods_of_anthropics_api_are_refused_in_its_shape(
    rig: Rig, path: str, kind: str
) -> None:
    answer = await rig.ask(get(path))
    assert answer.status in (404, 405) and error_of(answer, MESSAGE)["type"] == kind


@pytest.mark.parametrize("path", BODIES)
async def test_pages_that_are_let_in_may_ask_every_api_and_read_every_refusal(path: str) -> None:
    origin = b"origin: https://app.example\r\nsec-fetch-site: cross-site\r\n"
    rules = ServiceSettings(allowed_hosts="t", allowed_origins="https://app.example").web_rules()
    asks = b"access-control-request-method: POST\r\naccess-control-request-headers: x-api-key, anthropic-version\r\n"
    async with a_rig(Limits(max_body_bytes=2000), rules=rules) as rig:
        extra = b"access-control-allow-origin: *\r\n"
        await rig.engine(answering({"error": {"message": "no"}}, "400 Bad Request", extra))
        asked = await rig.ask(get(path, method="OPTIONS", extra=origin + asks))
        refused = await rig.ask(asking(path, origin))
        too_large = await rig.ask(asking(path, origin, user="x" * 3000))
    assert asked.status == 200 and "x-api-key" in asked.headers["access-control-allow-headers"]
    assert (refused.status, too_large.status) == (400, 413)
    assert {a.headers["access-control-allow-origin"] for a in (asked, refused, too_large)} == {"https://app.example"}
    assert error_of(too_large, path)["message"]


def test_a_stream_that_begins_with_an_answer_begins_with_no_error() -> None:
    for first in (
        TOKEN,
        DONE,
        b": ping\n\n",
        b"",
        b'data: {"choices":[],"error":{}}\n\n',
        b"event: message_start\ndata: {}\n\n",
    ):
        assert not wire.starts_stream(first)
