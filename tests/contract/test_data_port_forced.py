"""Forced tools and structures on llama.cpp. Chats: test_data_port_translated.py; responses:
test_data_port_responses.py; on a real engine: test_llamacpp_requests.py"""

import json
from typing import Any

import pytest

from tests.contract.continuation_rig import sse
from tests.contract.data_port_rig import DONE, Answer, a_model, a_rig, answering, post, sending, streaming

RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
PLACE = {"type": "object", "properties": {"in": {"type": "string"}}, "required": ["in"]}
CALL = '{"name": "weather", "arguments": {"in": "Paris}"} }'
CUT = '```json\n{"name": "weather", "arguments": {"in": "Par'
FLAT = {"type": "function", "name": "weather", "description": "It.", "parameters": PLACE, "strict": True}
TOOL = {"name": "weather", "description": "It.", "input_schema": PLACE}
USER = {"role": "user", "content": "Hi"}
FORM = {"type": "json_schema", "schema": PLACE}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
LLAMACPP = (a_model(engine="llamacpp"),)


def asking(path: str, **fields: Any) -> bytes:
    bodies = {RESPONSE: {"input": "Hi"}, MESSAGE: {"messages": [USER], "max_tokens": 40}}
    return post(path, json.dumps({"model": "m"} | bodies[path] | fields).encode())


def events_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.complete and answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split(b"\n") for block in answer.body.split(b"\n\n") if block and not block.startswith(b":")]
    found = [json.loads(data.removeprefix(b"data: ")) for _, data in blocks]
    assert [event["type"] for event in found] == [name.removeprefix(b"event: ").decode() for name, _ in blocks]
    return found


# messages


def a_chat(text: str, reason: str = "stop", **message: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": text, **message}
    return {"choices": [{"index": 0, "message": said, "finish_reason": reason}], "usage": USAGE}


def token(reason: str | None = None, **delta: Any) -> bytes:
    return sse({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def a_chats_stream(*texts: str, reason: str = "stop") -> tuple[bytes, ...]:
    first = token(role="assistant", content=None)
    return first, *(token(content=text) for text in texts), token(reason), sse({"choices": [], "usage": USAGE}), DONE


@pytest.mark.parametrize("field", ["output_config", "output_format"])
async def test_a_structured_message_goes_to_llamacpp_as_a_chat(field: str) -> None:
    fields: dict[str, Any] = {field: {"format": FORM, "effort": "low"} if field == "output_config" else FORM}
    fields |= {"system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["END"], "top_k": 3}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(answering(a_chat('{"in": "Paris"}', reasoning_content="hm")))
        whole = (await rig.ask(asking(MESSAGE, **fields))).json()
        engine.reply = streaming(*a_chats_stream('{"in":', ' "Paris"}'))
        streamed = events_of(await rig.ask(asking(MESSAGE, **fields, stream=True)))
        image = await rig.ask(asking(MESSAGE, **fields, messages=[USER | {"content": [picture]}]))
    assert whole["id"].startswith("msg_") and (whole["type"], whole["model"]) == ("message", "m")
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": '{"in": "Paris"}'}
    ]  # fmt: skip
    assert (whole["stop_reason"], whole["usage"]) == ("end_turn", {"input_tokens": 5, "output_tokens": 2})
    asked = json.loads(engine.served[0].body)
    assert engine.served[0].head.startswith(b"POST /v1/chat/completions ")
    assert asked.pop("chat_template_kwargs", None) == (
        {"reasoning_effort": "low"} if "effort" in fields[field] else None
    )
    assert asked == {
        "model": "m", "messages": [{"role": "system", "content": "Be brief."}, USER], "max_tokens": 40, "stop": ["END"],
        "top_k": 3, "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": PLACE}},
    }  # fmt: skip
    assert [event["type"] for event in streamed] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    assert "".join(event["delta"]["text"] for event in streamed[2:4]) == '{"in": "Paris"}'
    assert streamed[-2]["usage"] == {"input_tokens": 5, "output_tokens": 2}
    assert rig.finished[1].token_counts()[:3] == (5, 2, True)
    assert image.status == 400 and image.json()["type"] == "error" and "text only" in image.json()["error"]["message"]


@pytest.mark.parametrize(
    "form", [{"type": "json_object"}, FORM | {"schema": 5}, 5, FORM | {"schema": {"a": "x" * 17_000}}]
)
async def test_a_structure_of_a_message_that_is_none_wakes_no_llamacpp(form: Any) -> None:
    async with a_rig(models=LLAMACPP) as rig:
        answer = await rig.ask(asking(MESSAGE, output_config={"format": form}))
    assert answer.status == 400 and answer.json()["error"]["message"].startswith("output_config.format")


async def test_a_forced_call_of_a_message_is_a_block_of_its_content() -> None:
    earlier = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "clock", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "noon"}]}],
        },
    ]
    fields = {"tools": [TOOL, {"name": "clock", "input_schema": {}}], "messages": earlier}
    one, any_ = {"type": "tool", "name": "weather"}, {"type": "any", "disable_parallel_tool_use": True}
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(answering(a_chat(CALL)))
        whole = (await rig.ask(asking(MESSAGE, **fields, tool_choice=one))).json()
        engine.reply = answering(a_chat(CUT, "length"))
        cut = (await rig.ask(asking(MESSAGE, **fields, tool_choice=any_))).json()
        engine.reply = streaming(*a_chats_stream(CALL[:9], CALL[9:]))
        streamed = events_of(await rig.ask(asking(MESSAGE, **fields, tool_choice=any_, stream=True)))
    (block,) = whole["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "weather", {"in": "Paris}"})
    assert whole["stop_reason"] == "tool_use" and block["id"].startswith("toolu_")
    assert (cut["stop_reason"], cut["content"][0]["name"], cut["content"][0]["input"]) == ("max_tokens", "weather", {})
    asked, both, _ = (json.loads(served.body) for served in engine.served)
    assert asked["response_format"]["json_schema"]["schema"]["properties"]["name"] == {"const": "weather"}
    assert len(both["response_format"]["json_schema"]["schema"]["anyOf"]) == 2
    assert [message["role"] for message in asked["messages"]] == ["system", "user", "assistant", "user"]
    assert "clock" in asked["messages"][2]["content"] and "noon" in asked["messages"][3]["content"]
    assert [event["type"] for event in streamed] == [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert streamed[1]["content_block"] | {"type": "tool_use", "name": "weather"} == streamed[1]["content_block"]
    assert json.loads(streamed[2]["delta"]["partial_json"]) == {"in": "Paris}"}
    assert streamed[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("path", [MESSAGE, RESPONSE])
async def test_errors_of_a_forced_call_have_the_shape_of_its_api(path: str) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    if path == RESPONSE:
        fields = {"tools": [FLAT], "tool_choice": "required"}
    failing = sse({"error": {"code": 500, "message": "it broke", "type": "server_error"}})
    async with a_rig(models=LLAMACPP) as rig:
        engine = await rig.engine(answering({"error": {"message": "too hot"}}, "400 Bad Request"))
        refused = await rig.ask(asking(path, **fields))
        engine.reply = sending(b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{", then="die")
        lost = await rig.ask(asking(path, **fields))
        engine.reply = streaming(token(role="assistant", content=None), failing)
        *_, cut = events_of(await rig.ask(asking(path, **fields, stream=True)))
    assert (refused.status, refused.json()["error"]["message"]) == (400, "too hot")
    assert lost.status >= 500 and lost.json()["error"]["message"]
    for answer in (refused.json(), lost.json()):
        assert answer.get("type") == ("error" if path == MESSAGE else None)
    assert cut["type"] == "error" and cut["error"]["message"]
    assert {"type", "message"} <= set(cut["error"])


# messages of engines without them


def a_coding_agents_message(**fields: Any) -> bytes:
    """In the shape of Claude Code's, shortened."""
    script = {"script": {"type": "string", "maxLength": 524_288}, "id": {"type": "string", "pattern": "^wf_[a-z]{6,}$"}}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": script}
    texts = [{"type": "text", "text": "A reminder."}, {"type": "text", "text": "Hi"}]
    texts[1]["cache_control"] = {"type": "ephemeral"}  # type: ignore[assignment]
    body = {
        "messages": [{"role": "user", "content": texts}, {"role": "system", "content": "Agents: none."}],
        "system": [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be brief."}],
        "tools": [TOOL, {"name": "Workflow", "description": "It.", "input_schema": schema}],
        "metadata": {"user_id": '{"session_id":"1"}'},
        "max_tokens": 40,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    return post(f"{MESSAGE}?beta=true", json.dumps({"model": "m"} | body | fields).encode())


@pytest.mark.parametrize("engine", ["llamacpp", "vllm", "emulated"])
async def test_a_coding_agents_message_is_understood(engine: str) -> None:
    async with a_rig(models=(a_model(engine=engine, context_tokens=8192),)) as rig:
        fake = await rig.engine(streaming(*a_chats_stream("a", " sea")))
        answer = await rig.ask(a_coding_agents_message())
    assert answer.status == 200 and "x-glowplug-unknown-fields" not in answer.headers
    sent = json.loads(fake.served[0].body)
    assert len(sent["tools"]) == 2 and len(sent["messages"]) == (3 if engine == "emulated" else 2)
    if engine == "emulated":
        text = [event["delta"]["text"] for event in events_of(answer) if event["type"] == "content_block_delta"]
        assert text == ["a", " sea"]


async def test_a_translated_message_ends_with_its_last_event_not_with_the_engines_connection() -> None:
    async with a_rig(models=(a_model(engine="emulated"),)) as rig:
        await rig.engine(streaming(*a_chats_stream("a"), then="hang"))
        client = await rig.sent(a_coding_agents_message())
        await client.head()
        body = b""
        while b"message_stop" not in body:
            body += await client.chunk()
        client.close()
        await rig.until(lambda: bool(rig.finished))
    assert rig.endings[0].status == 200
