"""Why a stream moves, and its wait for an instance."""

import asyncio
import json
from typing import Any

import pytest

from glowplug.controllers.router.messages import Recall
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import OnCold
from glowplug.engines.apis import CHAT
from glowplug.events.facts import RequestWaiting
from glowplug.services.router.settings import Limits
from tests.contract.continuation_rig import Story, a_real_model, as_first, asking, decoded, rig_of, sse
from tests.contract.data_port_rig import (
    DONE,
    Client,
    FakeEngine,
    Rig,
    Served,
    a_rig,
    an_instance,
    answering,
    die_at_once,
    streaming,
)
from tests.waiting import WAIT_S

TOLD = Story("1").events(CHAT, {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6})
ABORTED = sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]})
FAILED = sse({"error": {"message": "EngineCore has died", "type": "InternalServerError", "code": 500}})
TOO_LONG = sse({"error": {"message": "the prompt is too long", "type": "BadRequestError", "code": 400}})
SAYS_ABORT = sse({"choices": [{"index": 0, "delta": {"content": "abort"}, "finish_reason": None}]})


def outcomes(rig: Rig) -> dict[tuple[str, str], float]:
    (family,) = rig.port.context.metrics._continuations.collect()
    return {(s.labels["reason"], s.labels["outcome"]): s.value for s in family.samples if s.name.endswith("_total")}


async def hanging(rig: Rig, instance_id: str = "i-1", **over: Any) -> tuple[FakeEngine, Client]:
    """Silent after two words, which its client has read."""
    engine = await rig.engine(streaming(*TOLD[:3], then="hang"), instance_id=instance_id, **over)
    client = await rig.sent(asking(CHAT))
    await client.head()
    for told in TOLD[:3]:
        assert await client.chunk() == told
    return engine, client


async def rest(client: Client) -> list[Any]:
    return decoded(await client.rest())


def rest_of(answer: list[Any]) -> list[Any]:
    return answer[3:]


@pytest.mark.parametrize("failure", [FAILED, ABORTED, TOLD[3] + FAILED, b": busy\n\n" + FAILED + DONE])
async def test_an_engine_that_says_that_it_failed_is_lost(failure: bytes) -> None:
    """vLLM ends its streams so when its engine process dies, and with "abort" when it is put to sleep."""
    async with a_rig(models=(a_real_model(),)) as rig:
        await rig_of(rig, streaming(*TOLD[:3], failure), Story("2"))
        answer = await rig.ask(asking(CHAT))
        assert outcomes(rig) == {("engine_error", "continued"): 1.0}
        assert not rig.table.controller.balances.quarantined, "it may be about that stream alone"
    assert answer.complete and decoded(answer.body) == decoded(as_first(CHAT))


@pytest.mark.parametrize("event", [TOO_LONG, SAYS_ABORT])
async def test_what_only_reads_like_a_failure_is_passed_on(event: bytes) -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        _, other = await rig_of(rig, streaming(*TOLD[:3], event, DONE), Story("2"))
        answer = await rig.ask(asking(CHAT))
    assert answer.body == b"".join(TOLD[:3]) + event + DONE and not other.served


async def test_a_stream_whose_engine_was_put_to_sleep_goes_on() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        engine, client = await hanging(rig)
        await rig.engine(Story("2"), instance_id="i-2")
        rig.tell(an_instance("i-1", engine.url, InstanceState.DRAINING, revision=2))
        rig.tell(an_instance("i-1", "", InstanceState.SWAPPED_OUT, revision=3, reason="asleep in host memory"))
        assert await rest(client) == rest_of(decoded(as_first(CHAT)))
        await asyncio.wait_for(engine.served[0].left.wait(), WAIT_S)
        assert outcomes(rig) == {("instance_ended", "continued"): 1.0}


def _recall(rig: Any, ticket: int) -> None:
    rig.table.controller.requests[ticket].gives_way = True
    rig.table.do([Recall(ticket, "it gives way", gives_way=True)])


async def test_a_stream_that_gives_way_leaves_a_well_engine_and_goes_on_there() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        engine, client = await hanging(rig)
        first, engine.reply = engine.served[0], Story("2")
        _recall(rig, next(iter(rig.table.exchanges)))
        assert await rest(client) == rest_of(decoded(as_first(CHAT)))
        await asyncio.wait_for(first.left.wait(), WAIT_S)
        assert outcomes(rig) == {("gave_way", "continued"): 1.0} and not rig.table.controller.balances.quarantined
        assert rig.endings[0].status == 200


async def test_what_cannot_go_on_stays_where_it_was_to_give_way_and_what_has_not_begun_is_sent_again() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        engine, client = await hanging(rig, max_concurrency=8)
        client.close()
        await rig.until(lambda: not rig.table.exchanges)
        several = await rig.sent(asking(CHAT, n=2))
        await several.head()
        (ticket,) = rig.table.exchanges
        _recall(rig, ticket)
        assert not rig.table.controller.requests[ticket].gives_way and not engine.served[1].left.is_set()
        engine.reply = lambda served: served.left.wait()  # type: ignore[assignment, return-value]
        silent = await rig.sent(asking(CHAT))
        await rig.until(lambda: len(engine.served) == 3)
        _recall(rig, ticket + 1)
        await rig.until(lambda: len(engine.served) == 4)
        await asyncio.wait_for(engine.served[2].left.wait(), WAIT_S)
        for one in (several, silent):
            one.close()


async def test_an_engine_put_to_sleep_behind_the_end_of_a_stream_spoils_nothing() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        engine = await rig.engine(streaming(*TOLD, then="hang"))
        client = await rig.sent(asking(CHAT))
        await client.head()
        for told in TOLD:
            assert await client.chunk() == told
        rig.tell(an_instance("i-1", "", InstanceState.SWAPPED_OUT, revision=3, reason="asleep in host memory"))
        assert await client.chunk() == b"" and len(engine.served) == 1
        assert (rig.endings[0].status, rig.finished[0].num_continued) == (200, 0)


async def test_a_node_that_left_is_not_waited_for() -> None:
    """Its connection stays open; another engine takes over after its silence."""
    async with a_rig(Limits(deserted_silence_s=0.05, header_s=0.2), models=(a_real_model(),)) as rig:
        engine, client = await hanging(rig)
        await rig.engine(Story("2"), instance_id="i-2")
        rig.tell(
            an_instance("i-1", engine.url, InstanceState.FAILED, revision=9, reason="its node has left"), "node_left"
        )
        assert await rest(client) == rest_of(decoded(as_first(CHAT)))


async def test_streams_are_moved_off_an_address() -> None:
    """Requests that cannot continue elsewhere, or have not begun, stay."""
    async with a_rig(models=(a_real_model(),)) as rig:
        engine, client = await hanging(rig, max_concurrency=8)
        several = await rig.sent(asking(CHAT, n=2))
        await several.head()
        await rig.until(lambda: len(engine.served) == 2)
        engine.reply = lambda served: served.left.wait()  # type: ignore[assignment, return-value]
        silent = await rig.sent(asking(CHAT))
        await rig.until(lambda: len(engine.served) == 3)
        await rig.engine(Story("2"), instance_id="i-2")
        rig.tell(an_instance("i-1", "http://127.0.0.1:9", InstanceState.DRAINING, revision=2))
        assert await rest(client) == rest_of(decoded(as_first(CHAT)))
        await asyncio.wait_for(engine.served[0].left.wait(), WAIT_S)
        assert not engine.served[1].left.is_set() and not engine.served[2].left.is_set()
        assert outcomes(rig) == {("moved", "continued"): 1.0, ("moved", "refused"): 1.0}
        for one in (several, silent):
            one.close()


async def test_what_cannot_leave_an_address_ends_there_or_says_why_it_is_cut() -> None:
    """The pipeline is whole in another process, which gets new requests."""
    for is_cut in (False, True):
        go_on = asyncio.Event()
        reply = streaming(*TOLD[:3], go_on, then="die") if is_cut else streaming(*TOLD[:3], go_on, *TOLD[3:])
        async with a_rig(models=(a_real_model(),)) as rig:
            several = await rig.engine(reply)
            client = await rig.sent(asking(CHAT, n=2))
            await client.head()
            after = await FakeEngine(Story("2")).start()
            rig.engines.append(after)
            rig.tell(an_instance("i-1", after.url, revision=2, stages_busy=True))
            assert (await rig.ask(asking(CHAT))).complete and len(after.served) == 1 == len(several.served)
            go_on.set()
            answer = await rest(client)
            if not is_cut:
                assert answer[-1] == "[DONE]" and rig.endings[1].status == 200
            else:
                why = "and its instance answers at another address by now; the answer cannot be continued: several"
                assert why in answer[-1]["error"]["message"]


async def test_an_instance_that_moves_to_another_address_takes_its_streams_along() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        engine, client = await hanging(rig)
        after = await FakeEngine(Story("2")).start()
        rig.engines.append(after)
        rig.tell(an_instance("i-1", after.url, revision=2))
        assert await rest(client) == rest_of(decoded(as_first(CHAT)))
        await asyncio.wait_for(engine.served[0].left.wait(), WAIT_S)
        assert rig.finished[0].num_continued == 1 and rig.reported[0].instance_id == "i-1"


# -- while there is no instance ------------------------------------------------------------------------------------


async def broken(rig: Rig) -> Client:
    engine = await rig.engine(streaming(*TOLD[:3], then="die"))
    client = await rig.sent(asking(CHAT))
    await rig.until(lambda: rig.num_held == 1)
    rig.tell(an_instance("i-1", engine.url, InstanceState.FAILED, revision=2, reason="killed"))
    return client


async def test_a_stream_waits_for_a_start_before_those_that_came_later_and_is_counted_once() -> None:
    limits = Limits(keepalive_after_s=0.01, keepalive_every_s=0.01)
    async with a_rig(limits, models=(a_real_model(),)) as rig:
        client = await broken(rig)
        later = await rig.held(asking(CHAT))
        waiting = [effect.payload for effect in rig.published if isinstance(effect.payload, RequestWaiting)]
        assert waiting[0].num_waiting == 1 and waiting[0].deadline_at - waiting[0].waiting_since == 60.0
        load = rig.table.controller.load("m")
        assert (load.num_waiting, load.num_in_flight, load.num_arrived, load.num_dispatched) == (2, 0, 2, 1)
        await client.head()
        got = b""
        while got.count(b": glowplug waiting") < 2:
            got += await client.chunk()
        story = Story("2")
        await rig.engine(story, instance_id="i-2", max_concurrency=1)
        answer = got + await client.rest()
        assert decoded(answer) == decoded(as_first(CHAT))
        assert decoded((await later.answer()).body)[-1] == "[DONE]"
        assert [len(asked["messages"]) for asked in story.asked] == [2, 1], "the stream that broke comes first"
        assert rig.table.controller.load("m").num_dispatched == 2


async def test_no_instance_in_time_is_an_error() -> None:
    async with a_rig(models=(a_real_model(),), params={"continue_within_s": 0.05}) as rig:
        client = await broken(rig)
        await rig.held(asking(CHAT))
        await asyncio.sleep(0.06)
        rig.tick()
        told = decoded((await client.answer()).body)
        assert "go on with the stream within 0.05 s" in told[-1]["error"]["message"]
        assert (rig.endings[0].status, rig.num_held) == (502, 1), "who came later may wait longer"
        assert outcomes(rig) == {("engine_lost", "failed"): 1.0}


@pytest.mark.parametrize("model", [a_real_model(suspended=True), a_real_model(on_cold=OnCold.REFUSE)])
async def test_where_nothing_will_start_the_stream_ends_at_once(model: Any) -> None:
    async with a_rig(models=(model,)) as rig:
        go_on = asyncio.Event()
        engine = await rig.engine(streaming(*TOLD[:3], go_on, then="die"))
        client = await rig.sent(asking(CHAT))
        await client.head()
        rig.tell(an_instance("i-1", engine.url, InstanceState.DRAINING, revision=2))
        go_on.set()
        told = decoded(await client.rest())
        assert told[-1]["error"]["code"] == "engine_failed" and rig.num_held == 0


async def test_a_client_that_leaves_while_its_stream_waits_is_forgotten() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        client = await broken(rig)
        client.close()
        await rig.until(lambda: rig.num_held == 0)
        assert rig.endings[0].status == 499
        assert outcomes(rig) == {("engine_lost", "client_left"): 1.0}


async def test_a_router_that_stops_ends_a_stream_that_waits() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        client = await broken(rig)
        await rig.port.drain(0.01)
        assert "router_stopping" in json.dumps(decoded((await client.answer()).body)[-1])


BUSY = answering({"error": {"message": "too busy", "code": 503}}, "503 Service Unavailable")
REFUSED = answering({"error": {"message": "no such field", "code": 400}}, "400 Bad Request")


async def test_a_next_engine_that_cannot_now_is_passed_over_and_one_that_refuses_ends_the_stream() -> None:
    many, broken = (answering({"error": {}}, status) for status in ("429 Too Many Requests", "500 Error"))
    for second, third, status in (
        *((one, Story("3"), 200) for one in (BUSY, die_at_once, streaming(then="die"), many, broken)),
        (REFUSED, Story("3"), 502),
    ):
        async with a_rig(models=(a_real_model(),)) as rig:
            await rig_of(rig, Story("1", 3), second, third)
            answer = await rig.ask(asking(CHAT))
        assert answer.complete and rig.endings[0].status == status
        if status == 200:
            assert decoded(answer.body) == decoded(as_first(CHAT))
        else:
            assert "no such field" in decoded(answer.body)[-1]["error"]["message"]


async def test_a_client_that_does_not_read_holds_the_next_engine_back() -> None:
    """Backpressure pauses the next engine, and nothing is lost."""
    big = sse({"id": "id-1", "choices": [{"index": 0, "delta": {"content": "x" * 65_000}, "finish_reason": None}]})
    sent = 0

    async def flood(served: Served) -> None:
        nonlocal sent
        await served.sse_head()
        for _ in range(400):
            await served.chunk(big)
            sent += 1
        await served.chunk(DONE)
        await served.end()

    async with a_rig(models=(a_real_model(context_tokens=1_000_000),)) as rig:
        await rig_of(rig, streaming(*TOLD[:3], then="die"), flood)
        client = await rig.sent(asking(CHAT, max_tokens=1000))
        await client.head()
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.1)
        assert 0 < sent < 300 and rig.exchange.engine is not None and rig.exchange.engine.paused
        told = await rest(client)
        assert sum(len(one["choices"][0]["delta"].get("content") or "") for one in told[3:-1]) == 400 * 65_000
