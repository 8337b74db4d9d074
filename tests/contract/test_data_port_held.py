"""Cold models: requests held, released in order or refused with reasons."""

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.controllers.router.messages import Hold
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import OnCold
from glowplug.events import facts
from glowplug.services.router.settings import Limits
from tests.contract.data_port_rig import (
    DONE,
    TOKEN,
    Client,
    Rig,
    Served,
    a_model,
    a_rig,
    an_instance,
    answering,
    chat,
    data_events,
    die_at_once,
)
from tests.fleet_builder import an_event

QUICK = Limits(keepalive_after_s=0.02, keepalive_every_s=0.02)


async def test_a_cold_request_is_held_and_answered_when_ready(rig: Rig) -> None:
    client = await rig.held(chat(stream=True))
    waiting = [e.payload for e in rig.published if e.payload.TYPE == "request.waiting"]
    assert [w.num_waiting for w in waiting] == [1]
    await rig.engine()
    answer = await client.answer()
    assert answer.status == 200 and answer.body == TOKEN * 3 + DONE


async def test_a_held_stream_is_kept_alive_by_comments() -> None:
    async with a_rig(QUICK) as rig:
        client = await rig.sent(chat(stream=True))
        status, headers = await client.head()
        comments = [await client.chunk(), await client.chunk()]
        assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
        assert all(c.startswith(b": glowplug waiting model=m eta_s=") and c.endswith(b"\n\n") for c in comments)
        await rig.engine()
        body = await client.rest()
    events = [e for e in body.split(b"\n\n") if e and not e.startswith(b":")]
    assert b"\n\n".join(events) + b"\n\n" == TOKEN * 3 + DONE
    assert b": glowplug ready queue;dur=" in body


async def test_an_old_client_is_held_by_comments_without_chunks_and_then_closed() -> None:
    async with a_rig(QUICK) as rig:
        client = await rig.sent(chat(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers = await client.head()
        assert (status, headers["connection"]) == (200, "close") and "transfer-encoding" not in headers
        for _ in range(2):
            assert (await client.reader.readuntil(b"\n\n")).startswith(b": glowplug waiting model=m eta_s=")
        await rig.engine()
        assert (await client.reader.read()).endswith(b"\n\n" + TOKEN * 3 + DONE)


async def test_comments_wait_for_a_client_that_does_not_read() -> None:
    async with a_rig(Limits(keepalive_after_s=100.0, keepalive_every_s=0.01)) as rig:
        client = await rig.held(chat(stream=True))
        exchange, connection = rig.exchange, await rig.connection()
        connection.write_paused = True
        exchange.timer.cancel()
        exchange._keep_client()
        for _ in range(3):
            timer = exchange.timer
            await rig.until(lambda timer=timer: exchange.timer is not timer)  # type: ignore[misc]
        assert exchange.framing is None
        connection.write_paused = False
        await client.head()
        timer = exchange.timer
        exchange.hold(Hold(exchange.ticket, 1.0))
        assert exchange.way.held and exchange.way.eta_s != 1.0 and exchange.timer is timer is not None
        await rig.engine()
        assert timer.cancelled() or exchange.timer is not timer
        await client.rest()
        assert exchange.timer is None


async def test_the_first_comment_is_due_so_long_after_the_request_was_complete_and_at_once_where_that_is_over() -> None:
    async with a_rig(Limits(keepalive_after_s=100.0)) as rig:
        await rig.held(chat(stream=True))
        exchange, context, delays = rig.exchange, rig.port.context, list[float]()
        loop: Any = SimpleNamespace(call_later=lambda delay_s, call: delays.append(delay_s))
        kept, context.loop = context.loop, loop
        exchange.timer.cancel()
        exchange.timer = None
        for passed_s, least_s, most_s in ((0.0, 50.0, 100.0), (90.0, 0.5, 10.0), (100.0, 0.0, 0.0)):
            exchange.request.complete -= passed_s
            exchange.hold(Hold(exchange.ticket, 1.0))
            assert least_s <= delays[-1] <= most_s
        context.loop = kept


async def test_a_whole_answer_behind_the_head_of_a_stream_is_an_error() -> None:
    async with a_rig(QUICK) as rig:
        client = await rig.sent(chat(stream=True))
        await client.head()
        await rig.engine(answering({"choices": []}))
        (event,) = data_events(await client.rest())
        assert json.loads(event[6:])["error"]["message"] and await client.at_end()
        assert rig.endings[0].status >= 500


async def test_a_request_that_waited_for_a_start_stays_cold_wherever_it_is_answered(rig: Rig) -> None:
    client = await rig.held(chat(stream=True))
    await rig.engine(die_at_once)
    await rig.until(lambda: bool(rig.engines[0].served) and rig.num_held == 1)
    await rig.engine(instance_id="i-2")
    assert (await client.answer()).status == 200
    assert rig.finished[0].cold and rig.port.context.metrics.retries._value.get() == 1


async def test_a_held_request_that_is_no_stream_gets_nothing_early() -> None:
    async with a_rig(QUICK) as rig:
        client = await rig.held(chat())
        await asyncio.sleep(0.08)
        await rig.engine()
        assert (await client.answer()).body == TOKEN * 3 + DONE


async def test_a_timeout_after_the_head_is_one_error_event_and_a_close() -> None:
    async with a_rig(QUICK, models=(a_model(max_wait_s=0.06),)) as rig:
        client = await rig.sent(chat(stream=True))
        await client.head()
        await asyncio.sleep(0.08)
        rig.tick()
        body = await client.rest()
        assert await client.at_end()
    (event,) = data_events(body)
    assert json.loads(event[6:])["error"]["code"] == "wait_timeout"
    assert b"[DONE]" not in body


async def test_a_timeout_before_the_head_is_503_with_retry_after() -> None:
    async with a_rig(models=(a_model(max_wait_s=0.01),)) as rig:
        client = await rig.held(chat())
        await asyncio.sleep(0.02)
        rig.tick()
        answer = await client.answer()
    assert (answer.status, answer.code) == (503, "wait_timeout")
    assert int(answer.headers["retry-after"]) >= 1


async def test_an_engine_error_after_the_head_becomes_an_error_event() -> None:
    async with a_rig(QUICK) as rig:
        client = await rig.sent(chat(stream=True))
        await client.head()
        await rig.engine(answering({"error": {"message": "too long", "code": "context"}}, "400 Bad Request"))
        body = await client.rest()
        assert await client.at_end()
    assert [json.loads(e[6:])["error"]["code"] for e in data_events(body)] == ["context"]


async def test_a_full_queue_is_429_with_retry_after() -> None:
    async with a_rig(models=(a_model(max_queue=2),)) as rig:
        for _ in range(2):
            await rig.held(chat())
        answer = await rig.ask(chat())
    assert (answer.status, answer.code) == (429, "queue_full") and "server-timing" not in answer.headers
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_model_that_refuses_to_hold_is_503_and_wakes_nobody() -> None:
    async with a_rig(models=(a_model(on_cold=OnCold.REFUSE),)) as rig:
        answer = await rig.ask(chat())
        assert not [e for e in rig.published if e.payload.TYPE == "request.waiting"]
    assert (answer.status, answer.code) == (503, "model_cold") and "retry-after" in answer.headers


async def test_bad_weights_answer_everyone_who_waits(rig: Rig) -> None:
    client = await rig.held(chat())
    failed = an_instance("i-9", "", InstanceState.FAILED, reason="weights_corrupt: sha256 is not the one given")
    rig.tell(failed, code="weights_corrupt")
    answer = await client.answer()
    again = await rig.ask(chat())
    assert (answer.status, answer.code) == (503, "weights_corrupt") and "sha256" in answer.json()["error"]["message"]
    assert (again.status, again.code) == (503, "weights_corrupt") and "retry-after" in again.headers


async def test_a_client_that_leaves_the_queue_is_forgotten(rig: Rig) -> None:
    client = await rig.held(chat())
    client.close()
    await rig.until(lambda: rig.num_held == 0)
    engine = await rig.engine()
    assert rig.endings[0].status == 499
    await rig.ask(chat())
    assert len(engine.served) == 1


async def test_held_requests_are_released_in_order_within_max_concurrency(rig: Rig) -> None:
    gate = asyncio.Event()
    most = 0

    async def slow(served: Served) -> None:
        nonlocal most
        most = max(most, rig.num_in_flight)
        await gate.wait()
        await served.json({})

    clients = [await rig.held(chat(extra=b"x-request-id: %d\r\n" % i)) for i in range(9)]
    engine = await rig.engine(slow, max_concurrency=3)
    await rig.until(lambda: len(engine.served) == 3)
    assert rig.num_in_flight == 3 and rig.num_held == 6
    gate.set()
    answers = await asyncio.gather(*(c.answer() for c in clients))
    assert [a.status for a in answers] == [200] * 9
    order = [int(s.header("x-request-id") or -1) for s in engine.served]
    assert sorted(order[:3]) == [0, 1, 2] and sorted(order) == list(range(9)) and most <= 3


async def test_hundreds_of_waiters_are_one_load() -> None:
    async with a_rig(models=(a_model(max_queue=600),)) as rig:
        began = time.monotonic()
        clients = [await rig.sent(chat(stream=True)) for _ in range(300)]
        await rig.until(lambda: rig.num_held == 300)
        waiting = [e for e in rig.published if e.payload.TYPE == "request.waiting"]
        num_periods = (time.monotonic() - began) / rig.table.controller.params.waiting_every_s
        assert 1 <= len(waiting) <= 1 + num_periods
        engine = await rig.engine(max_concurrency=16)
        answers = await asyncio.gather(*(c.answer() for c in clients))
        assert {(a.status, a.complete) for a in answers} == {(200, True)}
        assert engine.num_connections <= 16


async def test_undeploying_a_model_answers_its_waiters(rig: Rig) -> None:
    client = await rig.held(chat())
    gone = an_event(facts.ModelUndeployed(model_key="m"))
    rig.table.do(rig.table.controller.handle(gone, rig.table.clock()))
    answer = await client.answer()
    assert (answer.status, answer.code) == (404, "model_not_found")


async def test_bodies_of_held_requests_count_against_what_the_process_may_hold() -> None:
    big = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"x" * 600)
    async with a_rig(Limits(buffered_bytes=1000)) as rig:
        client = await rig.held(chat(body=big))
        refused = await rig.ask(chat(body=big))
        assert (refused.status, refused.code) == (503, "overloaded")
        client.close()
        await rig.until(lambda: rig.port.context.buffered_bytes == 0)
        await rig.engine()
        assert (await rig.ask(chat(body=big))).status == 200


NARROW = a_model(max_concurrency=2, max_wait_s=10.0)  # cold: 5 s for a start, then two at once


def answers_take(rig: Rig, seconds: float) -> None:
    for _ in range(100):
        rig.table.controller.estimates.learn_service("m", seconds)


async def hold(rig: Rig, num: int, *, stream: bool = False) -> list[Client]:
    return [await rig.held(chat(stream=stream)) for _ in range(num)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wait_that_cannot_end_in_time_is_429_at_once(stream: bool) -> None:
    async with a_rig(QUICK, models=(NARROW,)) as rig:
        answers_take(rig, 4.0)
        await hold(rig, 4)
        answer = await rig.ask(chat(stream=stream))
        assert (answer.status, answer.code) == (429, "wait_too_long")
        assert answer.headers["content-type"] == "application/json" and answer.headers["retry-after"] == "13"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert (await rig.ask(chat(stream=stream))).headers["retry-after"] == "17", "after the one refused before"


async def test_a_held_stream_is_refused_before_its_first_byte_when_answers_come_to_take_longer() -> None:
    async with a_rig(Limits(keepalive_after_s=0.1), models=(NARROW,)) as rig:
        answers_take(rig, 1.0)
        first, _, last = await hold(rig, 3, stream=True)
        answers_take(rig, 100.0)
        answer = await last.answer()
        assert (answer.status, answer.code) == (429, "wait_too_long") and int(answer.headers["retry-after"]) > 1
        assert (await first.head())[0] == 200
        again = await rig.ask(chat(stream=True))
        assert again.status == 429, "the connection of a refused stream does not matter to the next"


async def test_a_held_request_is_refused_as_soon_as_it_is_known_that_it_cannot_be_sent_on_in_time() -> None:
    async with a_rig(QUICK, models=(NARROW,)) as rig:
        answers_take(rig, 1.0)
        *_, stream = await hold(rig, 2, stream=True)
        await stream.head()
        *_, plain = await hold(rig, 2)
        answers_take(rig, 100.0)
        rig.tick()
        answer = await plain.answer()
        assert (answer.status, answer.code) == (429, "wait_too_long")
        assert rig.num_held == 2, "a stream that has its 200 waits on"
