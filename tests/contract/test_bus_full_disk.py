"""A real NATS whose disk is full: it answers and stores nothing, which is known, told and over in time."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from glowplug.bus.nats_bus import PUBLISH_TIMEOUT_S, NatsBus
from glowplug.bus.port import BusUnavailable
from glowplug.events.subjects import COMMANDS_ALL, facts_of
from tests.contract.bus_rig import Ear, load, stop
from tests.servers import NatsProcess
from tests.small_disk import SmallDisk, small_disk
from tests.waiting import until

WAIT_S = 30.0


@pytest.fixture
def disk(tmp_path: Path):
    with small_disk(tmp_path / "disk", 16) as made:
        yield made


@pytest.fixture
def server(disk: SmallDisk):
    made = NatsProcess(disk.path / "nats").start()
    yield made
    made.kill()


@pytest.fixture
async def bus(server: NatsProcess) -> AsyncIterator[NatsBus]:
    made = NatsBus(server.url, "test")
    await made.connect()
    yield made
    await made.close()


async def until_refused(bus: NatsBus) -> int:
    """Publish commands until one is not stored (the last page of a file takes some more); how many were."""
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
    ear, everything = Ear(), Ear()
    await bus.subscribe([facts_of("router.load_reported")], ear)
    await bus.subscribe([COMMANDS_ALL], everything)
    await bus.publish(stop("node", "i-1"))
    assert bus.refusal == ""
    disk.fill()
    num_stored = await until_refused(bus)
    assert "stores no events" in bus.refusal
    began = time.monotonic()
    with pytest.raises(BusUnavailable, match="stores no events"):
        await bus.publish(stop("node", "i-2"))
    assert time.monotonic() - began < PUBLISH_TIMEOUT_S / 2, "a bound: the server is not waited for again"
    await bus.publish(load("r-1"))
    await ear.until(lambda: bool(ear.heard))  # telemetry is not stored, and flows
    assert bus.connected

    disk.free()
    server.kill()
    server.start()
    await until(lambda: bus.connected and not bus.refusal)
    await bus.publish(stop("node", "i-3"))
    await everything.until(lambda: "i-3" in [e.data.instance_id for e in everything.heard])
    assert len(everything.heard) >= num_stored + 2
    assert bus.counts.num_malformed == 0, "what only asks is no event"
