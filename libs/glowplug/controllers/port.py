"""The interface of every controller, for one shell and one simulator."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from glowplug.controllers.effects import Effect
from glowplug.events.envelope import Event

Handler = Callable[[Any, float], list[Effect]]  # (stimulus, now_s) -> effects
Handlers = Mapping[type[Any], Handler]


class Controller(Protocol):
    """A pure state machine: the same stimuli and times bring the same effects."""

    @property
    def handlers(self) -> Handlers:
        """Handlers by class of an event's payload, or of a stimulus of the service's own; Tick among them. A test
        compares them with the subscriptions in reads.py."""
        ...

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Take one stimulus (Event, Tick or the service's own) at `now_s` (epoch seconds)."""
        ...

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Take a whole table from the store. Older revisions than those known are ignored."""
        ...


class Elected(Controller, Protocol):
    """A controller of a service with leader election. A standby makes it anew at each reading of the tables, like a
    leader at the begin of its term, so that one way to take up the tables is in use all the time."""

    def inherit(self, earlier: Any, now_s: float) -> None:
        """Take over the state of an `earlier` controller that no table (or an emptied one) has, before `restore`."""
        ...


def dispatch(handlers: Handlers, stimulus: Any, now_s: float) -> list[Effect]:
    """Hand `stimulus` to the handler of its class, an event by its payload's class; an unhandled event has no effect.
    Raises TypeError for another stimulus without a handler."""
    if isinstance(stimulus, Event):
        handler = handlers.get(type(stimulus.data))
        return handler(stimulus, now_s) if handler else []
    handler = handlers.get(type(stimulus))
    if handler is None:
        raise TypeError(f"no handler for a {type(stimulus).__name__}")
    return handler(stimulus, now_s)
