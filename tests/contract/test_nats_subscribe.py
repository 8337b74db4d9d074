"""A telemetry subscription is known to the server once it is made."""

import asyncio

import pytest

from glowplug.bus import nats_bus
from glowplug.bus.nats_bus import NatsBus
from glowplug.events.subjects import facts_of
from tests.contract.bus_rig import Listener, load
from tests.servers import Infra
from tests.slow_link import SlowLink, slow_link
from tests.waiting import WAIT_S

LOADS = facts_of("router.load_reported")


def new_bus(link: SlowLink) -> NatsBus:
    return NatsBus(link.url.replace("http:", "nats:"), "test")


async def test_the_server_has_answered_a_ping_that_came_after_the_subscription(infra: Infra) -> None:
    """The client library writes a ping ahead of its pending output."""
    async with slow_link(infra.nats.port) as link:
        bus = new_bus(link)
        await bus.connect()
        await bus.subscribe([LOADS], Listener())
        sent = bytes(link.sent)
        assert b"PING" in sent[sent.index(f"SUB {LOADS}".encode()) :]
        await bus.close()


async def test_an_answer_that_comes_too_late_does_no_harm(infra: Infra, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client library stops reading on an unexpected answer."""
    monkeypatch.setattr(nats_bus, "ARRIVE_S", 0.1)
    async with slow_link(infra.nats.port) as link:
        bus, listener = new_bus(link), Listener()
        await bus.connect()
        link.open.clear()
        await bus.subscribe([LOADS], listener)
        link.open.set()
        event = load("late")
        await bus.publish(event)
        await listener.until(lambda: event in listener.received)
        assert bus.counts.num_reconnects == 0
        await bus.close()


async def test_a_reader_that_swallows_a_cancellation_is_over_nevertheless() -> None:
    """`asyncio.wait_for` of Python 3.11 does so at the moment of its answer."""
    swallowed = 0

    async def reader() -> None:
        nonlocal swallowed
        while swallowed < 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1

    task = asyncio.create_task(reader())
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await nats_bus._cancel(task)
    assert swallowed == 2 and task.done()
