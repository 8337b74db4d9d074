"""The bus in memory, for tests: same subjects, same redelivery, nothing over the wire but the real codec."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from glowplug.bus.port import BusUnavailable, Handler
from glowplug.events import Event, decode, encode
from glowplug.events.subjects import subject

log = logging.getLogger(__name__)
MAX_DELIVER = 5


def matches(pattern: str, name: str) -> bool:
    """NATS wildcards: `*` is one token, `>` the rest."""
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
    queue: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None


@dataclass
class MemoryBroker:
    """What several MemoryBus clients share. `log` keeps every durable event; `published` every event, decoded."""

    subscriptions: list[_Subscription] = field(default_factory=list)
    kept: list[tuple[str, bytes]] = field(default_factory=list)
    published: list[Event] = field(default_factory=list)
    acknowledged: dict[str, int] = field(default_factory=dict)
    down: bool = False

    def of_type(self, event_type: str) -> list[Event]:
        return [e for e in self.published if e.type == event_type]


class MemoryBus:
    """One client of a MemoryBroker."""

    def __init__(self, broker: MemoryBroker | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self._mine: list[_Subscription] = []

    @property
    def connected(self) -> bool:
        return not self.broker.down

    async def publish(self, event: Event) -> None:
        if self.broker.down:
            raise BusUnavailable("memory broker is down")
        name, raw = subject(event.data), encode(event)
        self.broker.published.append(decode(raw))
        if ".tel." not in name:
            self.broker.kept.append((name, raw))
        for sub in self.broker.subscriptions:
            if any(matches(f, name) for f in sub.filters):
                sub.queue.put_nowait(raw)
        await asyncio.sleep(0)

    async def subscribe(self, filters: Sequence[str], handler: Handler, *, durable: str = "") -> None:
        sub = _Subscription(tuple(filters), handler, durable)
        if durable:
            is_commands = ".cmd." in filters[0]
            start = self.broker.acknowledged.setdefault(durable, 0 if is_commands else len(self.broker.kept))
            for name, raw in self.broker.kept[start:]:
                if any(matches(f, name) for f in filters):
                    sub.queue.put_nowait(raw)
        self.broker.subscriptions.append(sub)
        self._mine.append(sub)
        sub.task = asyncio.create_task(self._deliver(sub))

    async def _deliver(self, sub: _Subscription) -> None:
        while True:
            raw = await sub.queue.get()
            event = decode(raw)
            for attempt in range(MAX_DELIVER if sub.durable else 1):
                try:
                    await sub.handler(event)
                    break
                except Exception:
                    log.exception("handler failed", extra={"event_type": event.type, "attempt": attempt})
            if sub.durable:
                self.broker.acknowledged[sub.durable] = len(self.broker.kept)

    async def close(self) -> None:
        for sub in self._mine:
            self.broker.subscriptions.remove(sub)
            if sub.task:
                sub.task.cancel()
        self._mine.clear()
