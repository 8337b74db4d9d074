"""Responses over a WebSocket of a data port, by a plain client and by OpenAI's own."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET
from typing import Any

import openai
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from glowplug.runtime.web import WebRules
from glowplug.services.router.request_table import PortStage
from glowplug.services.router.responses_socket import ResponsesSocket
from glowplug.services.router.settings import Limits
from tests.contract.data_port_rig import Rig, Served, a_model, a_rig, answering, get, post, streaming
from tests.contract.test_data_port_forced import USER, a_chat, a_chats_stream

PATH = "/v1/responses"
A_STREAM = streaming(*a_chats_stream("A", " sea"))


@contextlib.asynccontextmanager
async def a_socket(rig: Rig, **over: Any) -> AsyncIterator[ClientConnection]:
    host, port = rig.host_port
    async with connect(f"ws://{host}:{port}{PATH}", proxy=None, **over) as socket:
        yield socket


def create(**fields: Any) -> str:
    return json.dumps({"type": "response.create", "model": "m", "store": False, "input": "Hi"} | fields)


async def turn(socket: ClientConnection, message: str | bytes) -> list[dict[str, Any]]:
    """Send a message, and return its events to the last one."""
    await socket.send(message)
    return await events_of(socket)


async def events_of(socket: ClientConnection) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async for data in socket:
        found.append(json.loads(data))
        if found[-1]["type"] in ("response.completed", "response.incomplete", "response.failed", "error"):
            break
    return found


def asked_of(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(served.body)
    return found


async def test_each_message_is_a_response_and_a_continuation_adds_to_the_last_ones_conversation() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(A_STREAM)
        async with a_socket(rig) as socket:
            first = await turn(socket, create())
            name = first[-1]["response"]["id"]
            second = await turn(socket, create(input=[USER | {"type": "message"}], previous_response_id=name))
            alone = await turn(socket, create())
    assert [event["sequence_number"] for event in first] == list(range(len(first)))
    assert [event["type"] for event in first[:2]] == ["response.created", "response.in_progress"]
    assert first[-1]["response"]["output"][0]["content"][0]["text"] == "A sea"
    assert {event["response"]["previous_response_id"] for event in second if "response" in event} == {name}
    assert first[-1]["response"]["previous_response_id"] is None is alone[-1]["response"]["previous_response_id"]
    assert len({found[-1]["response"]["id"] for found in (first, second, alone)}) == 3
    said = {"role": "user", "content": "Hi"}
    assert [asked_of(served)["messages"] for served in engine.served] == [
        [said],
        [said, {"role": "assistant", "content": "A sea"}, USER],
        [said],
    ]
    assert [row.token_counts()[:3] for row in rig.finished] == [(5, 2, True)] * 3
    assert len({row.request.request_id for row in rig.finished}) == 3


async def test_messages_are_answered_in_order_one_at_a_time() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(A_STREAM)
        async with a_socket(rig) as socket:
            for content in ("one", "two", "three"):
                await socket.send(create(input=content, metadata={"content": content}))
            found = [await events_of(socket) for _ in range(3)]
    assert [events[-1]["response"]["metadata"]["content"] for events in found] == ["one", "two", "three"]
    assert [asked_of(served)["messages"][0]["content"] for served in engine.served] == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[4].call_id"),
        ({"temperature": "hot"}, "temperature"),
        ({"background": True}, "background"),
        ({"stream_id": "a"}, "stream_id"),
    ],
)
async def test_a_failed_continuation_ends_its_conversation_and_another_failure_does_not(
    fields: dict[str, Any], param: str
) -> None:
    async with a_rig() as rig:
        await rig.engine(A_STREAM)
        async with a_socket(rig) as socket:
            name = (await turn(socket, create(input="Hi")))[-1]["response"]["id"]
            (other,) = await turn(socket, create(temperature="hot"))
            again = (await turn(socket, create(previous_response_id=name)))[-1]["response"]
            (failed,) = await turn(socket, create(**fields, previous_response_id=again["id"]))
            (gone,) = await turn(socket, create(previous_response_id=again["id"]))
            whole = await turn(socket, create())
    assert (other["type"], other["status"], other["error"]["param"]) == ("error", 400, "temperature")
    assert again["status"] == "completed"
    assert (failed["status"], failed["error"]["param"]) == (400, param)
    assert (gone["error"]["code"], gone["error"]["param"]) == ("previous_response_not_found", "previous_response_id")
    assert whole[-1]["response"]["status"] == "completed"


async def test_a_warm_up_reads_the_prompt_and_says_nothing() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(streaming(*a_chats_stream("A", reason="length")))
        async with a_socket(rig) as socket:
            warm = await turn(socket, create(generate=False, instructions="Be brief."))
            engine.reply = A_STREAM
            name = warm[-1]["response"]["id"]
            after = await turn(socket, create(input=[], previous_response_id=name, max_output_tokens=7))
    assert [event["type"] for event in warm] == ["response.created", "response.in_progress", "response.completed"]
    response = warm[-1]["response"]
    assert (response["output"], response["max_output_tokens"], response["incomplete_details"]) == ([], None, None)
    assert [asked_of(served).get("max_tokens") for served in engine.served] == [1, 7]
    assert asked_of(engine.served[1])["messages"] == [{"role": "user", "content": "Hi"}]
    assert after[-1]["response"]["output"][0]["content"][0]["text"] == "A sea"


@pytest.mark.parametrize("message", ["", "[]", "{", '{"type":"response.cancel"}', '{"model":"m","input":"Hi"}', "\0"])
async def test_what_is_no_message_is_refused_and_the_connection_goes_on(message: str) -> None:
    async with a_rig() as rig:
        await rig.engine(A_STREAM)
        async with a_socket(rig) as socket:
            (refused,) = await turn(socket, message)
            assert (refused["type"], refused["status"]) == ("error", 400) and refused["error"]["code"] == "bad_request"
            (unknown,) = await turn(socket, create(model="nobody"))
            assert (unknown["status"], unknown["error"]["code"]) == (404, "model_not_found")
            assert (await turn(socket, create().encode()))[-1]["type"] == "response.completed"


async def test_an_engine_that_fails_ends_the_response_and_says_so_once() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(streaming(*a_chats_stream("A")[:2], then="die"))
        async with a_socket(rig) as socket:
            failed = await turn(socket, create(tools=[{"type": "function", "name": "f"}]))
            engine.reply = answering({"error": {"message": "no", "code": 400}}, "400 Bad Request")
            refused = await turn(socket, create())
            engine.reply = A_STREAM
            assert (await turn(socket, create()))[-1]["type"] == "response.completed"
    assert failed[-1]["type"] == "response.failed" and failed[-1]["response"]["error"]["message"]
    assert [event["type"] for event in refused] == ["error"] and refused[0]["status"] == 400


async def test_a_client_that_leaves_frees_the_engine_and_all_that_it_holds() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(streaming(*a_chats_stream("A")[:1], then="hang"))
        async with a_socket(rig) as socket:
            await socket.send(create())
            await socket.send(create(input="waiting"))
            await rig.until(lambda: rig.num_in_flight == 1 and rig.port.context.buffered_bytes > 150)
            await socket.recv()
        await rig.until(lambda: not rig.port.connections and not rig.table.exchanges)
        assert rig.port.context.buffered_bytes == 0
        await asyncio.wait_for(engine.served[0].left.wait(), 10)
    assert len(engine.served) == 1


async def test_a_handshake_needs_the_key_the_origin_and_the_path() -> None:
    key = {"Authorization": "Bearer s"}
    async with a_rig(api_key="s", rules=WebRules()) as rig:
        await rig.engine(A_STREAM)
        host, port = rig.host_port
        for headers, status in (({}, 401), (key | {"Origin": "http://evil.example"}, 403)):
            with pytest.raises(InvalidStatus) as failure:
                async with a_socket(rig, additional_headers=headers):
                    pass
            assert failure.value.response.status_code == status
            assert json.loads(failure.value.response.body)["error"]["message"]
        with pytest.raises(InvalidStatus) as failure:
            async with connect(f"ws://{host}:{port}/v1/models", additional_headers=key, proxy=None):
                pass
        assert failure.value.response.status_code == 400
        upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nauthorization: Bearer s\r\n"
        wrong = await rig.ask(get(PATH, extra=upgrade).replace(b"host: t", b"host: localhost"))
        assert wrong.status == 400 and "Sec-WebSocket-Key" in wrong.json()["error"]["message"]
        async with a_socket(rig, additional_headers=key) as socket:
            assert (await turn(socket, create()))[-1]["type"] == "response.completed"


async def test_sizes_times_and_silence_are_bounded() -> None:
    limits = Limits(max_body_bytes=2000, buffered_bytes=6000)
    async with a_rig(limits) as rig:
        await rig.engine(A_STREAM)
        async with a_socket(rig) as socket:
            await socket.send(create(input="a" * 2000))
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1009
        async with a_socket(rig) as socket:
            name = (await turn(socket, create(input="a" * 1500)))[-1]["response"]["id"]
            (failed,) = await turn(socket, create(input="a" * 1500, previous_response_id=name))
            assert (failed["status"], failed["error"]["code"]) == (413, "request_too_large")
            name = (await turn(socket, create(input="a" * 1500)))[-1]["response"]["id"]
            await rig.until(lambda: not rig.table.exchanges)
            rig.port.context.buffered_bytes += 5000
            (gone,) = await turn(socket, create(previous_response_id=name))
            assert gone["error"]["code"] == "previous_response_not_found"
            rig.port.context.buffered_bytes += 1000
            await socket.send(create())
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1013
            rig.port.context.buffered_bytes -= 6000
        await rig.until(lambda: not rig.port.connections)
        async with a_socket(rig, ping_interval=None) as socket:
            (connection,) = rig.port.connections
            socket.transport.write(b"\x81\xfe")
            await rig.until(lambda: not connection.is_idle)
            connection.sweep(1e9)
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1008
        await rig.until(lambda: not rig.port.connections)
        async with a_socket(rig, ping_interval=None) as socket:
            (connection,) = rig.port.connections
            socket.transport.pause_reading()
            for _ in range(3):
                assert not connection.transport.is_closing()
                connection.sweep(1e9)
            assert connection.transport.is_closing()
            socket.transport.abort()


async def test_a_flood_of_frames_holds_up_nobody_and_no_memory() -> None:
    """A client that sends and does not read."""
    async with a_rig() as rig:
        await rig.engine(A_STREAM)
        async with a_socket(rig, ping_interval=None) as socket:
            (connection,) = rig.port.connections
            assert isinstance(connection, ResponsesSocket)
            connection.transport.set_write_buffer_limits(high=20_000)
            for transport, buffer in ((connection.transport, SO_SNDBUF), (socket.transport, SO_RCVBUF)):
                transport.get_extra_info("socket").setsockopt(SOL_SOCKET, buffer, 4096)
            socket.transport.pause_reading()
            ping, empty = b"\x89\x80aaaa", b"\x81\x80aaaa"
            for flood in (ping, empty):
                socket.transport.write(flood * 20_000)
            await rig.until(lambda: connection.write_paused)
            assert connection.transport.get_write_buffer_size() < 200_000
            assert (await rig.ask(post(PATH, create().replace("response.create", "").encode()))).status == 200
            assert rig.port.context.buffered_bytes < 500_000
            socket.transport.abort()
            await rig.until(lambda: connection not in rig.port.connections)


async def test_a_port_that_stops_lets_the_answer_finish_and_closes() -> None:
    async with a_rig() as rig:
        go = asyncio.Event()
        start, *rest = a_chats_stream("A", " sea")
        await rig.engine(streaming(start, go, *rest))
        async with a_socket(rig) as busy, a_socket(rig) as idle:
            await busy.send(create())
            await busy.recv()
            stopping = asyncio.create_task(rig.port.drain(10.0))
            with pytest.raises(ConnectionClosed):
                await idle.recv()
            assert idle.close_code == 1001 and rig.table.stage is PortStage.REFUSING
            go.set()
            assert (await events_of(busy))[-1]["type"] == "response.completed"
            with pytest.raises(ConnectionClosed):
                await busy.recv()
            await stopping


async def test_openais_own_client_continues_a_conversation() -> None:
    async with a_rig() as rig:
        await rig.engine(A_STREAM)
        host, port = rig.host_port
        client = openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="none")
        async with client.responses.connect() as connection:
            names = list[str]()
            for before in (None, 0):
                previous = {} if before is None else {"previous_response_id": names[before]}
                await connection.response.create(model="m", input="Hi", **previous)  # type: ignore[arg-type]
                async for event in connection:
                    if event.type == "response.completed":
                        assert event.response.output_text == "A sea"
                        names.append(event.response.id)
                        break
    assert len(set(names)) == 2


async def test_a_compaction_is_the_users_words_and_a_summary_that_a_response_understands() -> None:
    async with a_rig(models=(a_model(context_tokens=64),)) as rig:
        engine = await rig.engine(answering(a_chat("We launch on Tuesday.")))
        conversation = [USER | {"type": "message"}, {"type": "message", "role": "assistant", "content": "OK."}]
        asked = {"model": "m", "input": conversation, "instructions": "Be brief."}
        answer = await rig.ask(post(f"{PATH}/compact", json.dumps(asked).encode()))
        found = answer.json()
        assert (answer.status, found["object"], found["usage"]["output_tokens"]) == (200, "response.compaction", 2)
        user, summary = found["output"]
        assert user["content"] == [{"type": "input_text", "text": USER["content"]}] and user["role"] == "user"
        assert base64.b64decode(summary["encrypted_content"]) == b"We launch on Tuesday."
        first = asked_of(engine.served[0])
        assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant", "user"]
        assert first["max_tokens"] == 16 and not first.get("stream")
        engine.reply = answering(a_chat("Yes"))
        after = {"model": "m", "input": [*found["output"], {"role": "user", "content": "Sure?"}]}
        assert (await rig.ask(post(PATH, json.dumps(after).encode()))).status == 200
        assert "We launch on Tuesday." in str(asked_of(engine.served[1])["messages"])
        summary["encrypted_content"] = "gAAAA of another server"
        wrong = await rig.ask(post(PATH, json.dumps(after).encode()))
        assert (wrong.status, wrong.json()["error"]["param"]) == (400, "input[1].encrypted_content")
        without = await rig.ask(post(f"{PATH}/compact", json.dumps({"input": conversation}).encode()))
        assert (without.status, without.json()["error"]["param"]) == (400, "model")
