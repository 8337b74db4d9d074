"""The outbox: bounded, in order, and indifferent to a bus that is down."""

import asyncio
from typing import Any

from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.controllers.effects import Publish
from glowplug.events import Event
from glowplug.events.facts import RequestRejected
from services.router.metrics import RouterMetrics
from services.router.outbox import Outbox


def wrap(payload: Any, cause: Event | None) -> Event:
    return Event(event_id=payload.request_id, type=payload.TYPE, occurred_at=0.0, issuer="t", data=payload)


def rejected(number: int) -> Publish:
    return Publish(
        RequestRejected(model_key="m", request_id=f"r-{number}", router_id="t", status=429, code="queue_full")
    )


async def drained(broker: MemoryBroker, count: int, limit: int) -> RouterMetrics:
    metrics = RouterMetrics(CollectorRegistry())
    outbox = Outbox(MemoryBus(broker), wrap, metrics, limit)
    for number in range(count):
        outbox.put(rejected(number))
    running = asyncio.create_task(outbox.run())
    for _ in range(200):
        await asyncio.sleep(0)
    running.cancel()
    return metrics


async def test_events_leave_in_order() -> None:
    broker = MemoryBroker()
    await drained(broker, 5, 100)
    assert [e.event_id for e in broker.published] == [f"r-{n}" for n in range(5)]


async def test_the_oldest_are_dropped_and_counted_when_it_is_full() -> None:
    broker = MemoryBroker()
    metrics = await drained(broker, 5, 3)
    assert [e.event_id for e in broker.published] == ["r-2", "r-3", "r-4"]
    assert metrics.dropped._value.get() == 2


async def test_a_bus_that_is_down_costs_only_the_events() -> None:
    broker = MemoryBroker(down=True)
    metrics = await drained(broker, 3, 100)
    assert broker.published == [] and metrics.dropped._value.get() == 3


async def test_an_event_that_cannot_be_sent_does_not_hold_up_the_next() -> None:
    broker, metrics = MemoryBroker(), RouterMetrics(CollectorRegistry())

    def wrap_but_one(payload: Any, cause: Event | None) -> Event:
        if payload.request_id == "r-0":
            raise ValueError("no subject can carry it")
        return wrap(payload, cause)

    outbox = Outbox(MemoryBus(broker), wrap_but_one, metrics, 100)
    outbox.put(rejected(0))
    outbox.put(rejected(1))
    running = asyncio.create_task(outbox.run())
    for _ in range(50):
        await asyncio.sleep(0)
    running.cancel()
    assert [e.event_id for e in broker.published] == ["r-1"] and metrics.dropped._value.get() == 1
