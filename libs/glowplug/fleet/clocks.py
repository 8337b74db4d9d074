"""Lay the times of others on this process's clock, where their events and rows come in.

A message that was sent at s by its sender's clock and arrives at a by ours shows that the sender's clock is ahead by at
least s - a, since no message arrives before it is sent. The largest such bound of the last seconds is taken for the
difference, as some message has hardly been delayed. A time to come is proof at once. A time long ago is a slow clock or
an old message, so it counts only on messages that are not kept for late readers (telemetry, commands, beats), and only
beyond any ordinary delay.

A row is laid once, when it is read: this process's clock never steps, so it is right from then on. `occurred_at` of an
event stays the issuer's, to be compared with other events of the same issuer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.moment import moved, mover_of
from glowplug.events.envelope import COMMANDS, PAYLOADS, Event

AHEAD_S: Final = 0.2  # smaller differences are ordinary, and left alone
BEHIND_S: Final = 3.0  # a message may be under way for as long
WINDOW_S: Final = 5.0
MAX_KNOWN: Final = 10_000
LIVE: Final = COMMANDS | {kind for kind, cls in PAYLOADS.items() if getattr(cls, "TELEMETRY", False)}
T = TypeVar("T")


@dataclass(slots=True)
class _Clock:
    """`newest` and `before`: the largest bounds since `since`, and in the time before it."""

    since: float
    newest: float = -math.inf
    before: float = -math.inf
    ahead_s: float = 0.0  # as taken


class Clocks:
    """The clocks of others, by issuer of events and by node of rows."""

    def __init__(self) -> None:
        self._known: dict[str, _Clock] = {}

    def laid(self, event: Event, now_s: float, *, dated: bool = False) -> Event:
        """Return the event with the times of its payload by this process's clock. `dated`: with its own time, too, for
        people to read."""
        data = event.data
        cls: Any = type(data)
        if mover_of(cls) is None and not dated:
            return event
        row = getattr(data, "instance", None) or getattr(data, "node", None)
        if row is not None:
            ahead_s = self._ahead_of_row(row, now_s)
        else:
            ahead_s = self._ahead(event.issuer, event.occurred_at, now_s, is_live=event.type in LIVE)
        if not ahead_s:
            return event
        occurred_at = event.occurred_at - ahead_s if dated else event.occurred_at
        return replace(event, data=moved(data, -ahead_s), occurred_at=occurred_at)

    def laid_row(self, row: T, now_s: float) -> T:
        """Likewise a row of a table, which its node's agent has written."""
        ahead_s = self._ahead_of_row(row, now_s)
        return moved(row, -ahead_s) if ahead_s else row

    def _ahead_of_row(self, row: Any, now_s: float) -> float:
        name, is_node = row.node_id, isinstance(row, Node)
        is_live = is_node and name in self._known  # at first it may be the last beat of a lost node
        return self._ahead(name, row.heartbeat_at if is_node else row.changed_at, now_s, is_live=is_live)

    def _ahead(self, name: str, at: float, now_s: float, *, is_live: bool) -> float:
        """Take a time of that clock; return how far it is ahead."""
        ahead_s, clock = at - now_s, self._known.get(name)
        if clock is None:
            if len(self._known) >= MAX_KNOWN:
                oldest = next(iter(self._known))
                if now_s - self._known[oldest].since <= 2 * WINDOW_S:  # all are heard of: names may be invented
                    return ahead_s if ahead_s > AHEAD_S else 0.0
                del self._known[oldest]
            clock = self._known[name] = _Clock(now_s)
        elif (age_s := now_s - clock.since) > WINDOW_S:
            self._known[name] = self._known.pop(name)  # the longest silent first
            clock.before = clock.newest if age_s <= 2 * WINDOW_S else -math.inf
            clock.newest, clock.since = -math.inf, now_s
        if ahead_s > clock.newest and (is_live or ahead_s > 0):
            clock.newest = ahead_s
        best = clock.newest if clock.newest > clock.before else clock.before
        if -BEHIND_S <= best <= AHEAD_S or best == -math.inf:
            best = 0.0
        if not -AHEAD_S <= best - clock.ahead_s <= AHEAD_S:
            clock.ahead_s = best
        return clock.ahead_s


def laying(cls: type[Any], clocks: Clocks, clock: Callable[[], float]) -> Callable[[Any], Any] | None:
    """Return how rows of this class are laid as they are read; None if that is never needed."""
    return (lambda row: clocks.laid_row(row, clock())) if cls in (Node, Instance) else None
