"""Engines that die, hang or lie; clients that leave; a router that stops."""

import asyncio
import json
import socket
import time
from typing import Any

import pytest

from glowplug.controllers.router.messages import RequestEnded
from glowplug.domain.instance import InstanceState
from glowplug.runtime.service import listen
from glowplug.services.router.client import ClientConnection
from glowplug.services.router.exchange_states import ExchangeState
from glowplug.services.router.resumption import LOG_BYTES
from glowplug.services.router.settings import Limits
from tests.contract.data_port_rig import (
    DONE,
    TOKEN,
    Client,
    FakeEngine,
    Reply,
    Rig,
    Served,
    a_model,
    a_rig,
    an_instance,
    answering,
    chat,
    data_events,
    die_at_once,
    get,
    hang,
    sending,
    stream_three,
    streaming,
)
from tests.ports import free_port
from tests.waiting import WAIT_S


@pytest.mark.parametrize(
    ("chunk", "then"),
    [(TOKEN, "die"), (TOKEN + b'data: {"choices":[{"index"', "die"), (TOKEN, "close")],
    ids=["torn", "torn within an event", "closed without a last chunk"],
)
async def test_an_engine_that_leaves_mid_stream_is_one_error_event_then_a_close(
    rig: Rig, chunk: bytes, then: Any
) -> None:
    await rig.engine(streaming(chunk, then=then))
    client = await rig.sent(chat(stream=True))
    answer = await client.answer()
    assert await client.at_end()
    assert rig.endings[0].status == 502
    events = data_events(answer.body)
    assert answer.complete and len(events) == 2 and events[0] + b"\n\n" == TOKEN
    assert json.loads(events[1][6:])["error"]["code"] == "engine_failed"


async def test_an_engine_that_dies_mid_json_is_a_visible_truncation(rig: Rig) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    await rig.engine(sending(head + b"{", then="die"))
    assert not (await rig.ask(chat())).complete


@pytest.mark.parametrize("reply", [die_at_once, streaming(then="die")], ids=["at once", "behind its headers"])
async def test_an_engine_that_dies_before_its_first_byte_is_tried_once_elsewhere(rig: Rig, reply: Reply) -> None:
    bad = await rig.engine(reply, instance_id="i-1")
    good = await rig.engine(instance_id="i-2")
    answer = await rig.ask(chat(stream=True))
    assert (len(bad.served), len(good.served)) == (1, 1)
    assert answer.status == 200 and answer.body == TOKEN * 3 + DONE


@pytest.mark.parametrize("reply", [die_at_once, sending(b"220 mail ready\r\n\r\n")], ids=["dead", "not HTTP"])
async def test_a_request_that_brings_down_two_engines_is_502(rig: Rig, reply: Reply) -> None:
    await rig.engine(reply, instance_id="i-1")
    await rig.engine(reply, instance_id="i-2")
    third = await rig.engine(instance_id="i-3")
    answer = await rig.ask(chat())
    assert len(third.served) == 0
    assert (answer.status, answer.code) == (502, "engine_failed")


async def test_with_no_other_engine_the_request_waits_for_the_reload(rig: Rig) -> None:
    bad = await rig.engine(die_at_once)
    client = await rig.held(chat(stream=True))
    rig.tell(an_instance("i-1", bad.url, InstanceState.FAILED, revision=2, reason="killed"))
    await rig.engine(instance_id="i-2")
    answer = await client.answer()
    assert answer.status == 200 and answer.complete


async def test_an_engine_nobody_listens_at_does_not_blame_the_request() -> None:
    async with a_rig(params={"quarantine_s": 0.01}) as rig:
        rig.tell(an_instance("i-1", f"http://127.0.0.1:{free_port()}"))
        client = await rig.sent(chat(stream=True))
        for _ in range(4):
            await rig.until(lambda: rig.num_held == 1)
            await asyncio.sleep(0.02)
            rig.tick()
        await rig.engine(instance_id="i-2")
        answer = await client.answer()
    assert answer.status == 200 and answer.complete


REFUSING = answering({"error": {}}, "503 Service Unavailable", b"x-glowplug-refused: asleep\r\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_what_an_engine_that_sleeps_refuses_is_sent_elsewhere(rig: Rig, stream: bool) -> None:
    """The router has not heard of its sleep yet."""
    asleep = [await rig.engine(REFUSING, instance_id=f"i-{n}") for n in range(4)]
    client = await rig.held(chat(stream=stream))
    assert [len(engine.served) for engine in asleep] == [1] * 4, "each is left alone for a while"
    assert rig.port.context.metrics.retries._value.get() == 4
    await rig.engine(instance_id="i-9")
    answer = await client.answer()
    assert answer.status == 200 and answer.body.endswith(DONE)
    assert "x-glowplug-refused" not in answer.headers and not rig.endings[0].error_code


async def test_a_pooled_connection_the_engine_has_closed_is_no_failure(rig: Rig) -> None:
    async def close_once(served: Served) -> None:
        engine.reply = stream_three
        served.die()

    engine = await rig.engine()
    assert (await rig.ask(chat())).status == 200
    engine.reply = close_once
    assert (await rig.ask(chat(stream=True))).body == TOKEN * 3 + DONE
    assert rig.port.context.metrics.retries._value.get() == 0


async def test_an_engine_that_hangs_is_given_up() -> None:
    async with a_rig(Limits(engine_silence_s=0.05)) as rig:
        await rig.engine(streaming(TOKEN, then="hang"))
        answer = await rig.ask(chat(stream=True))
    assert b"silent" in answer.body and b"[DONE]" not in answer.body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_first_byte", [True, False])
async def test_when_the_client_leaves_the_engine_is_told(rig: Rig, stream: bool, after_first_byte: bool) -> None:
    engine = await rig.engine(streaming(TOKEN, then="hang") if after_first_byte else hang)
    client = await rig.sent(chat(stream=stream))
    if after_first_byte:
        await client.head()
    await rig.until(lambda: len(engine.served) == 1)
    client.close()
    await asyncio.wait_for(engine.served[0].left.wait(), WAIT_S)
    await rig.until(lambda: rig.num_in_flight == 0)
    assert rig.endings[0].status == 499


async def flood(served: Served) -> None:
    await served.sse_head()
    while not served.left.is_set():
        await served.chunk(b"data: " + b"x" * 65_000 + b"\n\n")


async def test_a_client_that_does_not_read_pauses_its_engine(rig: Rig) -> None:
    sent = 0
    big = b"data: " + b"x" * 65_000 + b"\n\n"

    async def flood(served: Served) -> None:
        nonlocal sent
        await served.sse_head()
        for _ in range(2000):
            await served.chunk(big)
            sent += 1
        await served.end()

    await rig.engine(flood)
    client = await rig.sent(chat(stream=True))
    await client.head()
    before = -1
    while before != sent:
        before = sent
        await asyncio.sleep(0.1)
    assert 0 < sent < 1000, "130 MB went into buffers"
    exchange = rig.exchange
    connection = await rig.connection()
    assert connection.write_paused and exchange.engine is not None and exchange.engine.paused
    assert connection.transport.get_write_buffer_size() < rig.port.limits.write_buffer_bytes + 500_000
    assert len(await client.rest()) == 2000 * len(big)


async def test_a_client_that_never_reads_is_dropped() -> None:
    async with a_rig(Limits(stall_s=0.1, header_s=0.2)) as rig:
        engine = await rig.engine(flood)
        await rig.sent(chat(stream=True))
        await rig.until(lambda: len(rig.finished) == 1)
        assert rig.endings[0].status == 499
        await asyncio.wait_for(engine.served[0].left.wait(), WAIT_S)


async def test_many_clients_that_do_not_read_cost_little_and_harm_nobody() -> None:
    async with a_rig(Limits(write_buffers_bytes=8 << 20)) as rig:
        await rig.engine(flood, max_concurrency=100)
        first = [await rig.sent(chat(stream=True)) for _ in range(6)]
        await rig.until(lambda: sum(c.write_paused for c in rig.port.connections) == 6)
        rig.port.sweep(time.monotonic())
        for _ in range(12):
            await rig.sent(chat(stream=True))
        await rig.until(lambda: sum(c.write_paused for c in rig.port.connections) == 18)
        buffered = sum(c.transport.get_write_buffer_size() for c in rig.port.connections)
        assert buffered < 6 * 2_600_000 + 12 * 600_000
        assert (await rig.ask(get("/v1/models"))).status == 200
        for client in first:
            client.close()
        await rig.until(lambda: len(rig.port.connections) <= 13)
        for client in rig.clients:
            client.close()
        await rig.until(lambda: not rig.port.connections)
        rig.port.sweep(time.monotonic())
        assert not rig.port.context.is_crowded


async def test_a_client_that_does_not_read_holds_no_slot_that_others_wait_for() -> None:
    """Its answer is read on into a buffer, and kept while it reads any of it."""
    num, event = 20, b"data: " + b"x" * 50_000 + b"\n\n"
    async with a_rig() as rig:
        await rig.engine(streaming(*[event] * num, DONE, every_s=0.0), max_concurrency=1)
        connections, clients = list[ClientConnection](), list[Client]()
        for _ in range(2):
            clients.append(await rig.client())
            await rig.until(lambda: len(rig.port.connections) == len(clients))
            connections += rig.port.connections - {*connections}
            sock = connections[-1].transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
            clients[-1].writer.transport.pause_reading()  # type: ignore[attr-defined]
            await clients[-1].send(chat(stream=True))
        await rig.until(lambda: len(rig.finished) == 2)
        assert [ending.status for ending in rig.endings] == [200, 200]
        assert all(connection.transport.get_write_buffer_size() for connection in connections)
        clients[0].writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await clients[0].answer()).body) == num * len(event) + len(DONE)
        now, stall_s = time.monotonic(), rig.port.limits.stall_s
        for at in (now, now + stall_s - 1):
            connections[1].sweep(at)
        assert {*connections} == rig.port.connections
        connections[1].sweep(now + stall_s + 1)
        await rig.until(lambda: rig.port.connections == {connections[0]})


async def test_draining_finishes_streams_and_refuses_what_comes(rig: Rig) -> None:
    gate = asyncio.Event()
    await rig.engine(streaming(TOKEN, gate, DONE))
    client = await rig.sent(chat(stream=True))
    await client.head()
    draining = asyncio.create_task(rig.port.drain(5.0))
    await asyncio.sleep(0.01)
    late = await rig.ask(chat())
    assert (late.status, late.code) == (503, "router_stopping")
    assert late.headers["connection"] == "close" and late.headers["retry-after"] == "1"
    assert (await rig.ask(get("/ready"))).status == 503
    gate.set()
    assert await client.chunk() == TOKEN and await client.chunk() == DONE and await client.chunk() == b""
    await draining


async def test_what_is_not_over_when_the_drain_ends_is_told(rig: Rig) -> None:
    await rig.engine(streaming(TOKEN, then="hang"), max_concurrency=1)
    client = await rig.sent(chat(stream=True))
    await rig.until(lambda: rig.num_in_flight == 1)
    held = await rig.held(chat())
    await rig.port.drain(0.05)
    streamed, waited = await client.answer(), await held.answer()
    assert streamed.complete and b"router_stopping" in streamed.body and b"[DONE]" not in streamed.body
    assert (waited.status, waited.code) == (503, "router_stopping")


async def test_several_processes_may_share_the_port() -> None:
    first = listen("127.0.0.1", 0, reuse_port=True)
    second = listen("127.0.0.1", first.getsockname()[1], reuse_port=True)
    assert first.getsockname() == second.getsockname()
    first.close()
    second.close()


async def test_two_streams_do_not_mix(rig: Rig) -> None:
    async def own(served: Served) -> None:
        await served.sse_head()
        for _ in range(20):
            await served.chunk(b"data: {%b}\n\n" % (served.header("x-request-id") or "").encode())
            await asyncio.sleep(0)
        await served.end()

    await rig.engine(own)
    names = [b"a%d" % i for i in range(8)]
    asked = [rig.ask(chat(stream=True, extra=b"x-request-id: %b\r\n" % n)) for n in names]
    answers = await asyncio.gather(*asked)
    assert [a.body for a in answers] == [b"data: {%b}\n\n" % n * 20 for n in names]


async def test_a_request_on_a_node_that_is_cut_off_is_answered_by_another(rig: Rig) -> None:
    """Only the news that the node has left tells."""
    lost = await rig.engine(hang, instance_id="i-1")
    client = await rig.sent(chat(stream=True))
    await rig.until(lambda: bool(lost.served))
    await rig.engine(instance_id="i-2")
    rig.tell(an_instance("i-1", lost.url, InstanceState.FAILED, revision=9, reason="its node has left"), "node_left")
    answer = await client.answer()
    assert rig.num_in_flight == 0
    assert answer.status == 200 and answer.body.endswith(DONE)
    assert answer.headers["x-glowplug-instance"] == "i-2"


async def test_an_answer_that_has_begun_goes_on_whatever_is_said_of_its_node(rig: Rig) -> None:
    go_on = asyncio.Event()
    engine = await rig.engine(streaming(TOKEN, go_on, DONE))
    client = await rig.sent(chat(stream=True))
    await client.head()
    rig.tell(an_instance("i-1", engine.url, InstanceState.FAILED, revision=9, reason="its node has left"), "node_left")
    go_on.set()
    await rig.until(lambda: bool(rig.finished))
    assert rig.endings[0].status == 200 and rig.endings[0].error_code == ""


WHOLE_ERROR = b'{"error":{"message":"no","code":"bad"}}'


@pytest.mark.parametrize("most", [len(WHOLE_ERROR), len(WHOLE_ERROR) + 1])
async def test_of_an_engines_long_error_the_beginning_is_read(most: int) -> None:
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    async with a_rig(Limits(engine_error_bytes=most)) as rig:
        await rig.engine(sending(head % (len(WHOLE_ERROR) + 4) + WHOLE_ERROR, b"junk"))
        answer = await rig.ask(chat())
        assert answer.status == 400 and (answer.code == "bad") is (most == len(WHOLE_ERROR))
        assert rig.endings[0].status == 400 and rig.finished[0].request.keep_alive


async def test_an_events_beginning_is_passed_on_where_its_engine_ends_behind_it(rig: Rig) -> None:
    await rig.engine(streaming(TOKEN, b"data: half"))
    answer = await rig.ask(chat(stream=True))
    assert answer.complete and answer.body == TOKEN + b"data: half"


async def test_a_client_that_sends_no_more_is_probed_between_events_only() -> None:
    go_on, long_one = asyncio.Event(), b"data: {" + b"x" * 40
    for first, probed in ((TOKEN, TOKEN + b":\n\n"), (long_one, long_one)):
        async with a_rig(Limits(event_bytes=20)) as rig:
            go_on.clear()
            await rig.engine(streaming(first, go_on, b"}\n\n"))
            client = await rig.sent(chat(stream=True))
            await client.head()
            assert await client.chunk() == first
            client.half_close()
            connection = await rig.connection()
            await rig.until(lambda connection=connection: connection._all_sent)  # type: ignore[misc]
            connection.write_paused = True
            assert rig.exchange.probe()
            connection.write_paused = False
            go_on.set()
            assert first + await client.rest() == probed + b"}\n\n"


@pytest.mark.parametrize(("version", "end"), [(b"1.1", b"\n\n\r\n0\r\n\r\n"), (b"1.0", b"}\n\n")])
async def test_an_error_event_ends_a_stream_in_its_clients_framing(rig: Rig, version: bytes, end: bytes) -> None:
    await rig.engine(streaming(TOKEN, then="die"))
    client = await rig.sent(chat(stream=True).replace(b"1.1", version))
    await client.head()
    raw = await client.reader.read()
    assert raw.endswith(end) and raw.count(b"engine_failed") == 1


async def test_a_client_that_left_with_the_end_in_our_buffer_has_not_had_it(rig: Rig) -> None:
    await rig.engine(streaming(TOKEN, DONE, then="hang"))
    client = await rig.sent(chat(stream=True))
    await client.head()
    assert await client.chunk() == TOKEN and await client.chunk() == DONE
    (await rig.connection()).write_paused = True
    client.close()
    await rig.until(lambda: bool(rig.endings))
    assert rig.endings[0].status == 499


async def test_a_new_connection_is_for_the_attempt_that_asked_for_it(rig: Rig) -> None:
    await rig.engine(hang)
    await rig.sent(chat())
    await rig.until(lambda: bool(rig.table.exchanges) and rig.exchange.engine is not None)
    exchange, before = rig.exchange, {name: getattr(rig.exchange, name) for name in ("engine", "attempt", "state")}
    is_wanted = exchange.wanted()
    assert not is_wanted()
    exchange.engine = None
    assert is_wanted()
    exchange.state = ExchangeState.WAITING
    assert not is_wanted()
    exchange.state, exchange.attempt = ExchangeState.CONTINUING, None
    assert not is_wanted()
    exchange.attempt = before["attempt"]
    assert is_wanted()
    for name, value in before.items():
        setattr(exchange, name, value)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_sent_events_are_kept_as_text_beyond_a_bound(version: bytes) -> None:
    """In chunks that flow, and in those that are framed anew."""
    big = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 10_000)
    async with a_rig(models=(a_model(engine="llamacpp"),)) as rig:
        await rig.engine(streaming(*[big] * 9, TOKEN, then="hang", every_s=0.0))
        client = await rig.sent(chat(stream=True).replace(b"1.1", version))
        await client.head()
        await rig.until(lambda: rig.exchange.answer is not None and rig.exchange.answer.num_events == 10)
        answer, kept = rig.exchange.answer, rig.exchange.resumption
        assert answer is not None and answer.log is not None and kept is not None
        assert sum(map(len, answer.log)) + answer.log_left == LOG_BYTES and answer.log_left >= 0
        assert kept.num_tokens == 10 - len(answer.log) > 0


@pytest.mark.parametrize("is_continued", [False, True])
async def test_only_an_answer_of_one_engine_tells_how_long_answers_take(is_continued: bool) -> None:
    async with a_rig(models=(a_model(engine="llamacpp"),), params={"policy": "union"}) as rig:
        told, end = list[RequestEnded](), rig.table.end

        def spy(stimulus: RequestEnded) -> None:
            told.append(stimulus)
            end(stimulus)

        rig.table.end = spy  # type: ignore[method-assign]
        usage = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
        counted = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        engine = await rig.engine(streaming(TOKEN, then="die") if is_continued else streaming(TOKEN, counted, DONE))
        await rig.engine(streaming(TOKEN, DONE), instance_id="i-2", state=InstanceState.LOADING)
        client = await rig.sent(chat(stream=True))
        if is_continued:
            await rig.until(lambda: rig.num_held == 1)
            rig.tell(an_instance("i-2", engine.url, revision=2))
            engine.reply = streaming(TOKEN, DONE)
        assert (await client.answer()).complete
        await rig.until(lambda: bool(told))
        (ended,) = told
        assert (ended.took_s > 0) is not is_continued and ended.took_s < 60
        assert (ended.response_tokens, ended.cached_tokens) == ((0, -1) if is_continued else (7, 3))
        assert rig.finished[0].queue_s == 0.0 and not rig.finished[0].cold, "of its first engine"


async def test_a_connection_that_its_engine_has_closed_meanwhile_is_no_failure(rig: Rig) -> None:
    """The engine does so as the next request comes."""
    engine = await rig.engine()
    assert (await rig.ask(chat())).status == 200
    replies = iter((die_at_once, stream_three))

    async def reply(served: Served) -> None:
        await next(replies)(served)

    engine.reply = reply
    assert (await rig.ask(chat())).status == 200
    assert engine.num_connections == 2 and len(engine.served) == 3
    assert not rig.port.context.metrics.retries._value.get() and not rig.table.controller.balances.quarantined
    engine.reply = streaming(then="die")
    await rig.engine(instance_id="i-2")
    answers = [await rig.ask(chat(stream=True)) for _ in range(2)]
    assert {answer.body for answer in answers} == {TOKEN * 3 + DONE}
    assert rig.port.context.metrics.retries._value.get() == 1, "behind its head it is one"


class Reader:
    """Stands in for an exchange whose connection is being made."""

    def __init__(self, is_wanted: bool) -> None:
        self.is_wanted, self.told, self.state, self.engine = is_wanted, list[str](), ExchangeState.ASKED, None

    def wanted(self) -> Any:
        return lambda: self.is_wanted

    def engine_unreachable(self, reason: str) -> None:
        self.told.append(reason)


async def test_a_connection_that_is_no_longer_wanted_is_kept_for_the_next_and_its_failure_is_not_told(rig: Rig) -> None:
    await rig.engine()
    engines, instance = rig.port.engines, an_instance("i-1", rig.engines[0].url)
    unwanted: Any = Reader(False)
    engines.connect(unwanted, instance, False)
    pool = engines.pools["i-1"]
    await rig.until(lambda: len(pool._idle) == 1 and not pool._connecting)
    assert (await rig.ask(chat())).status == 200 and rig.engines[0].num_connections == 1
    for url in (f"http://127.0.0.1:{free_port()}", f"http://{'a' * 70}.x:1"):
        wanted: Any = Reader(True)
        for reader in (wanted, unwanted):
            engines.connect(reader, an_instance("i-2", url), True)
        await rig.until(lambda: not engines.pools["i-2"]._connecting)
        assert len(wanted.told) == 1 and not unwanted.told


async def test_an_instance_at_another_address_has_other_connections_and_running_ones_are_not_kept(rig: Rig) -> None:
    gate = asyncio.Event()
    engine = await rig.engine(streaming(TOKEN, gate, DONE), max_concurrency=9)
    client = await rig.sent(chat(stream=True))
    await client.head()
    pools = rig.port.engines.pools
    before = pools["i-1"]
    other = await FakeEngine().start()
    rig.engines.append(other)
    rig.tell(an_instance("i-1", other.url, revision=2, stages_busy=True))
    assert (await rig.ask(chat(stream=True))).complete and len(other.served) == 1
    assert pools["i-1"] is not before and before.closed
    gate.set()
    assert await client.rest() == TOKEN + DONE
    assert not before._idle and len(pools["i-1"]._idle) == 1 and engine.num_connections == 1
