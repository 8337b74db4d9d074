"""HTTP/1.1 beyond a good request."""

import asyncio
import json
import socket
import struct
from pathlib import Path

import pytest

from glowplug.domain.model import OnCold
from glowplug.services.router.client import BODY as IN_BODY
from glowplug.services.router.client import HEAD, IDLE
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.request_table import PortStage
from glowplug.services.router.settings import Limits
from glowplug.services.router.upload import Upload, Uploads
from tests.contract.data_port_rig import (
    CHUNKED,
    DONE,
    GET,
    TOKEN,
    Rig,
    Served,
    a_model,
    a_rig,
    answering,
    assert_error,
    chat,
    chunk,
    get,
    hang,
    stream_three,
)

BODY = chat().partition(b"\r\n\r\n")[2]
LIMITS = Limits()
MANY = 4 * 1024 * 1024  # bytes of one endless request


# -- what may grow -------------------------------------------------------------------------------------------------


async def test_trailers_are_dropped(rig: Rig) -> None:
    engine = await rig.engine()
    answer = await rig.ask(CHUNKED % b"" + chunk(BODY) + b"0\r\nx-sum: 1\r\ncontent-type: a/b\r\n\r\n")
    assert answer.status == 200 and engine.served[0].body == BODY
    assert engine.served[0].header("x-sum") is None and engine.served[0].header("content-type") is None


async def test_a_key_in_a_trailer_opens_nothing() -> None:
    async with a_rig(api_key="k") as rig:
        engine = await rig.engine()
        answer = await rig.ask(CHUNKED % b"" + chunk(BODY) + b"0\r\nauthorization: Bearer k\r\n\r\n")
        assert_error(answer, 401, "invalid_api_key")
        assert engine.served == []


ENDLESS = {
    "many trailers": (b"0\r\n", b"a: b\r\n"),
    "one trailer": (b"0\r\nx: ", b"a" * 100),
    "one trailer's name": (b"0\r\n", b"a" * 100),
    "an extension": (b"1;x=", b"a" * 100),
    "extensions": (b"", b"1;" + b"a" * 20_000 + b"\r\nx\r\n"),
    "a size": (b"", b"0" * 100),
    "an extension behind a body that allows much framing": (chunk(b"x" * 200_000) + b"0;x=", b"a" * 100),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_what_has_no_end_is_refused_while_it_is_small(what: str) -> None:
    """Before the key is checked: anyone may send it."""
    start, more = ENDLESS[what]
    async with a_rig(api_key="k") as rig:
        client = await rig.sent(CHUNKED % b"" + chunk(b"{}") + start)
        connection = await rig.connection()
        taken = 0
        while connection._refusal is None and not connection._closing:
            assert taken < MANY
            await client.send(more * (4000 // len(more) + 1))
            taken += max(4000, len(more))
            await asyncio.sleep(0)
        assert_error(await client.answer(), 431, "headers_too_large")
        assert taken < 1_000_000


async def test_a_body_in_many_small_pieces_is_taken_and_weighs_its_bytes(rig: Rig) -> None:
    text = json.dumps({"model": "m", "messages": [{"role": "user", "content": "y" * 20_000}]}).encode()
    engine = await rig.engine()
    pieces = b"".join(chunk(text[i : i + 2]) for i in range(0, len(text), 2))
    client = await rig.sent(CHUNKED % b"" + pieces)
    await rig.until(lambda: rig.port.context.buffered_bytes == len(text))
    assert isinstance((await rig.connection())._body, bytearray)
    await client.send(b"0\r\n\r\n")
    assert (await client.answer()).status == 200
    assert engine.served[0].body == text


async def test_more_header_lines_than_are_taken(rig: Rig) -> None:
    few = b"".join(b"x-%d: 1\r\n" % i for i in range(200))
    same = b"x: 1\r\n" * 200
    for lines in (few, same):
        answer = await rig.ask(GET.replace(b"\r\n\r\n", b"\r\n" + lines + b"\r\n"))
        assert_error(answer, 431, "headers_too_large")


async def test_a_read_of_many_requests_is_not_parsed_before_it_can_be_answered() -> None:
    gate = asyncio.Event()

    async def wait(served: Served) -> None:
        await gate.wait()
        await stream_three(served)

    async with a_rig(Limits(num_pipelined=4)) as rig:
        await rig.engine(wait)
        client = await rig.sent(chat() + GET * 3000)
        await rig.until(lambda: rig.num_in_flight == 1)
        connection = await rig.connection()
        await rig.until(lambda: connection._reads_paused)
        assert len(connection._waiting) < 500
        gate.set()
        assert {(await client.answer()).status for _ in range(3001)} == {200}


async def test_trailers_are_bounded_like_headers_and_a_connections_heads_each_on_their_own() -> None:
    async with a_rig(Limits(num_headers=3, header_bytes=300)) as rig:
        await rig.engine()
        client = await rig.client()
        for num, status in ((3, 200), (3, 200), (4, 431)):
            await client.send(CHUNKED % b"" + chunk(BODY) + b"0\r\n" + b"a: b\r\n" * num + b"\r\n")
            assert (await client.answer()).status == status
        client = await rig.client()
        for _ in range(20):
            await client.send(GET)
            assert (await client.answer()).status == 200


async def test_lines_before_a_request_are_part_of_its_head(rig: Rig) -> None:
    assert (await rig.ask(b"\r\n\r\n" + GET)).status == 200
    client = await rig.sent(b"\r\n" * 20_000)
    assert_error(await client.answer(), 431, "headers_too_large")
    refused = rig.port.context.metrics._refused.labels("431")._value
    assert refused.get() == 1


async def test_a_client_that_was_refused_is_left_when_it_has_had_time_to_read(rig: Rig) -> None:
    rig.port.context.limits = Limits(linger_s=0.02, write_buffer_bytes=1000)
    client = await rig.sent(b"\x00\r\n\r\n")
    connection = await rig.connection()
    assert connection.transport.get_write_buffer_limits()[1] == 1000
    assert (await client.answer()).status == 400 and await client.at_end()
    await rig.until(lambda: not rig.port.connections)
    assert connection.transport.is_closing()


async def test_who_leaves_with_requests_waiting_leaves_nothing_behind(rig: Rig) -> None:
    await rig.engine(hang)
    client = await rig.sent(chat() * 3 + chat()[:-5])
    await rig.until(lambda: rig.port.context.buffered_bytes == 4 * len(BODY) - 5)
    client.close()
    await rig.until(lambda: not rig.port.connections and not rig.table.exchanges)
    assert rig.port.context.buffered_bytes == 0


# -- heads ---------------------------------------------------------------------------------------------------------


async def test_an_absolute_target_is_served(rig: Rig) -> None:
    """RFC 9112, 3.2.2: its authority replaces Host."""
    engine = await rig.engine()
    for start in (b"POST http://a:80/v1/chat/completions?a=1 HTTP", b"POST HTTPS://a/v1/chat/completions?a=1 HTTP"):
        assert (await rig.ask(chat().replace(b"POST /v1/chat/completions HTTP", start))).status == 200
    assert (await rig.ask(b"GET http://t/v1/models HTTP/1.1\r\nhost: t\r\n\r\n")).status == 200
    assert (await rig.ask(b"GET http://t HTTP/1.1\r\nhost: t\r\n\r\n")).status == 200
    assert all(s.head.startswith(b"POST /v1/chat/completions?a=1 HTTP/1.1\r\n") for s in engine.served)


REFUSED_HEADS = {
    "two keys": chat(extra=b"authorization: Bearer k\r\nAuthorization: Bearer k\r\n"),
    "two hosts": chat(extra=b"host: t\r\n"),
    "two types": chat(extra=b"Content-Type: application/json\r\n"),
    "two lengths alike": chat(extra=b"content-length: %d\r\n" % len(BODY)),
    "two ids": chat(extra=b"x-request-id: a\r\nx-request-id: b\r\n"),
    "two codings": CHUNKED % b"transfer-encoding: chunked\r\n",
    "length after coding": CHUNKED.replace(b"\r\n\r\n", b"\r\ncontent-length: 3\r\n\r\n") % b"",
    "coding of HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") % b"",
    "no host": chat().replace(b"host: t\r\n", b""),
    "a host that is none": chat().replace(b"host: t", b"host: a/b@c"),
    "a user in the target": chat().replace(b"POST /", b"POST http://u@h/"),
    "a target of another kind": chat().replace(b"POST /", b"POST ftp://h/"),
    "a fragment": chat().replace(b"completions HTTP", b"completions#a HTTP"),
    "a folded line": chat(extra=b"x: a\r\n b\r\n"),
    "bare line feeds": chat().replace(b"\r\n", b"\n"),
    "a bare return": chat(extra=b"x: a\rb\r\n"),
    "a blank before the colon": chat(extra=b"x : a\r\n"),
    "a name that is none": chat(extra=b"x(y): a\r\n"),
    "a name of other bytes": chat(extra=b"x\x80: a\r\n"),
    "a zero byte": chat(extra=b"x: a\x00b\r\n"),
    "garbage": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "two lengths": b"POST /v1/models HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "length and chunks": b"POST /v1/models HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    "a negative length": b"POST /v1/models HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    "a bad size of a chunk": b"POST /v1/models HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
    "an upgrade": get("/health", extra=b"connection: upgrade\r\nupgrade: websocket\r\n"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version 0.9": GET.replace(b"1.1", b"0.9"),
    "version 2.0": GET.replace(b"1.1", b"2.0"),
    "codings that are not undone": (CHUNKED % b"").replace(b"chunked", b"gzip, chunked") + b"0\r\n\r\n",
}
STATUSES = {"version 0.9": 505, "version 2.0": 505, "codings that are not undone": 501}  # the others: 400


@pytest.mark.parametrize("what", REFUSED_HEADS)
async def test_what_is_not_http_1_1_or_two_readers_might_read_differently(what: str) -> None:
    async with a_rig(api_key="k") as rig:
        engine = await rig.engine()
        client = await rig.sent(REFUSED_HEADS[what])
        assert_error(await client.answer(), STATUSES.get(what, 400), "bad_request")
        assert await client.at_end() and engine.served == []


async def test_a_refused_request_keeps_its_id_and_one_without_a_head_has_its_own(rig: Rig) -> None:
    for refused in (chat(extra=b"x-request-id: mine\r\nexpect: miracles\r\n"), b"\x00", b"\x00"):
        answer = await rig.ask(refused)
        assert (answer.headers["x-request-id"] == "mine") is (answer.status == 417)
    assert len({row["request_id"] for row in rig.reports.rows(10)}) == 3


async def test_lists_over_several_lines_and_headers_of_this_hop(rig: Rig) -> None:
    engine = await rig.engine()
    await rig.ask(chat(extra=b"x-list: a\r\nX-List: b\r\nx-hop: 1\r\nconnection: keep-alive, X-Hop\r\n"))
    assert engine.served[0].header("x-list") == "a, b" and engine.served[0].header("x-hop") is None


# -- half-closed ---------------------------------------------------------------------------------------------------


async def wait_a_little(served: Served) -> None:
    await asyncio.sleep(0.05)
    if b'"stream": true' in served.body:
        await stream_three(served)
    else:
        await served.json({"ok": 1})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_a_half_closed_client_gets_its_answer(rig: Rig, stream: bool, version: bytes) -> None:
    await rig.engine(wait_a_little)
    client = await rig.sent(chat(stream=stream).replace(b"HTTP/1.1", version))
    client.half_close()
    answer = await client.answer()
    assert await client.at_end()
    assert [e.status for e in rig.endings] == [200]
    assert answer.complete and answer.body == (TOKEN * 3 + DONE if stream else b'{"ok": 1}')


async def test_all_that_came_before_the_half_close_is_answered_in_order(rig: Rig) -> None:
    await rig.engine(wait_a_little)
    client = await rig.sent(chat() + GET + chat("nobody") + chat(stream=True) + b"POST /v1/chat/comp")
    client.half_close()
    answers = [await client.answer() for _ in range(5)]
    assert await client.at_end()
    assert [a.status for a in answers] == [200, 200, 404, 200, 400]
    assert b"ended before it was complete" in answers[4].body


async def test_a_held_request_of_a_half_closed_client_is_answered_once_there_is_an_engine() -> None:
    for limits in (Limits(), Limits(keepalive_after_s=0.0)):
        async with a_rig(limits) as rig:
            client = await rig.held(chat(stream=True))
            if not limits.keepalive_after_s:
                await rig.until(lambda: rig.exchange.framing is not None)
            client.half_close()
            await asyncio.sleep(0.02)
            await rig.engine()
            answer = await client.answer()
            assert answer.status == 200 and answer.body.endswith(TOKEN * 3 + DONE)


# -- order ---------------------------------------------------------------------------------------------------------

Case = tuple[bytes, int]
LAST: dict[str, Case] = {
    "garbage": (b"\x00\x01garbage\r\n\r\n", 400),
    "a body that is too large": (chat().replace(b"length: ", b"length: 99999999"), 413),
    "a body that grows too large": (CHUNKED % b"" + chunk(b"x" * 3000), 413),
    "headers that are too large": (GET.replace(b"host: t", b"host: t\r\nx: " + b"a" * 40_000), 431),
    "an expectation nobody knows": (chat(extra=b"expect: miracles\r\n"), 417),
    "two keys": (REFUSED_HEADS["two keys"], 400),
    "an upgrade": (GET.replace(b"host: t", b"host: t\r\nconnection: upgrade\r\nupgrade: h2c"), 400),
}


@pytest.mark.parametrize("what", LAST)
async def test_a_refusal_is_told_after_the_answers_to_what_came_before(what: str) -> None:
    last, status = LAST[what]
    async with a_rig(Limits(max_body_bytes=2000)) as rig:
        await rig.engine(wait_a_little)
        for before in ((chat(), GET, chat("nobody"), chat(stream=True)), (GET, GET), (chat(stream=True),)):
            client = await rig.sent(b"".join(before) + last + GET)
            answers = [await client.answer() for _ in range(len(before) + 1)]
            assert [a.status for a in answers] == [404 if b"nobody" in b else 200 for b in before] + [status]
            assert all(a.complete for a in answers) and answers[-1].headers["connection"] == "close"
            assert await client.at_end()


async def test_a_request_that_takes_too_long_behind_others_is_told_last() -> None:
    async with a_rig(Limits(header_s=0.05)) as rig:
        await rig.engine(answering({"ok": 1}, after_s=0.3))
        client = await rig.sent(chat() + GET + GET[:20])
        assert [(await client.answer()).status for _ in range(3)] == [200, 200, 408]


async def test_nobody_is_late_while_reads_are_paused() -> None:
    async with a_rig(Limits(num_pipelined=2, header_s=0.05)) as rig:
        await rig.engine(answering({"ok": 1}, after_s=0.3))
        client = await rig.client()
        half = len(GET) // 2
        await client.send(chat() + GET * 5 + GET[:half])
        await asyncio.sleep(0.15)
        await client.send(GET[half:])
        assert [(await client.answer()).status for _ in range(7)] == [200] * 7


async def test_an_expectation_behind_another_request_is_met_when_its_turn_comes(rig: Rig) -> None:
    await rig.engine(wait_a_little)
    client = await rig.client()
    head, _, body = chat(extra=b"expect: 100-continue\r\n").partition(b"\r\n\r\n")
    await client.send(chat() + head + b"\r\n\r\n")
    assert [(await client.answer()).status for _ in range(2)] == [200, 100]
    await client.send(body)
    assert (await client.answer()).status == 200


async def test_a_router_that_leaves_answers_and_closes_without_tearing() -> None:
    async with a_rig(models=(a_model(on_cold=OnCold.REFUSE),)) as rig:
        rig.table.stage = PortStage.LEAVING
        client = await rig.sent(chat() + b"x" * 100_000)
        answer = await client.answer()
        assert answer.status == 503 and answer.complete and answer.headers["connection"] == "close"
        assert await client.at_end()


async def test_a_client_that_reads_no_answers_gets_no_more_of_them() -> None:
    async with a_rig(Limits(write_buffer_bytes=65_536)) as rig:
        client = await rig.client()
        connection = await rig.connection()
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        sending = asyncio.create_task(client.send(GET * 5000))
        await rig.until(lambda: connection.write_paused and connection._reads_paused)
        assert connection.transport.get_write_buffer_size() < 100_000 and len(connection._waiting) < 500
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert {(await client.answer()).status for _ in range(5000)} == {200}
        await sending


async def test_a_client_with_many_requests_leaves_turns_to_others() -> None:
    """At most as many are answered at once as may wait."""
    async with a_rig(Limits(num_pipelined=10)) as rig:
        client = await rig.client()
        connection = await rig.connection()
        connection.data_received(GET * 300)
        assert connection._reads_paused and len(connection._waiting) == 290
        assert {(await client.answer()).status for _ in range(300)} == {200}
        assert connection.is_idle and not connection._reads_paused


# -- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "state", "limit_s", "status"),
    [
        (b"GET /health HT", HEAD, LIMITS.header_s, 408),
        (chat()[:-5], IN_BODY, LIMITS.body_s, 408),
        (GET, IDLE, LIMITS.client_idle_s, 0),
    ],
)
async def test_each_wait_for_a_client_is_bounded(
    rig: Rig, sent: bytes, state: int, limit_s: float, status: int
) -> None:
    client = await rig.sent(sent)
    connection = await rig.connection()
    if sent == GET:
        assert (await client.answer()).status == 200
    await rig.until(lambda: connection.state == state and connection.exchange is None)
    connection.since = 100.0  # sums of whole numbers are exact
    for by_s in (0.0, 100.0):
        connection.postpone(by_s)
        connection.sweep(connection.since + limit_s)
        assert connection.state == state and not connection._closing
    connection._reads_paused = True
    connection.sweep(connection.since + limit_s + 0.01)
    assert connection.state == state, "the rest may have arrived"
    connection._reads_paused = False
    connection.sweep(connection.since + limit_s + 0.01)
    if status:
        assert (await client.answer()).status == status
    assert await client.at_end()


async def test_a_client_that_reads_nothing_for_long_is_dropped(rig: Rig) -> None:
    await rig.sent(GET)
    connection = await rig.connection()
    connection.write_paused, connection.write_paused_at = True, 100.0
    connection.postpone(5.0)
    connection.sweep(105.0 + LIMITS.stall_s)
    assert not connection.transport.is_closing()
    connection.sweep(105.01 + LIMITS.stall_s)
    assert connection.transport.is_closing()
    await rig.until(lambda: not rig.port.connections)


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="only Linux tells of a reset without reading")
async def test_a_held_client_with_nothing_more_to_send_is_not_idle_and_its_reset_is_noticed(rig: Rig) -> None:
    client = await rig.held(chat())
    connection = await rig.connection()
    connection.sweep(connection.since + LIMITS.client_idle_s + 1.0)
    client.half_close()
    await rig.until(lambda: connection._all_sent)
    connection.sweep(connection.since)
    assert rig.num_held == 1 and not connection.transport.is_closing()
    reset = struct.pack("ii", 1, 0)
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    client.close()
    await rig.until(connection._is_reset)
    connection.sweep(connection.since)
    await rig.until(lambda: bool(rig.endings))
    assert rig.endings[0].status == 499


# -- bodies --------------------------------------------------------------------------------------------------------


async def test_bodies_may_be_as_large_as_their_bounds() -> None:
    for limits, status in (
        (Limits(max_body_bytes=len(BODY)), 200),
        (Limits(max_body_bytes=len(BODY) - 1), 413),
        (Limits(buffered_bytes=len(BODY)), 200),
        (Limits(buffered_bytes=len(BODY) - 1), 503),
    ):
        async with a_rig(limits) as rig:
            await rig.engine()
            assert (await rig.ask(chat())).status == status
            assert (await rig.ask(CHUNKED % b"" + chunk(BODY[:9]) + chunk(BODY[9:]) + b"0\r\n\r\n")).status == status


EXPECTS = b"expect: 100-Continue\r\n"


@pytest.mark.parametrize(
    ("head", "is_told"),
    [
        (CHUNKED % EXPECTS, True),
        (chat(extra=EXPECTS)[: -len(BODY)], True),
        (chat(body=b"", extra=EXPECTS), False),
        (chat(extra=EXPECTS)[: -len(BODY)].replace(b"1.1", b"1.0"), False),
        (get("/health", extra=EXPECTS), False),
    ],
)
async def test_who_waits_with_a_body_is_told_to_send_it_once(rig: Rig, head: bytes, is_told: bool) -> None:
    engine = await rig.engine()
    client = await rig.sent(head)
    if is_told:
        assert (await client.answer()).status == 100
    else:
        await rig.until(lambda: all(c.state != HEAD for c in rig.port.connections))
    body = chunk(BODY) + b"0\r\n\r\n" if b"chunked" in head else BODY if b"length: %d" % len(BODY) in head else b""
    await client.send(body)
    assert (await client.answer()).status == (400 if b"length: 0" in head else 200)
    assert all(one.body == BODY for one in engine.served)


async def test_who_sends_the_body_at_once_is_told_nothing(rig: Rig) -> None:
    await rig.engine(wait_a_little)
    client = await rig.sent(chat() + chat(extra=EXPECTS))
    assert [(await client.answer()).status for _ in range(2)] == [200, 200]
    await client.send(chat() + chat(extra=EXPECTS)[:-5])
    assert (await client.answer()).status == 200
    await client.send(chat()[-5:])
    assert (await client.answer()).status == 200


FILE = b"POST /v1/files HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n"


async def test_a_file_goes_to_its_upload_which_is_let_go_with_its_client(rig: Rig, tmp_path: Path) -> None:
    uploads, begun = Uploads(tmp_path, 1000), list[tuple[Upload, int | None]]()

    def begin(request: HttpRequest, length: int | None) -> Upload:
        begun.append((uploads.begin(length), length))
        return begun[-1][0]

    rig.port.context.begin_upload = begin
    client = await rig.sent(FILE + b"x" * 40)
    connection = await rig.connection()
    await rig.until(lambda: bool(begun) and begun[0][0].num_bytes == 40)
    upload, length = begun[0]
    assert length == 100 and rig.port.context.buffered_bytes == 0 and not connection._body
    connection.since -= 5.0
    slow = connection.since
    upload.pause(True)
    assert connection._reads_paused and connection.since > slow and not connection.transport.is_reading()
    upload.pause(False)
    assert not connection._reads_paused and connection.transport.is_reading()
    client.close()
    await rig.until(lambda: not uploads._num)
    client = await rig.sent(FILE.replace(b"content-length: 100", b"transfer-encoding: chunked") + chunk(b"x" * 2000))
    await rig.until(lambda: len(begun) == 2)
    assert begun[1][1] is None
    client.close()
    client = await rig.sent(chat() + FILE + b"x" * 100)
    await rig.until(lambda: len(begun) == 3 and begun[2][0].num_bytes == 100)
    client.close()
    await rig.until(lambda: not uploads._num)
    assert (await rig.ask(get("/v1/files"))).status == 501 and len(begun) == 3


async def test_a_file_has_its_time_for_each_slice(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glowplug.services.router.client.UPLOAD_SLICE", 10)
    uploads = Uploads(tmp_path, 1000)
    rig.port.context.begin_upload = lambda request, length: uploads.begin(length)
    client = await rig.sent(FILE)
    connection = await rig.connection()
    await rig.until(lambda: connection._upload is not None)
    for size, is_in_time in ((9, False), (1, True), (5, False), (4, False), (11, True)):
        connection.since -= 5.0
        before, due = connection.since, connection._body_bytes + size
        await client.send(b"x" * size)
        await rig.until(lambda due=due: connection._body_bytes == due)  # type: ignore[misc]
        assert (connection.since > before) is is_in_time, (due, size)
    connection.sweep(connection.since + LIMITS.body_s + 0.01)
    assert (await client.answer()).status == 408
    await rig.until(lambda: not uploads._num)
