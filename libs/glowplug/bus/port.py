"""Define the services' bus, and how every bus reads messages."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from glowplug.events import Event, decode
from glowplug.events.envelope import MalformedEvent
from glowplug.events.subjects import is_subject_of

log = logging.getLogger(__name__)
MAX_DELIVER = 5  # deliveries to a durable reader

Handler = Callable[[Event], Awaitable[None]]


class BusUnavailable(Exception):
    """The bus cannot take the event now; the caller's next tick tries again (level-triggered)."""


@dataclass(slots=True)
class BusCounts:
    """Counts of a bus client. `pending`: durable reader -> events waiting at its last delivery."""

    num_reconnects: int = 0
    num_redelivered: int = 0
    num_malformed: int = 0
    num_given_up: int = 0  # durable events whose handler always raised
    num_overflowed: int = 0  # usage events discarded unread
    pending: dict[str, int] = field(default_factory=dict)

    def read(self, subject: str, raw: bytes) -> Event | None:
        """Return the event, or None, counted and logged, if it is malformed or on the wrong subject."""
        try:
            event = decode(raw)
        except MalformedEvent as error:
            log.warning("this service skips an event on %s that it cannot read: %s", subject, error)
        else:
            if is_subject_of(subject, event.data):
                return event
            log.warning(
                "%s has published an event on %s, which is not the subject of %s", event.issuer, subject, event.type
            )
        self.num_malformed += 1
        return None


class Bus(Protocol):
    """At-least-once delivery, in order per subject. Handlers must be idempotent.

    If a handler raises, a durable event is delivered again, at most MAX_DELIVER times, then given up and counted.
    """

    async def publish(self, event: Event) -> None:
        """Return once facts and commands are stored; telemetry is fire and forget. Raises BusUnavailable."""
        ...

    async def subscribe(
        self, filters: Sequence[str], handler: Handler, *, durable: str = "", patient: bool = False
    ) -> None:
        """Deliver matching events one at a time. `durable` resumes at that name's last acknowledgement (new names: the
        end for facts, the beginning for commands); otherwise core subjects only. A `patient` durable reader starts at
        the oldest event, is redelivered without limit, and its place is kept. All filters belong to one plane (evt, tel
        or cmd)."""
        ...

    async def release(self, durable: str) -> None:
        """Stop reading under that name, if it is read: the current event is finished, later ones wait for its next
        reader in any process."""
        ...

    @property
    def connected(self) -> bool: ...

    @property
    def refusal(self) -> str:
        """Why the bus answers but stores no facts and commands, or "". Publishing them then fails at once."""
        ...

    @property
    def counts(self) -> BusCounts: ...

    async def close(self) -> None: ...
