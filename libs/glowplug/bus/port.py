"""What a service needs of a bus, and how every bus reads what comes."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from glowplug.events import Event, decode
from glowplug.events.envelope import MalformedEvent
from glowplug.events.subjects import is_subject_of

log = logging.getLogger(__name__)
MAX_DELIVER = 5  # times that a durable reader is given an event before it is given up

Handler = Callable[[Event], Awaitable[None]]


class BusUnavailable(Exception):
    """The bus cannot take the event now. The caller's next tick asks again (level-triggered)."""


@dataclass(slots=True)
class BusCounts:
    """What a bus client has lived through. `pending`: durable reader -> events kept for it at its last delivery."""

    num_reconnects: int = 0
    num_redelivered: int = 0
    num_malformed: int = 0
    num_given_up: int = 0  # durable events whose handler raised at every delivery
    num_overflowed: int = 0  # events of the usage stream that it discarded before their reader had them
    pending: dict[str, int] = field(default_factory=dict)

    def read(self, subject: str, raw: bytes) -> Event | None:
        """The event in a message; None, counted and logged, for one that is malformed or came on the subject of
        another."""
        try:
            event = decode(raw)
        except MalformedEvent as error:
            log.warning("malformed event on %s: %s", subject, error)
        else:
            if is_subject_of(subject, event.data):
                return event
            log.warning(
                "%s has published an event on %s, which is not the subject of %s", event.issuer, subject, event.type
            )
        self.num_malformed += 1
        return None


class Bus(Protocol):
    """Delivers events at least once, in order per subject. Handlers must be idempotent.

    A handler that raises has its durable event delivered again, at most `max_deliver` times; then it is given up and
    counted.
    """

    async def publish(self, event: Event) -> None:
        """Facts and commands are stored before this returns; telemetry is fire and forget. Raises BusUnavailable."""
        ...

    async def subscribe(
        self, filters: Sequence[str], handler: Handler, *, durable: str = "", patient: bool = False
    ) -> None:
        """Deliver matching events one at a time. With `durable`, from where that name last acknowledged
        (a new name starts at the end for facts, at the beginning for commands); without, core subjects only.
        A `patient` durable reader starts at the oldest event that is kept, is never given an event for the last time,
        and its place is kept while it is away. All filters of one call are of one plane (evt, tel or cmd)."""
        ...

    async def release(self, durable: str) -> None:
        """Read no more under that name: what is in hand is finished, what comes waits for the next reader of it, in
        whichever process. Releasing what is not read is no error."""
        ...

    @property
    def connected(self) -> bool: ...

    @property
    def refusal(self) -> str:
        """Why the bus stores no facts and commands though it answers, or "". Such a publish fails at once."""
        ...

    @property
    def counts(self) -> BusCounts: ...

    async def close(self) -> None: ...
