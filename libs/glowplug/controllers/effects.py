"""Effects that a controller asks of its shell. Data only; the shell executes, the simulator schedules."""

from dataclasses import dataclass
from typing import Any

from glowplug.domain.decision import DecisionRecord
from glowplug.events.envelope import Event


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Every shell sends one at a fixed period."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Send one fact or command. `cause` gives cause id and trace; the shell adds id, time, issuer, epoch."""

    payload: Any
    cause: Event | None = None


@dataclass(frozen=True, slots=True)
class Save:
    """Write one row of a table the service owns. `value` is a domain dataclass."""

    table: str
    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete one row of a table the service owns."""

    table: str
    key: str


@dataclass(frozen=True, slots=True)
class Record:
    """Keep one decision in the store and publish it."""

    decision: DecisionRecord
    cause: Event | None = None


Effect = Any  # Publish | Save | Remove | Record | a service's own (see its controller)
