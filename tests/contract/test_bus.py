"""Every bus, in memory and on a real NATS."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from glowplug.bus.port import BusUnavailable
from glowplug.events import Event, encode
from glowplug.events.subjects import entity_facts, facts_of, subject
from tests.contract.bus_rig import Listener, Rig, commands_of, evicted, evictions_of, load, name, stop
from tests.servers import NatsProcess


@pytest.fixture(params=["memory", "nats"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    url = request.getfixturevalue("infra").nats.url if request.param == "nats" else ""
    made = Rig(url)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("made", "filter_of"), [(evicted, evictions_of), (stop, commands_of)], ids=["facts", "commands"]
)
async def test_events_arrive_whole_with_their_trace_and_in_order(rig: Rig, made, filter_of) -> None:
    writer, node = await rig.client(), name()
    listener = await rig.listener(filter_of(node))
    sent = [replace(made(node), traceparent=f"00-{num:032x}-{'b' * 16}-01") for num in range(1, 101)]
    for event in sent:
        await writer.publish(event)
    assert await listener.listen(100) == sent


async def test_every_durable_name_hears_every_fact(rig: Rig) -> None:
    bus, node = await rig.client(), name()
    ears = [await rig.listener(evictions_of(node), bus) for _ in range(2)]
    await bus.publish(evicted(node))
    for listener in ears:
        assert len(await listener.listen(1)) == 1


async def test_wildcards_choose_by_entity_type_and_target(rig: Rig) -> None:
    bus, node, other = await rig.client(), name(), name()
    by_type, by_entity = Listener(), await rig.listener(entity_facts("weights"), bus)
    elsewhere = await rig.listener(evictions_of(other), bus)
    await bus.subscribe([facts_of("weights.evicted"), facts_of("weights.fetched")], by_type, durable=name())
    await bus.publish(evicted(node, 1))
    await bus.publish(evicted(other, 2))
    assert [e.data.num_bytes for e in await by_entity.listen(2)] == [1, 2]
    assert [e.data.num_bytes for e in await by_type.listen(2)] == [1, 2]
    assert [e.data.num_bytes for e in await elsewhere.listen(1)] == [2]


async def test_a_durable_reader_goes_on_where_it_stopped(rig: Rig) -> None:
    writer, reader, node, durable = await rig.client(), await rig.client(), name(), name()
    first = await rig.listener(evictions_of(node), reader, durable)
    await writer.publish(evicted(node, 1))
    await first.listen(1)
    marker = evicted(node, 2)
    await writer.publish(marker)
    await first.listen(2)
    await reader.close()
    await writer.publish(evicted(node, 3))
    await writer.publish(evicted(node, 4))
    second = await rig.listener(evictions_of(node), durable=durable)
    await second.until(lambda: 4 in [e.data.num_bytes for e in second.received])
    assert [e.data.num_bytes for e in second.received if e.data.num_bytes > 2] == [3, 4]


async def test_a_new_reader_of_facts_starts_at_the_end(rig: Rig) -> None:
    bus, node = await rig.client(), name()
    await bus.publish(evicted(node, 1))
    listener = await rig.listener(evictions_of(node), bus)
    await bus.publish(evicted(node, 2))
    assert [e.data.num_bytes for e in await listener.listen(1)] == [2]


async def test_commands_wait_for_a_reader_that_comes_late(rig: Rig) -> None:
    writer, node = await rig.client(), name()
    await writer.publish(stop(node, "i-1"))
    await writer.publish(stop(node, "i-2"))
    listener = await rig.listener(commands_of(node))
    assert [(e.data.instance_id, e.epoch) for e in await listener.listen(2)] == [("i-1", 7), ("i-2", 7)]


async def test_commands_reach_their_target_alone(rig: Rig) -> None:
    bus, me, other = await rig.client(), name(), name()
    mine, theirs = [await rig.listener(commands_of(node), bus) for node in (me, other)]
    await bus.publish(stop(other, "i-other"))
    await bus.publish(stop(me, "i-me"))
    assert [e.data.instance_id for e in await mine.listen(1)] == ["i-me"]
    assert [e.data.instance_id for e in await theirs.listen(1)] == ["i-other"]


async def test_a_failed_handler_is_asked_again(rig: Rig) -> None:
    bus, listener, node = await rig.client(), Listener(fails=2), name()
    await bus.subscribe([commands_of(node)], listener, durable=name())
    await bus.publish(stop(node))
    await listener.listen(1)
    assert listener.num_calls == 3


async def test_a_handler_that_always_fails_is_left_alone_after_five_times(rig: Rig) -> None:
    bus, listener, node = await rig.client(), Listener(fails=5), name()
    await bus.subscribe([commands_of(node)], listener, durable=name())
    await bus.publish(stop(node, "i-poison"))
    await listener.until(lambda: listener.num_calls == 5)
    await bus.publish(stop(node, "i-next"))
    assert [e.data.instance_id for e in await listener.listen(1)] == ["i-next"]
    assert listener.num_calls == 6
    assert bus.counts.num_given_up == 1


async def test_malformed_bytes_are_counted_and_dropped(rig: Rig) -> None:
    bus, passing, node = await rig.client(), Listener(), name()
    kept = await rig.listener(evictions_of(node), bus)
    await bus.subscribe([facts_of("router.load_reported")], passing)
    damaged = encode(evicted(node))
    for raw in (
        b"",
        b"not json",
        b"\xff\xfe",
        b'{"type":"weights.evicted"}',
        b'{"event_id":"e","type":"no.such"}',
        damaged.replace(b'"reason":"', b'"reason":"\xff'),
        damaged.replace(b'"issuer":"', b'"issuer":"\xc3('),
        damaged.replace(b'"num_bytes":0', b'"num_bytes":1e400'),
        damaged.replace(b'"num_bytes":0', b'"num_bytes":' + b"9" * 5000),
        damaged.replace(b'"data":{', b'"data":{"more":' + b"[" * 100_000),
    ):
        assert raw != damaged
        await rig.send_bytes(subject(evicted(node).data), raw)
    await rig.send_bytes(subject(load(node).data), b"[]")
    await bus.publish(evicted(node, 1))
    await bus.publish(load(node))
    assert [e.data.num_bytes for e in await kept.listen(1)] == [1]
    assert [e.data.router_id for e in await passing.listen(1)] == [node]
    assert bus.counts.num_malformed == 11


async def test_telemetry_is_heard_by_those_present_and_not_kept(rig: Rig) -> None:
    bus, early, late = await rig.client(), Listener(), Listener()
    await bus.subscribe([facts_of("router.load_reported")], early)
    await bus.publish(load("first"))
    await early.listen(1)
    await bus.subscribe([facts_of("router.load_reported")], late)
    await bus.publish(load("second"))
    assert [e.data.router_id for e in await late.listen(1)] == ["second"]
    assert [e.data.router_id for e in await early.listen(2)] == ["first", "second"]


async def test_an_event_published_twice_is_heard_once(rig: Rig) -> None:
    bus, node = await rig.client(), name()
    listener = await rig.listener(evictions_of(node), bus)
    twice, after = evicted(node, 1), evicted(node, 2)
    for event in (twice, twice, after):
        await bus.publish(event)
    await listener.until(lambda: after.event_id in listener.ids)
    assert listener.ids == [twice.event_id, after.event_id]


@pytest.mark.parametrize("kind", ["memory", "nats"])
async def test_a_bus_that_is_down_refuses(kind: str, own_nats: NatsProcess) -> None:
    rig = Rig(own_nats.url if kind == "nats" else "")
    bus = await rig.client()
    listener = await rig.listener(evictions_of("n"), bus)
    rig.broker.down = True
    own_nats.kill()
    for event in (evicted("n"), stop("n"), load("r")):
        with pytest.raises(BusUnavailable):
            for _ in range(3):  # the first may enter a socket whose other end has just died
                await bus.publish(event)
    assert not bus.connected
    assert listener.num_calls == 0
    await rig.close()


async def test_a_released_reader_hears_no_more_and_the_next_one_goes_on(rig: Rig) -> None:
    old, new, node, durable = await rig.client(), await rig.client(), name(), name()
    first = await rig.listener(commands_of(node), old, durable)
    await old.publish(stop(node, "i-1"))
    await first.listen(1)
    await old.release(durable)
    await old.release(durable)
    await old.publish(stop(node, "i-2"))
    second = await rig.listener(commands_of(node), new, durable)
    await old.publish(stop(node, "i-3"))
    assert [e.data.instance_id for e in await second.listen(2)] == ["i-2", "i-3"]
    assert [e.data.instance_id for e in first.received] == ["i-1"]


async def test_a_client_may_read_again_under_a_name_it_released(rig: Rig) -> None:
    bus, node, durable = await rig.client(), name(), name()
    for k in range(3):
        listener = await rig.listener(commands_of(node), bus, durable)
        await bus.publish(stop(node, f"i-{k}"))
        assert [e.data.instance_id for e in await listener.listen(1)] == [f"i-{k}"]
        await bus.release(durable)


async def test_what_a_handler_has_in_hand_is_finished_before_the_release(rig: Rig) -> None:
    bus, node, durable, listener = await rig.client(), name(), name(), Listener()
    taken, go = asyncio.Event(), asyncio.Event()

    async def slow(event: Event) -> None:
        taken.set()
        await go.wait()
        await listener(event)

    await bus.subscribe([commands_of(node)], slow, durable=durable)
    await bus.publish(stop(node))
    await taken.wait()
    releasing = asyncio.create_task(bus.release(durable))
    await asyncio.sleep(0)
    go.set()
    await releasing
    assert len(listener.received) == 1
    again = await rig.listener(commands_of(node), bus, durable)
    await bus.publish(stop(node, "i-next"))
    assert [e.data.instance_id for e in await again.listen(1)] == ["i-next"]


async def test_an_event_on_the_subject_of_another_is_not_believed(rig: Rig) -> None:
    """Rights depend on subjects."""
    bus, node, other = await rig.client(), name(), name()
    facts = await rig.listener(entity_facts("weights"), bus)
    commands, telemetry = await rig.listener(commands_of(node), bus), Listener()
    await bus.subscribe([facts_of("router.load_reported")], telemetry)
    fact, command = evicted(node), stop(node)
    for where, what in (
        (subject(fact.data), command),
        (subject(load(node).data), command),
        (subject(load(node).data), fact),
        (subject(fact.data).replace("evicted", "fetched"), fact),
        (subject(command.data), stop(other)),
        (subject(command.data).replace("stop", "start"), command),
    ):
        await rig.send_bytes(where, encode(what))
    last = [evicted(node, 2), stop(node, "i-2"), load(node)]
    for event in last:
        await bus.publish(event)
    assert [await listener.listen(1) for listener in (facts, commands, telemetry)] == [[event] for event in last]
    assert bus.counts.num_malformed == 6
