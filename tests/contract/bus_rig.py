"""Rig of the bus cases."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import nats

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.bus.nats_bus import NatsBus, arrive
from glowplug.events import Event
from glowplug.events.commands import StopInstance
from glowplug.events.facts import RouterLoadReported, WeightsEvicted
from glowplug.events.subjects import commands_to, facts_of
from tests.waiting import WAIT_S

AnyBus = MemoryBus | NatsBus


@dataclass
class Rig:
    url: str = ""
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    opened: list[AnyBus] = field(default_factory=list)

    async def client(self) -> AnyBus:
        bus: AnyBus
        if self.url:
            bus = NatsBus(self.url, f"test-{len(self.opened)}")
            await bus.connect()
        else:
            bus = MemoryBus(self.broker)
        self.opened.append(bus)
        return bus

    async def listener(self, filter_: str, bus: AnyBus | None = None, durable: str = "") -> "Listener":
        made = Listener()
        await (bus or await self.client()).subscribe([filter_], made, durable=durable or name())
        return made

    async def send_bytes(self, subject: str, raw: bytes) -> None:
        if not self.url:
            self.broker.send(subject, raw)
            return
        client = await nats.connect(self.url)
        await client.publish(subject, raw)
        await arrive(client)
        await client.close()

    async def close(self) -> None:
        for bus in self.opened:
            await bus.close()


@dataclass
class Listener:
    """Remembers its events, after raising `fails` times."""

    fails: int = 0
    received: list[Event] = field(default_factory=list)
    num_calls: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, event: Event) -> None:
        self.num_calls += 1
        self.changed.set()
        if self.num_calls <= self.fails:
            raise RuntimeError("this handler fails on purpose")
        self.received.append(event)

    @property
    def ids(self) -> list[str]:
        return [event.event_id for event in self.received]

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                self.changed.clear()
                await self.changed.wait()

    async def listen(self, count: int) -> list[Event]:
        await self.until(lambda: len(self.received) >= count)
        return self.received


def name() -> str:
    """A token no other test uses."""
    return f"t-{uuid.uuid4().hex[:10]}"


def event_of(payload: Any, **more: Any) -> Event:
    return Event(
        event_id=uuid.uuid4().hex, type=payload.TYPE, occurred_at=1_700_000_000.5, issuer="test-1", data=payload, **more
    )


def evicted(node: str, num: int = 0) -> Event:
    """A fact (kept)."""
    return event_of(WeightsEvicted(node_id=node, digest=node, num_bytes=num, reason="test"))


def load(router: str) -> Event:
    """Telemetry (not kept)."""
    return event_of(RouterLoadReported(router_id=router, loads={}))


def stop(node: str, instance: str = "i-1") -> Event:
    """A command (kept, for one reader)."""
    return event_of(StopInstance(target=node, instance_id=instance, reason="test"), epoch=7)


def evictions_of(node: str) -> str:
    return f"{facts_of('weights.evicted').rpartition('.')[0]}.{node}"


def commands_of(node: str) -> str:
    return commands_to("agent", node)


async def retried(call: Callable[[], Awaitable[None]], refused: type[Exception]) -> None:
    """As a service's ticks do. Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await call()
            except refused:
                await asyncio.sleep(0.1)
