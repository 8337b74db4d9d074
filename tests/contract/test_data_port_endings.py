"""How exchanges end when a client or engine leaves or the router is stopped."""

import asyncio
import contextlib
import random
import socket
import threading
import time

import pytest

from glowplug.controllers.effects import Tick
from glowplug.domain.instance import InstanceState
from glowplug.services.router.engine import EngineConnection
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.port import SLEPT_S, DataPort
from glowplug.services.router.request_table import PortStage
from glowplug.services.router.settings import Limits
from tests.contract.data_port_rig import (
    DONE,
    GET,
    TOKEN,
    Rig,
    a_model,
    a_rig,
    an_instance,
    chat,
    hang,
    sending,
    streaming,
)
from tests.waiting import WAIT_S

LIMITS = Limits()


# -- an answer whose end has been handed over ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "chunks", "status"),
    [
        (chat(stream=True), (TOKEN, DONE), 200),
        (chat(stream=True), (TOKEN + DONE,), 200),
        (chat(stream=True), (TOKEN, b"data: [DONE]\r\n\r\n"), 200),
        (chat(stream=True), (TOKEN, DONE[:7], DONE[7:9], DONE[9:]), 200),
        (chat(stream=True), (TOKEN,), 499),
        (chat(stream=True), (TOKEN, b'data: {"text":"data: [DONE]"}\n\n'), 499),
    ],
)
async def test_a_client_that_closes_when_it_has_read_the_end(
    rig: Rig, request_: bytes, chunks: tuple[bytes, ...], status: int
) -> None:
    engine = await rig.engine(streaming(*chunks, then="hang"))
    client = await rig.sent(request_)
    await client.head()
    got = b""
    while got != b"".join(chunks):
        got += await client.chunk()
    client.close()
    await rig.until(lambda: bool(rig.finished))
    await asyncio.wait_for(engine.served[0].left.wait(), WAIT_S)
    ended = rig.endings[0]
    assert (ended.status, ended.error_code) == ((200, "") if status == 200 else (499, "client_left"))


@pytest.mark.parametrize(
    "length", [b"content-length: 2\r\n\r\n{}", b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
async def test_a_plain_answer_is_whole_with_its_last_byte(rig: Rig, length: bytes) -> None:
    await rig.engine(sending(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + length))
    client = await rig.sent(chat())
    assert (await client.answer()).body == b"{}"
    client.close()
    await rig.until(lambda: bool(rig.finished))
    assert rig.endings[0].status == 200


async def test_an_engine_that_dies_behind_the_end_spoils_nothing(rig: Rig) -> None:
    await rig.engine(streaming(TOKEN, DONE, then="die"))
    answer = await rig.ask(chat(stream=True))
    assert answer.complete and answer.body == TOKEN + DONE
    assert rig.endings[0].status == 200


async def test_a_drain_that_ends_behind_the_end_spoils_nothing(rig: Rig) -> None:
    await rig.engine(streaming(TOKEN, DONE, then="hang"))
    client = await rig.sent(chat(stream=True))
    await client.head()
    assert await client.chunk() == TOKEN and await client.chunk() == DONE
    await rig.port.drain(0.01)
    assert await client.chunk() == b""
    assert rig.endings[0].status == 200


# -- engines put to sleep ------------------------------------------------------------------------------------------


async def asleep(rig: Rig, url: str) -> None:
    """News for a stopped router: its request went to an engine that now sleeps."""
    await rig.until(lambda: len(rig.engines[0].served) == 1)
    rig.tell(an_instance("i-1", url, InstanceState.DRAINING, revision=2))
    rig.tell(an_instance("i-1", "", InstanceState.SWAPPED_OUT, revision=3, reason="asleep in host memory"))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_sent_to_an_engine_that_sleeps_goes_to_another(rig: Rig, stream: bool) -> None:
    engine = await rig.engine(hang)
    client = await rig.sent(chat(stream=stream))
    await asleep(rig, engine.url)
    await rig.until(lambda: rig.num_held == 1)
    await rig.engine(instance_id="i-2")
    answer = await client.answer()
    assert answer.status == 200 and answer.headers["x-glowplug-instance"] == "i-2"


async def test_an_answer_that_sleep_has_cut_off_is_told(rig: Rig) -> None:
    engine = await rig.engine(streaming(TOKEN, then="hang"))
    client = await rig.sent(chat(stream=True))
    await client.head()
    assert await client.chunk() == TOKEN
    await asleep(rig, engine.url)
    assert b"asleep in host memory" in await client.chunk() and await client.chunk() == b""
    assert rig.endings[0].status == 502


# -- a router that was stopped -------------------------------------------------------------------------------------


async def test_nobody_was_late_while_the_router_was_stopped(rig: Rig) -> None:
    """At the first sweep the data received meanwhile is unread."""
    engine = await rig.engine(streaming(TOKEN, then="hang"))
    reader, half = await rig.client(), await rig.client()
    await reader.send(chat(stream=True))
    await reader.head()
    assert await reader.chunk() == TOKEN
    await half.send(chat()[:-5])
    await rig.until(lambda: rig.port.context.buffered_bytes > 0)
    rig.port.sweep(time.monotonic() + 1000.0)
    assert len(rig.table.exchanges) == 1
    engine.reply = hang
    await half.send(chat()[-5:])
    await rig.until(lambda: len(engine.served) == 2)
    assert not rig.finished


async def test_a_silent_engine_is_given_up_unless_it_is_paused_or_the_router_was_stopped(rig: Rig) -> None:
    await rig.engine(streaming(TOKEN, then="hang"))
    client = await rig.sent(chat(stream=True))
    await client.head()
    assert await client.chunk() == TOKEN
    engine, attempt, silence_s = rig.exchange.engine, rig.exchange.attempt, LIMITS.engine_silence_s
    assert engine is not None and attempt is not None
    rig.port._sweep_due = 1e9
    heard_at = engine.heard_at = 100.0  # sums of whole numbers are exact
    rig.port.sweep(heard_at + silence_s)
    engine.paused = True
    rig.port.sweep(heard_at + silence_s + 1.0)
    engine.paused, rig.port._sweep_due = False, heard_at
    rig.port.sweep(heard_at + silence_s + 1.0)
    assert engine.heard_at == heard_at + silence_s + 1.0 and rig.exchange.engine is engine
    attempt.is_deserted, rig.port._sweep_due = True, engine.heard_at + LIMITS.deserted_silence_s
    rig.port.sweep(engine.heard_at + LIMITS.deserted_silence_s)
    assert rig.exchange.engine is engine
    rig.port.sweep(engine.heard_at + LIMITS.deserted_silence_s + SLEPT_S)
    assert not rig.table.exchanges and b"silent for 5 s" in (await client.rest())
    assert rig.endings[0].status == 502


async def test_a_sweep_postpones_clients_only_after_a_stop_and_drops_what_is_gone(rig: Rig) -> None:
    client = await rig.held(chat())
    rig.port.sweep(rig.port._sweep_due + 2 * SLEPT_S)
    engine = await rig.engine()
    assert (await client.answer()).status == 200
    connection, (pool,) = await rig.connection(), rig.port.engines.pools.values()
    rig.port._sweep_due = connection.since = 100.0  # sums of whole numbers and halves are exact
    for slept_s, postponed_s in ((SLEPT_S, 0.0), (SLEPT_S + 0.5, SLEPT_S + 0.5)):
        before = connection.since
        rig.port.sweep(rig.port._sweep_due + slept_s)
        assert connection.since == before + postponed_s
    rig.port._sweep_due = 1e9
    pool._idle[0].idle_since = 100.0
    rig.port.sweep(100.0 + LIMITS.engine_idle_s)
    assert len(pool._idle) == 1 and rig.port.engines.pools
    rig.port.sweep(pool._idle[0].idle_since + LIMITS.engine_idle_s + 0.01)
    assert not pool._idle and not pool.closed and rig.port.engines.pools
    rig.tell(an_instance("i-1", engine.url, InstanceState.STOPPED, revision=2))
    rig.port.sweep(time.monotonic())
    assert pool.closed and not rig.port.engines.pools
    assert rig.port.context.metrics.connections._value.get() == 1


async def test_sweeps_go_on_behind_one_that_failed() -> None:
    async with a_rig(Limits(header_s=0.04, client_idle_s=0.04)) as rig:
        client = await rig.client()
        await rig.connection()
        failed = list[float]()

        def fail(now: float) -> None:
            failed.append(now)
            if len(failed) < 3:
                raise RuntimeError("a fault of ours")
            DataPort.sweep(rig.port, now)

        rig.port.sweep = fail  # type: ignore[method-assign]
        assert await client.at_end() and len(failed) >= 3


async def test_a_port_that_others_share_stops_listening_and_serves_what_comes_on_its_connections(rig: Rig) -> None:
    gate = asyncio.Event()
    await rig.engine(streaming(TOKEN, gate, DONE), max_concurrency=9)
    idle, half, busy = await rig.client(), await rig.sent(chat(stream=True)[:-5]), await rig.sent(chat(stream=True))
    await busy.head()
    await rig.until(lambda: rig.port.context.buffered_bytes > 0 and len(rig.port.connections) == 3)
    draining = asyncio.create_task(rig.port.drain(WAIT_S, keep_listening=False))
    assert await idle.at_end()
    with pytest.raises(ConnectionError):
        await rig.client()
    gate.set()
    assert await busy.rest() == TOKEN + DONE and await busy.at_end()
    await rig.until(lambda: not rig.table.exchanges)
    assert not draining.done(), "a request is on its way"
    await half.send(chat(stream=True)[-5:])
    assert (await half.answer()).body == TOKEN + DONE
    await draining
    assert rig.port._sweeper is not None and await half.at_end()
    await rig.until(rig.port._sweeper.done)


async def test_a_port_that_refuses_waits_for_no_half_request_and_one_that_leaves_says_so(rig: Rig) -> None:
    half = await rig.sent(chat()[:-5])
    await rig.until(lambda: rig.port.context.buffered_bytes > 0)
    await rig.port.leave(0.0)
    assert rig.table.stage is PortStage.LEAVING and (await rig.ask(GET)).headers["connection"] == "close"
    await rig.engine()
    for stream in (True, False):
        assert (await rig.ask(chat(stream=stream))).headers["connection"] == "close"
    await rig.port.drain(WAIT_S)
    assert await half.at_end() and not rig.port.connections


async def test_a_pooled_connection_older_than_engines_keep_theirs_is_not_used_again(rig: Rig) -> None:
    engine = await rig.engine()
    assert (await rig.ask(chat())).status == 200
    (pool,) = rig.port.engines.pools.values()
    pool._idle[0].idle_since -= 100.0
    assert (await rig.ask(chat())).status == 200
    assert engine.num_connections == 2


async def test_a_connection_that_was_closed_before_its_first_request_is_a_failure_at_once(rig: Rig) -> None:
    """Such a connection gives no further signal."""

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    await rig.engine(hang)
    client = await rig.sent(chat())
    await rig.until(lambda: rig.num_in_flight == 1 and rig.exchange.engine is not None)
    exchange: Exchange = rig.exchange
    server = await asyncio.start_server(close, "127.0.0.1", 0)
    (pool,) = rig.port.engines.pools.values()
    loop = asyncio.get_running_loop()
    _, dead = await loop.create_connection(lambda: EngineConnection(pool), *server.sockets[0].getsockname())
    await rig.until(dead.transport.is_closing)
    server.close()
    await rig.engine(instance_id="i-2")
    assert exchange.engine is not None
    exchange.engine.abandon()
    exchange.engine = None
    dead.send(exchange)
    assert (await client.answer()).headers["x-glowplug-instance"] == "i-2"


class FickleEngine:
    """A threaded engine that runs on while the event loop is blocked; it closes connections idle for 30 ms and some
    others."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self._server.accept()[:1], daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(0.03)
            while self._chance.random() > 0.1 and sock.recv(65536):
                if self._chance.random() < 0.1:
                    return
                time.sleep(self._chance.random() * 0.03)
                sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.mark.parametrize("seed", [1, 2])
async def test_every_exchange_ends_whenever_the_router_is_stopped(seed: int) -> None:
    chance = random.Random(seed)
    engine = FickleEngine(seed)
    answers: list[int] = []

    async def client(rig: Rig) -> None:
        one = await rig.client()
        for _ in range(15):
            await one.send(chat())
            answers.append((await one.answer()).status)
            await asyncio.sleep(chance.random() * 0.02)

    limits = Limits(engine_idle_s=0.02, connect_s=0.5)
    async with a_rig(limits, params={"quarantine_s": 0.01}, models=(a_model(max_wait_s=20.0),)) as rig:
        for i in range(3):
            rig.tell(an_instance(f"i-{i}", engine.url))
        clients = [asyncio.create_task(client(rig)) for _ in range(10)]
        async with asyncio.timeout(60):
            for _ in range(20):
                await asyncio.sleep(chance.random() * 0.02)
                time.sleep(0.01 + chance.random() * 0.05)  # noqa: ASYNC251 - the stop
                rig.table.take(Tick())
            while not all(task.done() for task in clients):
                await asyncio.sleep(0.005)
                rig.table.take(Tick())
        await asyncio.gather(*clients)
    engine.close()
    assert len(answers) == 150 and set(answers) <= {200, 502}
