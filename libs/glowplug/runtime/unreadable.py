"""Report unreadable table rows: logged once, counted while they last."""

import logging
from collections.abc import Callable, Mapping

from prometheus_client import Gauge

from glowplug.state.rows import shown

log = logging.getLogger(__name__)
NAMED = 5  # rows per table in the log; the gauge counts all


class Unreadable:
    """`gauge(table)` shows rows skipped at the last reading; None: uncounted."""

    def __init__(self, gauge: Callable[[str], Gauge] | None) -> None:
        self._gauge = gauge
        self._known: dict[str, Mapping[str, str]] = {}

    def seen(self, table: str, problems: Mapping[str, str]) -> None:
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
        return len(self._known.get(table, ()))

    def whole(self, table: str, problem: str) -> None:
        """Report a key that is not a table; counts as one row."""
        self.seen(table, {"": problem})
