"""Streams leave a draining instance in time."""

import asyncio
import time
from typing import Any

import pytest

from glowplug.domain.instance import InstanceState
from glowplug.engines.apis import CHAT, COMPLETIONS, MESSAGES
from glowplug.services.router.exchange_states import BETWEEN
from tests.contract.continuation_rig import Story, a_real_model, as_first, asked_of, asking, decoded
from tests.contract.data_port_rig import DONE, Client, FakeEngine, Reply, Rig, Served, a_rig, an_instance, answering
from tests.contract.test_data_port_moves import outcomes
from tests.waiting import WAIT_S

MOVES: dict[str, Any] = {"models": (a_real_model(),), "params": {"move_within_s": 10.0}}
BUSY = answering({"error": {"message": "too busy", "code": 503}}, "503 Service Unavailable")


class Telling:
    def __init__(self, path: str = CHAT, cut: int = 3, *, then_dies: bool = False, **more: Any) -> None:
        self.events = Story("1").events(path, asked_of(path, **more))
        self.cut, self.then_dies, self.then_hangs = cut, then_dies, False
        self.may_go_on, self.has_gone_on = asyncio.Event(), asyncio.Event()

    async def __call__(self, served: Served) -> None:
        await served.sse_head()
        for event in self.events[: self.cut]:
            await served.chunk(event)
        await self.may_go_on.wait()
        if self.then_dies:
            served.die()
            return
        for event in self.events[self.cut :]:
            await served.chunk(event)
        self.has_gone_on.set()
        if self.then_hangs:
            await served.left.wait()
        await served.end()


class Late:
    def __init__(self, reply: Reply) -> None:
        self.may, self._reply = asyncio.Event(), reply

    async def __call__(self, served: Served) -> None:
        await self.may.wait()
        await self._reply(served)


async def begun(rig: Rig, telling: Telling, path: str = CHAT, **more: Any) -> tuple[FakeEngine, Client]:
    engine = await rig.engine(telling)
    client = await rig.sent(asking(path, **more))
    await client.head()
    got = b""
    while len(got) < sum(map(len, telling.events[: telling.cut])):
        got += await client.chunk()
    assert got == b"".join(telling.events[: telling.cut])
    return engine, client


def drains(rig: Rig, engine: FakeEngine, left_s: float = 0.0, instance_id: str = "i-1", revision: int = 2) -> None:
    ends_at = time.time() + left_s
    state = InstanceState.DRAINING
    rig.tell(an_instance(instance_id, engine.url, state, revision=revision, drain_ends_at=ends_at))


async def rest(client: Client) -> list[Any]:
    return decoded(await client.rest())


async def asked_elsewhere(rig: Rig, telling: Telling, reply: Reply) -> tuple[Client, FakeEngine]:
    """As `begun`; then another engine, i-2, is asked, and returned."""
    engine, client = await begun(rig, telling)
    other = await rig.engine(reply, instance_id="i-2")
    drains(rig, engine)
    await rig.until(lambda: len(other.served) == 1)
    return client, other


def rest_of(telling: Telling, path: str = CHAT, **more: Any) -> list[Any]:
    return decoded(as_first(path, **more))[telling.cut :]


@pytest.mark.parametrize(("path", "cut"), [(CHAT, 1), (CHAT, 3), (CHAT, 7), (COMPLETIONS, 2), (MESSAGES, 4)])
async def test_the_other_instance_is_asked_first_and_the_first_one_left_once_it_has_begun(path: str, cut: int) -> None:
    async with a_rig(**MOVES) as rig:
        telling, other = Telling(path, cut), Late(Story("2"))
        engine, client = await begun(rig, telling, path)
        next_engine = await rig.engine(other, instance_id="i-2")
        drains(rig, engine)
        await rig.until(lambda: len(next_engine.served) == 1)
        assert not engine.served[0].left.is_set() and not outcomes(rig)
        assert rig.table.controller.in_flight == {"i-2": 1}
        other.may.set()
        assert await rest(client) == rest_of(telling, path)
        await asyncio.wait_for(engine.served[0].left.wait(), WAIT_S)
        assert outcomes(rig) == {("drained", "continued"): 1.0}
        assert rig.finished[0].num_continued == 1 and rig.reported[0].instance_id == "i-2"
        assert rig.reported[0].response_tokens == 6


async def test_what_the_first_one_gives_meanwhile_is_not_given_twice() -> None:
    async with a_rig(**MOVES) as rig:
        telling, other = Telling(), Late(Story("2"))
        client, _ = await asked_elsewhere(rig, telling, other)
        telling.events, telling.then_hangs = [*telling.events[:5], telling.events[5][:-9]], True
        telling.may_go_on.set()
        await telling.has_gone_on.wait()
        other.may.set()
        assert await rest(client) == rest_of(telling)


async def refusing(rig: Rig, how: str) -> None:
    if how == "late":
        await rig.engine(Late(Story("2")), instance_id="i-2")
    elif how == "busy":
        await rig.engine(BUSY, instance_id="i-2")
    elif how == "dies":
        await rig.engine(die, instance_id="i-2")
    else:
        rig.tell(an_instance("i-2", "http://127.0.0.1:9"))


async def die(served: Served) -> None:
    served.die()


@pytest.mark.parametrize("how", ["late", "busy", "dies", "unreachable"])
async def test_a_stream_that_the_other_one_does_not_take_stays(how: str) -> None:
    given = {**MOVES, "params": {"move_within_s": 0.05}}
    async with a_rig(**given) as rig:
        telling = Telling()
        engine, client = await begun(rig, telling)
        await refusing(rig, how)
        drains(rig, engine)
        await rig.until(lambda: bool(outcomes(rig)))
        assert outcomes(rig) == {("drained", "stayed"): 1.0} and rig.table.controller.in_flight == {"i-1": 1}
        assert ("i-2" in rig.table.controller.balances.quarantined) is (how == "unreachable")
        telling.may_go_on.set()
        assert await rest(client) == rest_of(telling)
        assert len(engine.served) == 1 and rig.finished[0].num_continued == 0
        assert rig.reported[0].instance_id == "i-1"


async def test_a_stream_stays_where_its_first_one_gives_more_than_is_held() -> None:
    async with a_rig(**MOVES) as rig:
        telling = Telling()
        client, other = await asked_elsewhere(rig, telling, Late(Story("2")))
        moving, held = rig.exchange.moving, telling.events[3:5]
        assert moving is not None
        moving._held_left = len(held[0])
        moving.hold(held[0], False)
        assert rig.exchange.moving is moving and not outcomes(rig)
        moving.hold(held[1], False)
        assert rig.exchange.moving is None and outcomes(rig) == {("drained", "stayed"): 1.0}
        assert moving.engine is None and moving._timer.cancelled()
        await asyncio.wait_for(other.served[0].left.wait(), WAIT_S)
        telling.cut = 5
        telling.may_go_on.set()
        assert await rest(client) == decoded(b"".join(telling.events[3:]))


async def test_a_kept_connection_that_the_other_one_has_closed_is_no_refusal() -> None:
    async with a_rig(**MOVES) as rig:
        telling = Telling()
        next_engine = await rig.engine(Story("2"), instance_id="i-2")
        assert (await rig.ask(asking(CHAT))).complete
        next_engine.reply = lambda served: replies.pop()(served)
        replies: list[Reply] = [Story("2"), die]
        rig.tell(an_instance("i-2", next_engine.url, InstanceState.DRAINING, revision=2))
        engine, client = await begun(rig, telling)
        rig.tell(an_instance("i-2", next_engine.url, revision=3))
        drains(rig, engine)
        assert await rest(client) == rest_of(telling)
        assert outcomes(rig) == {("drained", "continued"): 1.0} and next_engine.num_connections == 2


async def test_a_stream_that_ends_before_the_other_one_begins_has_ended() -> None:
    async with a_rig(**MOVES) as rig:
        telling = Telling()
        client, other = await asked_elsewhere(rig, telling, Late(Story("2")))
        telling.may_go_on.set()
        assert await rest(client) == rest_of(telling)
        await asyncio.wait_for(other.served[0].left.wait(), WAIT_S)
        assert rig.finished[0].num_continued == 0 and outcomes(rig) == {("drained", "stayed"): 1.0}


@pytest.mark.parametrize("is_asked", [True, False])
async def test_where_the_first_one_is_lost_meanwhile_the_other_one_goes_on(is_asked: bool) -> None:
    """Already asked, or its connection is still being made."""
    async with a_rig(**MOVES) as rig:
        telling, other = Telling(then_dies=True), Late(Story("2"))
        engine, client = await begun(rig, telling)
        next_engine = await rig.engine(other, instance_id="i-2")
        if is_asked:
            drains(rig, engine)
            await rig.until(lambda: len(next_engine.served) == 1)
        telling.may_go_on.set()
        if not is_asked:
            drains(rig, engine)
        await rig.until(lambda: rig.exchange.state in BETWEEN)
        other.may.set()
        assert await rest(client) == rest_of(telling)
        assert rig.finished[0].num_continued == 1


async def test_where_both_are_lost_a_third_one_goes_on() -> None:
    async with a_rig(**MOVES) as rig:
        telling, other = Telling(then_dies=True), Late(die)
        client, _ = await asked_elsewhere(rig, telling, other)
        telling.may_go_on.set()
        await rig.until(lambda: rig.exchange.state in BETWEEN)
        await rig.engine(Story("3"), instance_id="i-3")
        other.may.set()
        assert await rest(client) == rest_of(telling)
        assert outcomes(rig) == {("drained", "continued"): 1.0}


@pytest.mark.parametrize("state", [InstanceState.SWAPPED_OUT, InstanceState.FAILED])
async def test_an_other_one_that_ends_before_it_begins_is_not_waited_for(state: InstanceState) -> None:
    async with a_rig(**MOVES) as rig:
        telling = Telling()
        client, _ = await asked_elsewhere(rig, telling, Late(Story("2")))
        rig.tell(an_instance("i-2", "", state, revision=2, reason="gone"), "node_left")
        assert outcomes(rig) == {("drained", "stayed"): 1.0}
        telling.may_go_on.set()
        assert await rest(client) == rest_of(telling)


async def test_a_stream_whose_first_one_fell_asleep_while_the_other_one_refused_it_goes_on_elsewhere() -> None:
    async with a_rig(**MOVES) as rig:
        telling, other = Telling(), Late(BUSY)
        engine, client = await begun(rig, telling)
        next_engine = await rig.engine(other, instance_id="i-2", max_concurrency=1)
        await rig.engine(Story("3"), instance_id="i-3")
        drains(rig, engine)
        await rig.until(lambda: len(next_engine.served) == 1 or bool(outcomes(rig)))
        rig.tell(an_instance("i-1", "", InstanceState.SWAPPED_OUT, revision=3, reason="asleep"))
        other.may.set()
        assert await rest(client) == rest_of(telling)


async def test_an_answer_that_none_can_go_on_with_runs_to_its_end() -> None:
    async with a_rig(**MOVES) as rig:
        telling = Telling(n=2)
        engine, client = await begun(rig, telling, n=2)
        other = await rig.engine(Story("2"), instance_id="i-2")
        drains(rig, engine)
        rig.tick()
        assert outcomes(rig) == {("drained", "refused"): 1.0} and not other.served
        assert rig.table.controller.in_flight == {"i-1": 1}
        telling.may_go_on.set()
        assert (await client.rest()).endswith(DONE)
        assert rig.endings[0].status == 200


async def test_a_stream_may_leave_again() -> None:
    """Only the text of a later engine's answer is kept."""
    async with a_rig(**MOVES) as rig:
        telling = Telling()
        engine, client = await begun(rig, telling)
        second = Story("2")
        hanging, may = asyncio.Event(), asyncio.Event()

        async def two_words(served: Served) -> None:
            events = second.events(CHAT, {**asked_of(CHAT), **_body(served)})
            await served.sse_head()
            for event in events[:3]:
                await served.chunk(event)
            hanging.set()
            await may.wait()

        next_engine = await rig.engine(two_words, instance_id="i-2")
        drains(rig, engine)
        await hanging.wait()
        await rig.until(lambda: outcomes(rig) == {("drained", "continued"): 1.0})
        await rig.engine(Story("3"), instance_id="i-3")
        drains(rig, next_engine, instance_id="i-2")
        assert await rest(client) == rest_of(telling)
        assert rig.finished[0].num_continued == 2 and outcomes(rig) == {("drained", "continued"): 2.0}
        may.set()


def _body(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = decoded(b"data: " + served.body + b"\n\n")[0]
    return found


async def test_a_client_that_leaves_meanwhile_leaves_both() -> None:
    async with a_rig(**MOVES) as rig:
        telling = Telling()
        engine, client = await begun(rig, telling)
        other = await rig.engine(Late(Story("2")), instance_id="i-2")
        drains(rig, engine)
        await rig.until(lambda: len(other.served) == 1)
        client.close()
        for one in (engine, other):
            await asyncio.wait_for(one.served[0].left.wait(), WAIT_S)
        assert rig.endings[0].status == 499 and not outcomes(rig)


async def test_who_ends_in_time_or_has_nowhere_to_go_stays() -> None:
    async with a_rig(**MOVES) as rig:
        telling = Telling()
        engine, client = await begun(rig, telling)
        drains(rig, engine)
        other = await rig.engine(Story("2"), instance_id="i-2", state=InstanceState.LOADING)
        drains(rig, engine, left_s=60.0, revision=3)
        rig.tell(an_instance("i-2", other.url, revision=2))
        rig.tick()
        assert not other.served and not outcomes(rig)
        drains(rig, engine, revision=4)
        assert await rest(client) == rest_of(telling)


async def test_no_stream_leaves_where_that_is_switched_off() -> None:
    async with a_rig(models=(a_real_model(),)) as rig:
        telling = Telling()
        engine, client = await begun(rig, telling)
        other = await rig.engine(Story("2"), instance_id="i-2")
        drains(rig, engine)
        rig.tick()
        telling.may_go_on.set()
        assert await rest(client) == rest_of(telling) and not other.served
