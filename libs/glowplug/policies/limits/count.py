"""The counts of one scope at one router: two buckets, the windows of day and month, and requests at once.

A token bucket is kept in seconds of its limit: it fills by a second per second, up to a minute's amount. It may go
below zero. `part` is what this router may use of the limit; the bucket is filled, and its end lies, by that part.
"""

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache

from glowplug.domain.access import AccessLimits
from glowplug.domain.limits import WindowUse
from glowplug.policies.limits.scope import FULL_S

DAY_S = 86_400
TINY_S = 1e-9  # what sums of fractions may be off by
NOTHING_USED = WindowUse("")


@dataclass(frozen=True, slots=True)
class Heard:
    """What a router last reported of a scope."""

    asked_s: float
    num_running: int
    num_held: int
    at: float


@dataclass(slots=True, eq=False)
class Count:
    """One scope's counts. `asked_s` decays, as of `asked_at`; `asked_since_s` was asked for after that."""

    router_id: str  # of the router that counts
    at: float  # as of when the buckets are filled
    part: float = 1.0
    requests_left_s: float = FULL_S
    tokens_left_s: float = FULL_S
    requests_s: float = 0.0  # taken by this router since its last report
    tokens_s: float = 0.0
    num_running: int = 0
    num_held: int = 0
    reserved: int = 0  # tokens of requests that have not ended
    asked_s: float = 0.0
    asked_since_s: float = 0.0
    asked_at: float = 0.0
    used_at: float = 0.0  # last request or report
    own: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # this router's WindowUse: day to month_tokens
    shown: WindowUse = NOTHING_USED  # this router's windows as of its last report
    heard: dict[str, Heard] = field(default_factory=dict)  # by router, this one's among them
    elsewhere: tuple[int, int] = (0, 0)  # (requests at once, held ones among them) at the other routers
    _others: dict[str, WindowUse] = field(default_factory=dict)  # windows of the other routers
    _others_now: tuple[int, int, int, int] = (-1, 0, 0, 0)  # their sums, as a WindowUse's

    def fill(self, part: float, now_s: float) -> None:
        """Bring both buckets up to `now_s`. When the part shrinks, what is left shrinks with it, since the rest is
        others'; when it grows, nothing comes of a sudden."""
        if part != self.part:
            if part < self.part:
                self.requests_left_s *= part / self.part
                self.tokens_left_s *= part / self.part
            self.part = part
        more_s = (now_s - self.at) * part
        self.at = now_s  # also where the clock was set back
        if more_s < 0.0:
            more_s = 0.0
        full_s = FULL_S * part
        left_s = self.requests_left_s + more_s
        self.requests_left_s = left_s if left_s < full_s else full_s
        left_s = self.tokens_left_s + more_s
        self.tokens_left_s = left_s if left_s < full_s else full_s

    def wait_s(self, seconds: float, left_s: float) -> float:
        """The seconds until that much can be taken of a bucket with `left_s`; what is more than the bucket holds needs
        a full bucket."""
        lacking = min(seconds, FULL_S * self.part) - left_s
        return lacking / self.part if lacking > TINY_S else 0.0

    def is_full(self) -> bool:
        """Return whether both buckets were full when they were filled last."""
        return min(self.requests_left_s, self.tokens_left_s) >= FULL_S * self.part

    def asked(self, now_s: float, over_s: float) -> float:
        """Bring the demand up to `now_s` and return it."""
        since_s = max(now_s - self.asked_at, 0.0)
        self.asked_s = self.asked_s * math.exp(-since_s / over_s) + self.asked_since_s
        self.asked_since_s, self.asked_at = 0.0, now_s
        return self.asked_s

    def reported(self, now_s: float, over_s: float) -> float:
        """Note that all of it has been reported, or that there is nobody to tell. Returns the demand."""
        self.requests_s = self.tokens_s = 0.0
        if (own := self.own_use()) is not None:
            self.shown = own
        return self.asked(now_s, over_s)

    @property
    def has_windows(self) -> bool:
        """Whether any router has counted tokens of a month that may not be over."""
        return bool(self._others or self.own[2])

    def windows(self) -> tuple[WindowUse, ...]:
        """What each router has counted, by its id."""
        found = [*self._others.values(), *(() if (own := self.own_use()) is None else (own,))]
        return tuple(sorted(found, key=lambda use: use.router_id))

    def own_use(self) -> WindowUse | None:
        """This router's windows; None before it has counted any."""
        return WindowUse(self.router_id, *self.own) if self.own[2] else None

    def used(self, now_s: float) -> tuple[int, int]:
        """(tokens of this UTC day, of this month) that ended requests took, at all routers as far as known."""
        day = int(now_s // DAY_S)
        if self._others_now[0] != day:
            month, others = month_of(now_s), self._others.values()
            of_day = sum(use.day_tokens for use in others if use.day == day)
            of_month = sum(use.month_tokens for use in others if use.month == month)
            self._others_now = day, of_day, month, of_month
        _, of_day, month, of_month = self._others_now
        own = self.own
        if own[0] == day:
            return of_day + own[1], of_month + own[3]
        return of_day, of_month + own[3] if own[2] == month else of_month

    def is_short(self, limits: AccessLimits, tokens: int, now_s: float) -> bool:
        """Return whether less than `tokens` is left of a day or a month."""
        of_day, of_month = self.used(now_s)
        tokens += self.reserved
        day, month = limits.tokens_per_day, limits.tokens_per_month
        return bool((day and of_day + tokens > day) or (month and of_month + tokens > month))

    def use(self, tokens: int, now_s: float) -> None:
        """Add the tokens of an ended request to this router's windows."""
        own, day = self.own, int(now_s // DAY_S)
        if own[0] == day:
            own[1] += tokens
            own[3] += tokens
            return
        month = month_of(now_s)
        self.own = [day, tokens, month, (own[3] if own[2] == month else 0) + tokens]

    def unshown(self, now_s: float) -> tuple[int, int]:
        """(tokens of this day, of this month) that this router has counted and not reported yet."""
        own, shown = self.own_use(), self.shown
        if own is None:
            return 0, 0
        of_day = own.day_tokens - (shown.day_tokens if shown.day == own.day else 0)
        of_month = own.month_tokens - (shown.month_tokens if shown.month == own.month else 0)
        return of_day if own.day == day_of(now_s) else 0, of_month if own.month == month_of(now_s) else 0

    def merge(self, use: WindowUse) -> None:
        """Take one router's windows as another one knows them. They only grow, so the larger count is the later."""
        is_own = use.router_id == self.router_id
        known = self.own_use() if is_own else self._others.get(use.router_id)
        if known is not None:
            day, day_tokens = max((known.day, known.day_tokens), (use.day, use.day_tokens))
            month, month_tokens = max((known.month, known.month_tokens), (use.month, use.month_tokens))
            use = WindowUse(use.router_id, day, day_tokens, month, month_tokens)
        if is_own:
            self.own = [use.day, use.day_tokens, use.month, use.month_tokens]
        else:
            self._others[use.router_id] = use
            self._others_now = (-1, 0, 0, 0)

    def drop_past(self, now_s: float) -> None:
        """Forget windows of months that are over."""
        month = month_of(now_s)
        for router_id in [r for r, use in self._others.items() if use.month < month]:
            del self._others[router_id]
            self._others_now = (-1, 0, 0, 0)
        if self.own[2] < month:
            self.own = [0, 0, 0, 0]


def day_of(now_s: float) -> int:
    """Days since 1970-01-01, in UTC."""
    return int(now_s // DAY_S)


def month_of(now_s: float) -> int:
    """12 times the year plus the month from 0, in UTC."""
    return _month_of_day(int(now_s // DAY_S))


@lru_cache(maxsize=4)
def _month_of_day(day: int) -> int:
    date = datetime.fromtimestamp(day * DAY_S, UTC)
    return date.year * 12 + date.month - 1


def until_next_day_s(now_s: float) -> float:
    return DAY_S - now_s % DAY_S


def until_next_month_s(now_s: float) -> float:
    date = datetime.fromtimestamp(now_s, UTC)
    following = datetime(date.year + date.month // 12, date.month % 12 + 1, 1, tzinfo=UTC)
    return following.timestamp() - now_s
