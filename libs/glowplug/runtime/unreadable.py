"""What a service could not read of its tables: said once, counted as long as it stands."""

import logging
from collections.abc import Callable, Mapping

from prometheus_client import Gauge

from glowplug.state.rows import shown

log = logging.getLogger(__name__)
NAMED = 5  # rows of one table that are named in the log at once; the gauge has the number of all


class Unreadable:
    """`gauge(table)` shows how many rows of a table were left out at its last reading; None where they are not
    counted."""

    def __init__(self, gauge: Callable[[str], Gauge] | None) -> None:
        self._gauge = gauge
        self._known: dict[str, Mapping[str, str]] = {}

    def seen(self, table: str, problems: Mapping[str, str]) -> None:
        """What is wrong with each row that was left out, by its key; nothing when all could be read."""
        known = self._known.get(table, {})
        if problems == known:
            return
        self._known[table] = dict(problems)
        if self._gauge is not None:
            self._gauge(table).set(len(problems))
        fresh = [key for key in problems if problems[key] != known.get(key)]
        for key in fresh[:NAMED]:
            log.warning("row %r of %s cannot be read and is left out: %s", shown(key), table, problems[key])
        if len(fresh) > NAMED:
            log.warning("%d more rows of %s cannot be read and are left out", len(fresh) - NAMED, table)

    def num(self, table: str) -> int:
        """How many rows of a table were left out at its last reading."""
        return len(self._known.get(table, ()))

    def whole(self, table: str, problem: str) -> None:
        """What stands there is no table at all; it counts as one row."""
        self.seen(table, {"": problem})
