"""The shape every controller has, so that one shell and one simulator run them all."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from glowplug.controllers.effects import Effect
from glowplug.events.envelope import Event

Handler = Callable[[Any, float], list[Effect]]  # (stimulus, now_s) -> effects
Handlers = Mapping[type[Any], Handler]


class Controller(Protocol):
    """A pure state machine. Same stimuli and times in, same effects out."""

    @property
    def handlers(self) -> Handlers:
        """By the class of an event's payload, or of a stimulus of the service's own; Tick among them. A test holds
        this against what the package's reads.py subscribes to."""
        ...

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Take one stimulus (Event, Tick or the service's own) at `now_s` (epoch seconds)."""
        ...

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Take a whole table as the store has it. Older revisions than those known are ignored."""
        ...


class Elected(Controller, Protocol):
    """A controller of a service whose processes elect a leader. A standby's is made anew at each reading of the
    tables, as the leader's is when its term begins, so that one way of becoming what the tables say is tried all the
    time."""

    def inherit(self, earlier: Any, now_s: float) -> None:
        """Take from an `earlier` controller of the same kind what no table tells (or an emptied store does not),
        before `restore`."""
        ...


def dispatch(handlers: Handlers, stimulus: Any, now_s: float) -> list[Effect]:
    """Hand `stimulus` to the handler of its class; an event goes by the class of its payload, and one that nobody
    handles has no effect. Raises TypeError for another stimulus without a handler."""
    if isinstance(stimulus, Event):
        handler = handlers.get(type(stimulus.data))
        return handler(stimulus, now_s) if handler else []
    handler = handlers.get(type(stimulus))
    if handler is None:
        raise TypeError(f"no handler for a {type(stimulus).__name__}")
    return handler(stimulus, now_s)
