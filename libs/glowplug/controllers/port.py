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
