"""Bytes that pass unchanged, and the port's additions."""

import asyncio
import json
import socket
import struct
import time
from typing import Any

import pytest

from glowplug.domain.engine_key import engine_key
from glowplug.domain.instance import InstanceState
from glowplug.services.router.settings import Limits
from glowplug.telemetry.semconv import HEADER_EMULATED
from tests.contract.data_port_rig import (
    DONE,
    SSE_HEAD,
    TOKEN,
    Rig,
    Served,
    a_model,
    a_rig,
    an_instance,
    answering,
    chat,
    chunk,
    get,
    sending,
    stream_three,
    streaming,
)


async def test_bodies_are_byte_exact_both_ways() -> None:
    odd = b'{ "model" : "m",\t"messages":[{"role":"user","content":"\\u00e9 \xc3\xa9"}] , "top_k":7, "x":{"y":[1.50]} }'
    reply = b'{"id":"chatcmpl-1", "odd":  1.0e5}'
    async with a_rig() as rig:
        engine = await rig.engine(answering(reply))
        answer = await rig.ask(chat(body=odd))
    assert engine.served[0].body == odd
    assert answer.body == reply and answer.headers["content-length"] == str(len(reply))
    assert answer.headers["x-glowplug-unknown-fields"] == "x"


async def test_an_engine_gets_its_own_key_and_never_the_clients() -> None:
    async with a_rig(api_key="k", engine_secret="s") as rig:
        engine = await rig.engine(key_id="17")
        await rig.ask(chat(extra=b"authorization: Bearer k\r\n"))
        assert engine.served[0].header("authorization") == f"Bearer {engine_key('s', '17')}"
        restarted = an_instance("i-1", engine.url, key_id="18", revision=2)  # at the same address
        rig.tell(restarted)
        await rig.ask(chat(extra=b"authorization: Bearer k\r\n"))
        assert engine.served[1].header("authorization") == f"Bearer {engine_key('s', '18')}"
        rig.tell(an_instance("i-1", engine.url, revision=3))  # from an agent that makes no keys
        await rig.ask(chat(extra=b"authorization: Bearer k\r\n"))
        assert engine.served[2].header("authorization") is None


async def test_target_and_headers_reach_the_engine_but_credentials_do_not() -> None:
    async with a_rig(api_key="k") as rig:
        engine = await rig.engine()
        request = chat(extra=b"authorization: Bearer k\r\nx-custom: 1\r\ncookie: a=b\r\n")
        await rig.ask(request.replace(b"completions HTTP", b"completions?a=1 HTTP"))
    served = engine.served[0]
    assert served.head.startswith(b"POST /v1/chat/completions?a=1 HTTP/1.1\r\n")
    assert served.header("x-custom") == "1" and served.header("content-type") == "application/json"
    assert served.header("authorization") is None and served.header("cookie") is None


@pytest.mark.parametrize(
    "said", [b"multipart/form-data; boundary=x", b"application/x-www-form-urlencoded", b"text/plain"]
)
async def test_json_reaches_the_engine_as_json_whatever_its_client_calls_it(rig: Rig, said: bytes) -> None:
    engine = await rig.engine()
    request = chat().replace(b"application/json", said)
    assert said in request
    assert (await rig.ask(request)).status == 200
    assert engine.served[0].header("content-type") == "application/json"


async def test_request_id_is_echoed_and_passed_on(rig: Rig) -> None:
    engine = await rig.engine()
    answer = await rig.ask(chat(extra=b"X-Request-Id: mine-1\r\n"))
    assert answer.headers["x-request-id"] == "mine-1" == engine.served[0].header("x-request-id")


async def test_request_id_is_made_when_none_or_an_unsafe_one_came(rig: Rig) -> None:
    await rig.engine()
    first = await rig.ask(chat())
    second = await rig.ask(chat(extra=b"x-request-id: <script>\r\n"))
    third = await rig.ask(get("/nowhere"))
    made = {a.headers["x-request-id"] for a in (first, second, third)}
    assert len(made) == 3 and all(i.startswith("req-") for i in made)


async def test_traceparent_goes_on_to_the_engine_and_back(rig: Rig) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    engine = await rig.engine()
    answer = await rig.ask(chat(extra=b"traceparent: %b\r\n" % trace.encode()))
    fresh = await rig.ask(chat(extra=b"traceparent: 00-zz-b7ad6b7169203331-01\r\n"))
    assert answer.headers["traceparent"] == trace == engine.served[0].header("traceparent")
    assert fresh.headers["traceparent"].startswith("00-") and "zz" not in fresh.headers["traceparent"]


async def test_server_timing_and_instance_are_told(rig: Rig) -> None:
    await rig.engine(emulated=True)
    answer = await rig.ask(chat(stream=True))
    timing = answer.headers["server-timing"]
    assert timing.startswith("queue;dur=0.0, router;dur=") and "fetch" not in timing
    assert answer.headers["x-glowplug-instance"] == "i-1"
    assert answer.headers[HEADER_EMULATED] == "1"


async def test_server_timing_of_a_cold_request_has_the_phases(rig: Rig) -> None:
    client = await rig.held(chat())
    await rig.engine()
    answer = await client.answer()
    assert "fetch;dur=500.0" in answer.headers["server-timing"]


async def test_what_an_engine_refuses_keeps_its_status_its_reason_and_its_code(rig: Rig) -> None:
    said = {"error": {"message": "no", "code": "bad"}}
    await rig.engine(answering(said, "400 Bad Request", b"x-e: 1\r\n"))
    answer = await rig.ask(chat(stream=True))
    error = {"message": "no", "type": "invalid_request_error", "param": None, "code": "bad"}
    assert answer.status == 400 and answer.json() == {"error": error}
    assert answer.headers["x-glowplug-instance"] == "i-1" and "server-timing" in answer.headers


HALF = len(TOKEN) // 2
FRAMINGS = {
    "a chunk each": [chunk(TOKEN)] * 3,
    "chunks that are read at once": [chunk(TOKEN), chunk(TOKEN) + chunk(TOKEN)],
    "two events in a chunk": [chunk(TOKEN), chunk(TOKEN + TOKEN)],
    "a chunk in two reads": [chunk(TOKEN), chunk(TOKEN)[:20], chunk(TOKEN)[20:], chunk(TOKEN)],
    "a size in two reads": [chunk(TOKEN) + b"3", chunk(TOKEN)[1:], chunk(TOKEN)],
    "half an event in a chunk": [chunk(TOKEN), chunk(TOKEN[:HALF]), chunk(TOKEN[HALF:]), chunk(TOKEN)],
    "half an event and more": [chunk(TOKEN), chunk(TOKEN[:HALF]), chunk(TOKEN[HALF:] + TOKEN)],
    "sizes in capitals, with zeros": [chunk(TOKEN), b"%X\r\n%b\r\n" % (len(TOKEN), TOKEN), b"00" + chunk(TOKEN)],
    "an extension": [chunk(TOKEN), chunk(TOKEN, b";x=1"), chunk(TOKEN)],
}


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_stream_is_the_same_however_its_engine_frames_it(rig: Rig, framing: str) -> None:
    last = chunk(DONE) + b"0\r\n\r\n"
    engine = await rig.engine(sending(SSE_HEAD, *FRAMINGS[framing], last, every_s=0.005))
    for _ in range(2):
        answer = await rig.ask(chat(stream=True))
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
        assert answer.complete and answer.body == TOKEN * 3 + DONE
    assert engine.num_connections == 1
    assert [e.answer.num_events for e in rig.finished if e.answer is not None] == [3, 3]


async def test_a_read_that_is_one_chunk_of_whole_events_is_not_parsed(rig: Rig) -> None:
    await rig.engine(streaming(TOKEN, then="hang"))
    client = await rig.sent(chat(stream=True))
    await client.head()
    assert await client.chunk() == TOKEN
    engine: Any = rig.exchange.engine
    parsed, feed = list[bytes](), engine._feed

    def feeding(data: bytes) -> None:
        parsed.append(data)
        feed(data)

    engine._feed = feeding
    engine.data_received(chunk(TOKEN))
    assert await client.chunk() == TOKEN and not parsed
    for data in (chunk(TOKEN) + chunk(DONE), b"0\r\n\r\n"):
        engine.data_received(data)
    assert await client.rest() == TOKEN + DONE and parsed == [chunk(TOKEN) + chunk(DONE), b"0\r\n\r\n"]


async def test_an_answer_split_at_every_byte_is_the_same(rig: Rig) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += chunk(TOKEN) + chunk(DONE) + b"0\r\n\r\n"

    await rig.engine(sending(*(raw[i : i + 1] for i in range(len(raw))), every_s=0.0))
    answer = await rig.ask(chat(stream=True))
    assert answer.complete and answer.body == TOKEN + DONE


async def test_an_interim_100_from_the_engine_is_not_the_answer(rig: Rig) -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n" + b'{"ok": 1}'
    await rig.engine(sending(b"HTTP/1.1 100 Continue\r\n\r\n" + whole))
    answer = await rig.ask(chat())
    assert answer.status == 200 and answer.json() == {"ok": 1}


async def test_http_1_0_gets_a_plain_body_and_a_close(rig: Rig) -> None:
    await rig.engine()
    client = await rig.sent(chat(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
    answer = await client.answer()
    assert "transfer-encoding" not in answer.headers and answer.body == TOKEN * 3 + DONE


async def test_models_lists_cold_ones_with_state_and_eta() -> None:
    async with a_rig(models=(a_model("m", aliases=("short",)), a_model("cold-one"))) as rig:
        await rig.engine()
        listed = await rig.ask(get("/v1/models"))
        one = await rig.ask(get("/v1/models/short"))
        none = await rig.ask(get("/v1/models/none"))
    rows = {row["id"]: row for row in listed.json()["data"]}
    assert listed.json()["object"] == "list"
    assert (rows["m"]["state"], rows["m"]["eta_s"]) == ("hot", 0.0)
    assert rows["cold-one"]["state"] == "cold" and rows["cold-one"]["eta_s"] > 0
    assert rows["m"]["instances"] == [{"instance_id": "i-1", "state": "ready", "node_id": "node-1"}]
    assert one.json()["id"] == "m" and (none.status, none.code) == (404, "model_not_found")


async def test_an_alias_is_served_by_its_model() -> None:
    async with a_rig(models=(a_model("m", aliases=("short",)),)) as rig:
        engine = await rig.engine()
        answer = await rig.ask(chat("short"))
    assert answer.status == 200 and json.loads(engine.served[0].body)["model"] == "m"


async def test_health_live_and_ready(rig: Rig) -> None:
    for path in (b"/health", b"/live", b"/ready"):
        assert (await rig.ask(b"GET %b HTTP/1.1\r\nhost: t\r\n\r\n" % path)).status == 200
    rig.table.table_loaded = False
    assert (await rig.ask(get("/ready"))).status == 503


async def test_before_its_tables_are_read_a_router_knows_no_model_rather_than_none(rig: Rig) -> None:
    rig.table.table_loaded = False
    for asked in (get("/v1/models"), get("/v1/models/unknown"), chat("unknown")):
        answer = await rig.ask(asked)
        assert (answer.status, answer.headers["retry-after"], answer.code) == (503, "1", "no_capacity"), asked


async def test_token_counts_come_from_usage_timings_or_events(rig: Rig) -> None:
    engine = await rig.engine(answering({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7}}))
    await rig.ask(chat())
    engine.reply = streaming(TOKEN, b'data: {"choices":[],"timings":{"prompt_n":3,"predicted_n":9}}\n\n', DONE)
    await rig.ask(chat(stream=True))
    engine.reply = stream_three
    await rig.ask(chat(stream=True))
    await rig.until(lambda: len(rig.finished) == 3)
    assert [e.token_counts()[:3] for e in rig.finished] == [(5, 7, True), (3, 9, True), (0, 3, False)]


async def test_the_official_openai_client_works_unmodified() -> None:
    from openai import AsyncOpenAI

    completion = {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
    piece = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m"}

    async def reply(served: Served) -> None:
        if b'"input"' in served.body:
            vectors = {
                "object": "list",
                "model": "m",
                "data": [{"object": "embedding", "index": 0, "embedding": [1.0]}],
            }
            await served.json(vectors)
        elif not json.loads(served.body).get("stream"):
            await served.json(completion)
        else:
            await served.sse_head()
            for text in ("he", "llo"):
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
                await served.chunk(b"data: %b\n\n" % json.dumps(piece | {"choices": [choice]}).encode())
            await served.chunk(DONE)
            await served.end()

    async with a_rig(api_key="key-1") as rig:
        await rig.engine(reply)
        base_url = "http://{}:{}/v1".format(*rig.host_port)
        messages = [{"role": "user", "content": "hi"}]
        async with AsyncOpenAI(base_url=base_url, api_key="key-1", max_retries=0) as client:
            assert [m.id async for m in client.models.list()] == ["m"]
            whole = await client.chat.completions.create(model="m", messages=messages)  # type: ignore[arg-type]
            assert whole.choices[0].message.content == "hello"
            stream = await client.chat.completions.create(model="m", messages=messages, stream=True)  # type: ignore[arg-type]
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "hello"  # type: ignore[union-attr]
            vectors = await client.embeddings.create(model="m", input="x", encoding_format="float")
            assert vectors.data[0].embedding == [1.0]


async def test_a_draining_instance_gets_nothing_more(rig: Rig) -> None:
    first = await rig.engine(instance_id="i-1")
    second = await rig.engine(instance_id="i-2")
    rig.tell(an_instance("i-1", first.url, InstanceState.DRAINING, revision=2))
    for _ in range(4):
        await rig.ask(chat())
    assert len(first.served) == 0 and len(second.served) == 4


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_an_answer_that_has_no_body_is_over_with_its_head(rig: Rig, status: bytes) -> None:
    engine = await rig.engine(sending(b"HTTP/1.1 %b\r\nx-e: 1\r\n\r\n" % status))
    client = await rig.client()
    for _ in range(2):
        await client.send(chat())
        answer = await client.answer()
        assert (answer.status, answer.headers["content-length"], answer.body) == (int(status[:3]), "0", b"")
    assert engine.num_connections == 1 and answer.headers["x-e"] == "1"


async def test_what_an_engine_sends_behind_its_answer_is_not_passed_on(rig: Rig) -> None:
    whole = SSE_HEAD + chunk(TOKEN) + chunk(DONE) + b"0\r\nx-sum: 1\r\ncontent-type: a/b\r\n\r\n"
    engine = await rig.engine(sending(whole))
    answer = await rig.ask(chat(stream=True))
    assert answer.complete and answer.body == TOKEN + DONE
    assert "x-sum" not in answer.headers and answer.headers["content-type"] == "text/event-stream"
    engine.reply = sending(whole, b"HTTP/1.1 200 OK\r\n", then="hang")
    assert (await rig.ask(chat(stream=True))).body == TOKEN + DONE
    await rig.until(lambda: not next(iter(rig.port.engines.pools.values()))._idle)
    engine.reply = stream_three
    assert (await rig.ask(chat(stream=True))).complete and engine.num_connections == 2


@pytest.mark.parametrize(
    ("head", "num_connections"),
    [
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n", 2),
        (b"HTTP/1.0 200 OK\r\n", 2),
        (b"HTTP/1.0 200 OK\r\nconnection: keep-alive\r\n", 1),
        (b"HTTP/1.1 200 OK\r\n", 1),
    ],
)
async def test_an_engine_says_whether_its_connection_stays(rig: Rig, head: bytes, num_connections: int) -> None:
    engine = await rig.engine(sending(head + b"content-type: a/b\r\ncontent-length: 2\r\n\r\n{}"))
    for _ in range(2):
        answer = await rig.ask(chat())
        assert answer.body == b"{}" and answer.headers["content-length"] == "2"
    assert engine.num_connections == num_connections


async def test_connections_to_an_engine_are_kept_up_to_a_number() -> None:
    for num, expected in ((0, 2), (1, 1)):
        async with a_rig(Limits(num_pooled=num)) as rig:
            engine = await rig.engine()
            for _ in range(2):
                assert (await rig.ask(chat())).status == 200
            assert engine.num_connections == expected
            (pool,) = rig.port.engines.pools.values()
            assert len(pool._idle) == num


@pytest.mark.parametrize("num_interim", [0, 4, 5])
async def test_an_engines_head_is_bounded(num_interim: int) -> None:
    async with a_rig(Limits(engine_head_bytes=100), params={"quarantine_s": 0.01}) as rig:
        interim, whole = b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
        engines = [
            await rig.engine(sending(*[interim] * num_interim, whole), instance_id=f"i-{number}") for number in range(2)
        ]
        answers = [await rig.ask(chat()) for _ in range(1 if num_interim == 5 else 4)]
    assert {answer.status for answer in answers} == {502 if num_interim == 5 else 200}
    assert sum(engine.num_connections for engine in engines) == (2 if num_interim == 5 else 1)


async def test_a_connection_that_its_answer_paused_is_not_paused_for_the_next(rig: Rig) -> None:
    engine = await rig.engine(streaming(TOKEN, then="hang"))
    client = await rig.sent(chat(stream=True))
    await client.head()
    assert await client.chunk() == TOKEN
    connection: Any = rig.exchange.engine
    connection.heard_at = 1.0
    connection.resume()
    assert connection.heard_at == 1.0 and not connection.paused
    connection.pause()
    connection.pause()
    assert connection.paused and not connection.transport.is_reading()
    connection.resume()
    assert connection.heard_at > 1.0 and connection.transport.is_reading()
    connection.pause()
    connection.data_received(chunk(DONE) + b"0\r\n\r\n")
    assert await client.rest() == DONE
    (pool,) = rig.port.engines.pools.values()
    assert pool._idle == [connection] and connection.transport.is_reading() and not connection.paused
    assert engine.num_connections == 1


async def test_the_connection_used_last_is_used_next(rig: Rig) -> None:
    gates = [asyncio.Event(), asyncio.Event()]

    async def wait(served: Served) -> None:
        await gates[len(engine.served) - 1].wait()
        await served.json({})

    engine = await rig.engine(wait, max_concurrency=9)
    clients = [await rig.sent(chat())]
    await rig.until(lambda: len(engine.served) == 1)
    clients.append(await rig.sent(chat()))
    await rig.until(lambda: len(engine.served) == 2)
    (pool,) = rig.port.engines.pools.values()
    connections = [one.engine for one in rig.table.exchanges.values()]
    for gate, client in zip(gates, clients, strict=True):
        gate.set()
        assert (await client.answer()).status == 200
    assert pool._idle == connections
    engine.reply = stream_three
    assert (await rig.ask(chat())).status == 200
    assert pool._idle == connections and engine.num_connections == 2
    pool._idle[1].transport.close()
    assert (await rig.ask(chat())).status == 200 and engine.num_connections == 2


@pytest.mark.parametrize("is_reset", [False, True])
async def test_an_answer_up_to_the_end_of_its_connection_is_whole_unless_that_breaks(rig: Rig, is_reset: bool) -> None:
    gate = asyncio.Event()

    async def reply(served: Served) -> None:
        await served.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhello")
        await gate.wait()
        reset = struct.pack("ii", is_reset, 0)
        served.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        served.die()

    await rig.engine(reply)
    client = await rig.sent(chat())
    await client.head()
    assert await client.chunk() == b"hello"
    gate.set()
    assert await client.reader.read(5) == (b"" if is_reset else b"0\r\n\r\n")
    assert rig.endings[0].status == (502 if is_reset else 200)


async def test_a_clients_stream_is_its_own_unless_the_engine_is_asked_for_tokens() -> None:
    for most, stream, asks in ((2, True, True), (2, False, False), (0, True, False)):
        async with a_rig(models=(a_model(engine="vllm"),), params={"max_continuations": most}) as rig:
            engine = await rig.engine()
            await rig.ask(chat(stream=stream))
            assert ("return_token_ids" in json.loads(engine.served[0].body)) is asks


async def test_the_time_in_the_router_leaves_out_the_queue(rig: Rig) -> None:
    began = time.monotonic()
    client = await rig.held(chat())
    await rig.engine()
    await client.answer()
    await rig.ask(chat())
    await rig.until(lambda: len(rig.finished) == 2)
    held, warm = rig.finished
    assert held.queue_s > 0 == warm.queue_s and held.cold and not warm.cold
    assert all(0 < one.router_s + one.queue_s <= time.monotonic() - began for one in rig.finished)
    assert warm.router_s > 0 and all(0 < one.way.dispatched_s <= time.monotonic() - began for one in rig.finished)
