"""A real NATS that dies and returns, with its store or without, and one with a full disk."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from redis.asyncio import Redis

from glowplug.bus import nats_bus
from glowplug.bus.nats_bus import NatsBus
from glowplug.bus.port import BusUnavailable
from glowplug.events.subjects import COMMANDS_ALL, facts_of
from tests.contract.bus_rig import AnyBus, Listener, Rig, commands_of, evicted, evictions_of, load, name, retried, stop
from tests.servers import Infra, NatsProcess
from tests.small_disk import SmallDisk, small_disk
from tests.waiting import WAIT_S, until


async def test_both_servers_answer(infra: Infra) -> None:
    client = await nats.connect(infra.nats.url)
    account = await client.jetstream().account_info()
    await client.close()
    redis = Redis.from_url(infra.valkey.url)
    assert account.limits is not None
    assert await redis.ping()
    assert (await redis.config_get("appendonly"))["appendonly"] == "yes"
    await redis.aclose()


def test_a_restarted_nats_keeps_its_port(own_nats: NatsProcess) -> None:
    before = own_nats.url
    own_nats.kill()
    assert own_nats.start().url == before


@pytest.fixture
async def rig(own_nats: NatsProcess) -> AsyncIterator[Rig]:
    made = Rig(own_nats.url)
    yield made
    await made.close()


async def lost(bus: AnyBus) -> None:
    await until(lambda: not bus.connected, "the client has noticed")


@pytest.mark.parametrize("emptied", [False, True], ids=["store kept", "store emptied"])
async def test_everything_goes_on_after_the_server_is_killed(own_nats: NatsProcess, rig: Rig, emptied: bool) -> None:
    bus = await rig.client()
    node, telemetry = name(), Listener()
    facts = await rig.listener(evictions_of(node), bus)
    commands = await rig.listener(commands_of(node), bus)
    await bus.subscribe([facts_of("router.load_reported")], telemetry)
    for event in (evicted(node, 1), stop(node, "i-1"), load("r-1")):
        await bus.publish(event)
    await asyncio.gather(facts.listen(1), commands.listen(1), telemetry.listen(1))

    own_nats.kill()
    await lost(bus)
    own_nats.start(emptied=emptied)

    command = stop(node, "i-2")
    await retried(lambda: bus.publish(command), BusUnavailable)
    await commands.until(lambda: command.event_id in commands.ids)
    await retried(lambda: bus.publish(load("r-2")), BusUnavailable)
    await telemetry.until(lambda: "r-2" in [e.data.router_id for e in telemetry.received])
    for num in range(2, 200):  # facts are hints: an emptied store loses those before the reader returns
        await retried(lambda num=num: bus.publish(evicted(node, num)), BusUnavailable)  # type: ignore[misc]
        await asyncio.sleep(0.02)
        if len(facts.received) > 1:
            break
    assert len(facts.received) > 1


async def test_facts_published_by_others_while_a_reader_is_away_are_not_lost(own_nats: NatsProcess, rig: Rig) -> None:
    reader, writer, node = await rig.client(), await rig.client(), name()
    listener = await rig.listener(evictions_of(node), reader)
    await writer.publish(evicted(node, 0))
    await listener.listen(1)
    own_nats.kill()
    await lost(reader)
    own_nats.start()
    sent = [evicted(node, num) for num in range(1, 21)]
    for event in sent:
        await retried(lambda event=event: writer.publish(event), BusUnavailable)  # type: ignore[misc]
    await listener.until(lambda: {e.event_id for e in sent} <= set(listener.ids))
    assert [e.data.num_bytes for e in listener.received if e in sent] == list(range(1, 21))


async def test_a_stored_command_survives_the_server(own_nats: NatsProcess, rig: Rig) -> None:
    bus, node = await rig.client(), name()
    sent = stop(node)
    await bus.publish(sent)
    own_nats.kill()
    own_nats.start()
    listener = await rig.listener(commands_of(node))
    assert await listener.listen(1) == [sent]


async def test_what_a_handler_had_not_finished_is_delivered_again(own_nats: NatsProcess, rig: Rig) -> None:
    node, durable, reached = name(), name(), asyncio.Event()

    async def never_ends(_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    first = await rig.client()
    await first.subscribe([commands_of(node)], never_ends, durable=durable)
    sent = stop(node)
    await first.publish(sent)
    await reached.wait()
    await first.close()
    listener = await rig.listener(commands_of(node), durable=durable)
    assert await listener.listen(1) == [sent]


async def test_a_refusal_is_prompt(own_nats: NatsProcess, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bus, "PUBLISH_TIMEOUT_S", 2 * WAIT_S)
    bus = await rig.client()
    own_nats.freeze()
    waiting = asyncio.create_task(bus.publish(evicted("n")))
    await asyncio.sleep(0.1)
    own_nats.kill()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(BusUnavailable):
            await waiting
        with pytest.raises(BusUnavailable):
            await bus.publish(evicted("n"))


async def test_a_client_may_come_before_its_server(own_nats: NatsProcess, rig: Rig) -> None:
    own_nats.kill()
    opening = asyncio.create_task(rig.client())
    await asyncio.sleep(0.2)
    assert not opening.done()
    own_nats.start()
    bus, node = await opening, name()
    listener = await rig.listener(commands_of(node), bus)
    await bus.publish(stop(node))
    assert len(await listener.listen(1)) == 1


async def test_a_stream_that_vanishes_under_a_living_server_is_made_again(rig: Rig) -> None:
    bus, node = await rig.client(), name()
    listener = await rig.listener(commands_of(node), bus)
    operator = await nats.connect(rig.url)
    await operator.jetstream().delete_stream("GLOWPLUG_COMMANDS")
    await operator.close()
    command = stop(node)
    await retried(lambda: bus.publish(command), BusUnavailable)
    assert await listener.listen(1) == [command]


async def test_a_frozen_server_is_refused_within_the_timeout_and_used_again(own_nats: NatsProcess, rig: Rig) -> None:
    bus, node = await rig.client(), name()
    listener = await rig.listener(commands_of(node), bus)
    own_nats.freeze()
    lost_to_the_caller, after = stop(node, "i-1"), stop(node, "i-2")
    with pytest.raises(BusUnavailable):
        await bus.publish(lost_to_the_caller)
    own_nats.thaw()
    await retried(lambda: bus.publish(lost_to_the_caller), BusUnavailable)  # taken twice by the server, heard once
    await bus.publish(after)
    await listener.until(lambda: after.event_id in listener.ids)
    assert listener.ids == [lost_to_the_caller.event_id, after.event_id]


@pytest.fixture
def disk(tmp_path: Path):
    with small_disk(tmp_path / "disk", 16) as made:
        yield made


@pytest.fixture
def server(disk: SmallDisk):
    with NatsProcess(disk.path / "nats") as made:
        yield made


@pytest.fixture
async def bus(server: NatsProcess) -> AsyncIterator[NatsBus]:
    made = NatsBus(server.url, "test")
    await made.connect()
    yield made
    await made.close()


async def until_refused(bus: NatsBus) -> int:
    """A file's last page takes some more. Returns the number stored."""
    for num in range(1000):
        try:
            await bus.publish(stop("node", f"i-{num:04d}"))
        except BusUnavailable:
            if bus.refusal:
                return num
    raise AssertionError("a full disk took a thousand commands")


async def test_what_cannot_be_stored_is_refused_at_once_until_it_can(
    disk: SmallDisk, server: NatsProcess, bus: NatsBus
) -> None:
    listener, everything = Listener(), Listener()
    await bus.subscribe([facts_of("router.load_reported")], listener)
    await bus.subscribe([COMMANDS_ALL], everything)
    await bus.publish(stop("node", "i-1"))
    assert bus.refusal == ""
    disk.fill()
    num_stored = await until_refused(bus)
    assert "stores no events" in bus.refusal
    with pytest.raises(BusUnavailable, match="stores no events"):
        await bus.publish(stop("node", "i-2"))
    await bus.publish(load("r-1"))
    await listener.until(lambda: bool(listener.received))
    assert bus.connected

    disk.free()
    server.kill()
    server.start()
    await until(lambda: bus.connected and not bus.refusal)
    await bus.publish(stop("node", "i-3"))
    await everything.until(lambda: "i-3" in [e.data.instance_id for e in everything.received])
    assert len(everything.received) >= num_stored + 2
    assert bus.counts.num_malformed == 0, "what only asks is no event"


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"PUB " + b"x" * 5000 + b" 0\r\n\r\n", id="a control line longer than it takes"),
        pytest.param(b"PUB x %d\r\n" % (64 << 20), id="a payload larger than it takes"),
        pytest.param(b"HELLO\r\n", id="no operation that it knows"),
        pytest.param(b"SUB a..b 99\r\n", id="a subject that is none"),
        pytest.param(b"PUB\r\n", id="no arguments"),
    ],
)
async def test_whatever_error_the_server_names_the_client_is_back_on_the_bus(infra: Infra, raw: bytes) -> None:
    """The library closes its connection for good."""
    rig, node, router = Rig(infra.nats.url), name(), name()
    bus, other = await rig.client(), await rig.client()
    assert isinstance(bus, NatsBus)
    kept, heard = await rig.listener(evictions_of(node), bus), Listener()
    await bus.subscribe([facts_of("router.load_reported").rpartition(".")[0] + f".{router}"], heard)
    first = bus._nc
    assert first._transport is not None
    first._transport.writelines([raw])
    await until(lambda: bus.connected and bus._nc is not first, "another client has taken its place")
    for sender in (other, bus):
        await retried(lambda: sender.publish(evicted(node)), BusUnavailable)  # noqa: B023
    await kept.listen(2)
    for sender in (other, bus):
        await retried(lambda: sender.publish(load(router)), BusUnavailable)  # noqa: B023
    await heard.listen(2)
    await rig.close()
