"""The outbox, also while the bus is down."""

import asyncio

from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.controllers.effects import Publish
from glowplug.events import Event
from glowplug.events.facts import RequestRejected
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.reports import Outbox


class RefusingBus(MemoryBus):
    async def publish(self, event: Event) -> None:
        if event.data.request_id == "r-0":
            raise ValueError("no subject can carry it")
        await super().publish(event)


async def drained(bus: MemoryBus, count: int, limit: int) -> RouterMetrics:
    metrics = RouterMetrics(CollectorRegistry())
    outbox = Outbox(bus, "router-1", metrics, limit)
    cause = Event(event_id="e-1", type="x", occurred_at=0.0, issuer="t", data=None, traceparent="tp")
    for number in range(count):
        fact = RequestRejected(model_key="m", request_id=f"r-{number}", router_id="t", status=429, code="queue_full")
        outbox.publish(Publish(fact, cause))
    running = asyncio.create_task(outbox.run())
    for _ in range(50 * count):
        await asyncio.sleep(0)
    running.cancel()
    return metrics


def sent(broker: MemoryBroker) -> list[str]:
    return [e.data.request_id for e in broker.published]


async def test_events_leave_in_order_with_their_cause_and_an_id_each() -> None:
    broker = MemoryBroker()
    await drained(MemoryBus(broker), 5, 100)
    assert sent(broker) == [f"r-{n}" for n in range(5)]
    assert {(e.issuer, e.cause_id, e.traceparent) for e in broker.published} == {("router-1", "e-1", "tp")}
    assert len({e.event_id for e in broker.published}) == 5


async def test_the_oldest_are_dropped_and_counted_when_it_is_full() -> None:
    broker = MemoryBroker()
    metrics = await drained(MemoryBus(broker), 5, 3)
    assert sent(broker) == ["r-2", "r-3", "r-4"] and metrics.dropped._value.get() == 2


async def test_a_bus_that_is_down_costs_only_the_events() -> None:
    broker = MemoryBroker(down=True)
    metrics = await drained(MemoryBus(broker), 3, 100)
    assert broker.published == [] and metrics.dropped._value.get() == 3


async def test_an_event_that_cannot_be_sent_does_not_hold_up_the_next() -> None:
    broker = MemoryBroker()
    metrics = await drained(RefusingBus(broker), 2, 100)
    assert sent(broker) == ["r-1"] and metrics.dropped._value.get() == 1
