"""Run the bus in memory, for tests: same subjects, redelivery and codec."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from glowplug.bus.port import MAX_DELIVER, BusCounts, BusUnavailable, Handler
from glowplug.events import Event, decode, encode
from glowplug.events.subjects import is_command_filter, is_kept, subject

log = logging.getLogger(__name__)
RETRY_S = 0.01  # before a patient reader's redelivery


def matches(pattern: str, name: str) -> bool:
    """Match NATS wildcards: `*` is one token, `>` the rest."""
    want, have = pattern.split("."), name.split(".")
    for i, token in enumerate(want):
        if token == ">":
            return len(have) > i
        if i >= len(have) or token not in ("*", have[i]):
            return False
    return len(want) == len(have)


@dataclass
class _Subscription:
    filters: tuple[str, ...]
    handler: Handler
    durable: str
    patient: bool = False
    queue: asyncio.Queue[tuple[int, str, bytes]] = field(default_factory=asyncio.Queue)  # end in `kept`, subject, event
    task: asyncio.Task[None] | None = None
    handling: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while handling

    def wants(self, name: str) -> bool:
        return any(matches(pattern, name) for pattern in self.filters)


@dataclass
class MemoryBroker:
    """State shared by MemoryBus clients. `kept`: durable events; `published`: all events, decoded.

    `down = True` makes every publish raise BusUnavailable; `refusal` is the reason for storing nothing.
    """

    subscriptions: list[_Subscription] = field(default_factory=list)
    kept: list[tuple[str, bytes]] = field(default_factory=list)
    published: list[Event] = field(default_factory=list)
    acknowledged: dict[str, int] = field(default_factory=dict)
    down: bool = False
    refusal: str = ""
    _ids: set[str] = field(default_factory=set)

    def of_type(self, event_type: str) -> list[Event]:
        return [e for e in self.published if e.type == event_type]

    def take(self, event: Event) -> None:
        """Keep and pass on one event, unless it is kept already."""
        name = subject(event.data)
        if is_kept(name):
            if event.event_id in self._ids:
                return
            self._ids.add(event.event_id)
        raw = encode(event)
        self.published.append(decode(raw))
        self.send(name, raw)

    def send(self, name: str, raw: bytes) -> None:
        if is_kept(name):
            self.kept.append((name, raw))
        for sub in self.subscriptions:
            if sub.wants(name):
                sub.queue.put_nowait((len(self.kept), name, raw))


class MemoryBus:
    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self._mine: list[_Subscription] = []
        self.counts = BusCounts()

    @property
    def connected(self) -> bool:
        return not self.broker.down

    @property
    def refusal(self) -> str:
        return self.broker.refusal

    async def publish(self, event: Event) -> None:
        if self.broker.down:
            raise BusUnavailable("memory broker is down")
        if self.broker.refusal and is_kept(subject(event.data)):
            raise BusUnavailable(self.broker.refusal)
        self.broker.take(event)
        await asyncio.sleep(0)

    async def subscribe(
        self, filters: Sequence[str], handler: Handler, *, durable: str = "", patient: bool = False
    ) -> None:
        sub = _Subscription(tuple(filters), handler, durable, patient)
        if durable:
            first = 0 if patient or is_command_filter(filters[0]) else len(self.broker.kept)
            start = self.broker.acknowledged.setdefault(durable, first)
            for end, (name, raw) in enumerate(self.broker.kept[start:], start + 1):
                if sub.wants(name):
                    sub.queue.put_nowait((end, name, raw))
        self.broker.subscriptions.append(sub)
        self._mine.append(sub)
        sub.task = asyncio.create_task(self._deliver(sub))

    async def _deliver(self, sub: _Subscription) -> None:
        while True:
            end, name, raw = await sub.queue.get()
            async with sub.handling:
                if (event := self.counts.read(name, raw)) is not None:
                    await self._handle(sub, event)
                if sub.durable:
                    self.broker.acknowledged[sub.durable] = end

    async def _handle(self, sub: _Subscription, event: Event) -> None:
        for attempt in count() if sub.patient else range(MAX_DELIVER if sub.durable else 1):
            self.counts.num_redelivered += attempt > 0
            await asyncio.sleep(RETRY_S if sub.patient and attempt else 0)
            try:
                await sub.handler(event)
                return
            except Exception:
                log.exception("the handler of %s %s failed at attempt %d", event.type, event.event_id, attempt + 1)
        self.counts.num_given_up += bool(sub.durable)

    async def release(self, durable: str) -> None:
        for sub in [sub for sub in self._mine if sub.durable == durable]:
            self._mine.remove(sub)
            self.broker.subscriptions.remove(sub)
            async with sub.handling:
                if sub.task:
                    sub.task.cancel()

    async def close(self) -> None:
        for sub in self._mine:
            self.broker.subscriptions.remove(sub)
            if sub.task:
                sub.task.cancel()
        self._mine.clear()
