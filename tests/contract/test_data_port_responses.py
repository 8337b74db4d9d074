"""Responses over a data port. Translation: tests/unit/router/test_responses_as_chat.py; on a real engine:
test_llamacpp_requests.py and tests/clients/check_responses.py"""

import json
from typing import Any

import pytest

from tests.contract.continuation_rig import WORDS, Story, a_real_model, rig_of
from tests.contract.data_port_rig import Answer, a_model, a_rig, answering, post, sending, streaming
from tests.contract.test_data_port_forced import CALL, CUT, FLAT, USAGE, USER, a_chat, a_chats_stream, events_of, token

PATH = "/v1/responses"
ENGINES = ("llamacpp", "vllm", "emulated")


def asking(**fields: Any) -> bytes:
    return post(PATH, json.dumps({"model": "m", "input": "Hi"} | fields).encode())


def response_of(answer: Answer) -> dict[str, Any]:
    """Return the response of an answer in one piece or as a stream."""
    if answer.headers["content-type"].startswith("application/json"):
        return dict(answer.json())
    found = events_of(answer)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return dict(found[-1]["response"])


@pytest.mark.parametrize("engine", ENGINES)
async def test_every_engine_is_asked_for_a_chat_and_the_envelope_is_the_routers(engine: str) -> None:
    fields = {"instructions": "Be brief.", "max_output_tokens": 7, "temperature": 0, "metadata": {"a": "b"}}
    async with a_rig(models=(a_model(engine=engine),)) as rig:
        fake = await rig.engine(answering(a_chat("A sea", "length")))
        whole = await rig.ask(asking(**fields))
        fake.reply = streaming(*a_chats_stream("A", " sea", reason="length"))
        stream = await rig.ask(asking(**fields, stream=True))
    one, other = response_of(whole), response_of(stream)
    for varying in ("id", "created_at"):
        assert one.pop(varying) and other.pop(varying)
    assert one["output"][0].pop("id") != other["output"][0].pop("id") and one == other
    assert (one["status"], one["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (one["metadata"], one["max_output_tokens"], one["temperature"]) == ({"a": "b"}, 7, 0)
    assert one["usage"]["output_tokens"] == 2 and one["model"] == "m"
    for served in fake.served:
        asked = json.loads(served.body)
        assert served.head.startswith(b"POST /v1/chat/completions ")
        assert asked["messages"] == [{"role": "system", "content": "Be brief."}, USER] and asked["max_tokens"] == 7
    assert [row.token_counts()[:3] for row in rig.finished] == [(5, 2, True)] * 2


@pytest.mark.parametrize("cut", range(1, 9))
async def test_a_streamed_response_outlives_its_engine(cut: int) -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        await rig_of(rig, Story("1", cut), Story("2"))
        answer = await rig.ask(asking(stream=True, max_output_tokens=len(WORDS)))
    response = response_of(answer)
    assert response["output"][0]["content"][0]["text"] == "".join(WORDS)
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", len(WORDS))
    assert rig.endings[0].status == 200


async def test_a_forced_call_on_llamacpp_is_an_item_of_the_output() -> None:
    earlier = [
        USER,
        {"type": "function_call", "call_id": "1", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "noon"},
    ]
    fields = {"tools": [FLAT, {"type": "function", "name": "clock"}], "tool_choice": FLAT, "input": earlier}
    async with a_rig(models=(a_real_model(),)) as rig:
        engine = await rig.engine(answering(a_chat(CALL)))
        found = response_of(await rig.ask(asking(**fields)))
        engine.reply = streaming(*a_chats_stream(CALL[:9], CALL[9:]))
        streamed = response_of(await rig.ask(asking(**fields, stream=True)))
        engine.reply = answering(a_chat(CUT, "length"))
        cut = response_of(await rig.ask(asking(**fields | {"tool_choice": "required"})))
    for response in (found, streamed):
        (call,) = response["output"]
        assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"in": "Paris}"}')
        assert (response["status"], response["tool_choice"]) == ("completed", FLAT)
    assert (cut["status"], cut["output"][0]["arguments"]) == ("incomplete", '{"in": "Par')
    asked, _, both = (json.loads(served.body) for served in engine.served)
    assert asked["response_format"]["json_schema"]["schema"]["properties"]["name"] == {"const": "weather"}
    assert len(both["response_format"]["json_schema"]["schema"]["anyOf"]) == 2
    assert [message["role"] for message in asked["messages"]] == ["system", "user", "assistant", "user"]


async def test_tools_of_other_servers_are_dropped_and_named() -> None:
    tools = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, FLAT]
    async with a_rig(models=(a_real_model(),)) as rig:
        engine = await rig.engine(answering(a_chat("Hi")))
        answer = await rig.ask(asking(tools=tools, client_metadata={"a": "b"}))
        refused = await rig.ask(asking(tools=tools[:2], tool_choice="required"))
    assert answer.headers["x-glowplug-dropped-tools"] == "mcp, web_search"
    assert "x-glowplug-unknown-fields" not in answer.headers
    assert rig.reported[0].dropped_tools == ("mcp", "web_search")
    assert [tool["name"] for tool in response_of(answer)["tools"]] == ["weather"] and len(engine.served) == 1
    assert (refused.status, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "x" * 70_000}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
         "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"truncation": "auto"}, "truncation"),
    ],
)  # fmt: skip
async def test_a_wrong_field_has_the_responses_name_and_wakes_nobody(fields: dict[str, Any], param: str) -> None:
    async with a_rig(models=(a_real_model(context_tokens=1024),)) as rig:
        error = (await rig.ask(asking(**fields))).json()["error"]
    assert error["param"] == param and error["message"].startswith(param)


async def test_the_engines_error_about_its_messages_names_the_input() -> None:
    too_long = {"error": {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 9, "n_ctx": 8}}
    async with a_rig(models=(a_real_model(),)) as rig:
        await rig.engine(answering(too_long, "400 Bad Request"))
        answer = await rig.ask(asking())
    assert (answer.status, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (
        400, "context_length_exceeded", "input"
    )  # fmt: skip


async def test_a_stream_that_breaks_off_ends_with_the_failed_response_and_an_error() -> None:
    async with a_rig(models=(a_model(engine="vllm"),), params={"max_continuations": 0}) as rig:
        await rig.engine(streaming(token(role="assistant", content=""), token(content="a"), then="die"))
        *_, failed, last = events_of(await rig.ask(asking(stream=True)))
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["output"][0]["content"][0]["text"] == "a"
    assert (last["type"], last["error"]["message"]) == ("error", failed["response"]["error"]["message"])


async def test_an_answer_that_is_no_chat_is_502() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        await rig.engine(answering({"usage": USAGE}))
        answer = await rig.ask(asking())
    assert (answer.status, answer.json()["error"]["code"]) == (502, "engine_failed")


async def test_a_client_that_leaves_after_the_last_event_has_its_answer() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        await rig.engine(streaming(*a_chats_stream("a"), then="hang"))
        client = await rig.sent(asking(stream=True))
        await client.head()
        body = b""
        while b"response.completed" not in body:
            body += await client.chunk()
        client.close()
        await rig.until(lambda: bool(rig.finished))
    assert rig.endings[0].status == 200


async def test_an_answer_cut_within_its_body_is_an_error() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        await rig.engine(sending(b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{", then="die"))
        answer = await rig.ask(asking())
    assert answer.status >= 500 and answer.json()["error"]["message"]
