"""The shape every controller has, so that one shell and one simulator run them all."""

from typing import Any, Protocol

from glowplug.controllers.effects import Effect


class Controller(Protocol):
    """A pure state machine. Same stimuli and times in, same effects out."""

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Take one stimulus (Event, Tick or the service's own) at `now_s` (epoch seconds)."""
        ...

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Take a whole table as the store has it. Older revisions than those known are ignored."""
        ...


class Heir(Controller, Protocol):
    """A controller of a service whose processes elect a leader. A standby's is made anew at each reading of the
    tables, as the leader's is when its term begins, so that one way of becoming what the tables say is tried all the
    time."""

    def inherit(self, earlier: Any, now_s: float) -> None:
        """Take from an `earlier` controller of the same kind what no table tells (or an emptied store does not),
        before `restore`."""
        ...
