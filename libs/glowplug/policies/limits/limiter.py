"""Enforce limits of requests and tokens across several routers.

A minute's limits are token buckets, as OpenAI's `limit`, `remaining` and `reset` headers describe. A request takes its
prompt and expected answer at admission, corrected at its end; a bucket below zero makes the next one wait longer.
Tokens of a day and a month (UTC) are counted at the end; reservations of running requests count at their own router.

Every router has a copy of every bucket. About twice a second each reports its admissions (`report`), and the others
subtract them (`take`): nothing is refused while any of the limit is left, however traffic is split. Excess admissions
within a report's delay are paid back first, so that the rate over some seconds is the limit's. Concurrent requests
cannot be paid back and may exceed their limit within that delay, so a scope is reported soon (`urgent`) once a router
has admitted much, runs its even share of them, or sees the limit reached.

A silent router keeps its share, by last reported demand, and the others use the rest; after `gone_s` it is assumed
gone. A router that does not hear its own reports is cut off from the bus, and uses only its share.

Copies differ after a restart or a lost report. Reports contain the amount left: a copy with far more moves part of the
way there; close copies move towards each other, lest the router slightly ahead admit nearly all.

Ours, not a paper's. Memory: one small row per scope used or reported in the last minutes, or with tokens this month.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice

from glowplug.domain.access import AccessLimits
from glowplug.domain.limits import ScopeUse, WindowUse
from glowplug.policies.limits.scope import FULL_S, Left, Limit, LimiterParams, LimitRefusal, Reservation, Scope

# One scope's counts at one router. A bucket is in seconds of its limit: it fills by a second per second, up to a
# minute's amount, and may drop below zero. `part`, this router's part of the limit, scales both.

DAY_S = 86_400
TINY_S = 1e-9  # rounding error
NOTHING_USED = WindowUse("")


@dataclass(frozen=True, slots=True)
class Heard:
    asked_s: float
    num_running: int
    num_held: int
    at: float


@dataclass(slots=True, eq=False)
class ScopeCount:
    """`asked_s` decays, as of `asked_at`; `asked_since_s` is the demand after that."""

    router_id: str
    at: float  # when the buckets were filled
    part: float = 1.0
    requests_left_s: float = FULL_S
    tokens_left_s: float = FULL_S
    requests_s: float = 0.0  # taken here since the last report
    tokens_s: float = 0.0
    num_running: int = 0
    num_held: int = 0
    reserved: int = 0
    asked_s: float = 0.0
    asked_since_s: float = 0.0
    asked_at: float = 0.0
    used_at: float = 0.0
    own: list[int] = field(default_factory=lambda: [0, 0, 0, 0])  # WindowUse: day to month_tokens
    shown: WindowUse = NOTHING_USED  # as last reported
    heard: dict[str, Heard] = field(default_factory=dict)  # this router included
    elsewhere: tuple[int, int] = (0, 0)  # (requests at once, held ones)
    _others: dict[str, WindowUse] = field(default_factory=dict)
    _others_now: tuple[int, int, int, int] = (-1, 0, 0, 0)

    def fill(self, part: float, now_s: float) -> None:
        """Fill both buckets. A shrinking part shrinks the rest, since the difference is others'; a growing part adds
        nothing at once."""
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
        """Return seconds until that much is left; more than a bucket needs a full one."""
        lacking = min(seconds, FULL_S * self.part) - left_s
        return lacking / self.part if lacking > TINY_S else 0.0

    def is_full(self) -> bool:
        return min(self.requests_left_s, self.tokens_left_s) >= FULL_S * self.part

    def asked(self, now_s: float, over_s: float) -> float:
        since_s = max(now_s - self.asked_at, 0.0)
        self.asked_s = self.asked_s * math.exp(-since_s / over_s) + self.asked_since_s
        self.asked_since_s, self.asked_at = 0.0, now_s
        return self.asked_s

    def reported(self, now_s: float, over_s: float) -> float:
        """Note that everything was reported, or has no recipient. Returns the demand."""
        self.requests_s = self.tokens_s = 0.0
        if (own := self.own_use()) is not None:
            self.shown = own
        return self.asked(now_s, over_s)

    @property
    def has_windows(self) -> bool:
        """Whether any tokens of a month are counted that may not be over."""
        return bool(self._others or self.own[2])

    def windows(self) -> tuple[WindowUse, ...]:
        found = [*self._others.values(), *(() if (own := self.own_use()) is None else (own,))]
        return tuple(sorted(found, key=lambda use: use.router_id))

    def own_use(self) -> WindowUse | None:
        """This router's windows; None before any."""
        return WindowUse(self.router_id, *self.own) if self.own[2] else None

    def used(self, now_s: float) -> tuple[int, int]:
        """Return (tokens of this UTC day, of this month) of ended requests, at all routers."""
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
        of_day, of_month = self.used(now_s)
        tokens += self.reserved
        day, month = limits.tokens_per_day, limits.tokens_per_month
        return bool((day and of_day + tokens > day) or (month and of_month + tokens > month))

    def use(self, tokens: int, now_s: float) -> None:
        own, day = self.own, int(now_s // DAY_S)
        if own[0] == day:
            own[1] += tokens
            own[3] += tokens
            return
        month = month_of(now_s)
        self.own = [day, tokens, month, (own[3] if own[2] == month else 0) + tokens]

    def unshown(self, now_s: float) -> tuple[int, int]:
        """Return (tokens of this day, of this month) not reported yet."""
        own, shown = self.own_use(), self.shown
        if own is None:
            return 0, 0
        of_day = own.day_tokens - (shown.day_tokens if shown.day == own.day else 0)
        of_month = own.month_tokens - (shown.month_tokens if shown.month == own.month else 0)
        return of_day if own.day == day_of(now_s) else 0, of_month if own.month == month_of(now_s) else 0

    def merge(self, use: WindowUse) -> None:
        """Merge one router's windows; they only grow, so the larger count is the later."""
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


# The routers that share the limits. A router hears its own reports too, unless it is cut off from the bus.


class Peers:
    """The routers that have reported, this one included. `silent`: not heard for a while; all others, while this router
    is cut off, and none is then assumed gone."""

    def __init__(self, router_id: str, params: LimiterParams) -> None:
        self.router_id, self._params = router_id, params
        self._heard: dict[str, float] = {}
        self._numbers: dict[str, int] = {}
        self._met: tuple[str, ...] = ()  # before this start, until the first refresh
        self.silent: tuple[str, ...] = ()
        self.is_cut = False

    def __contains__(self, router_id: str) -> bool:
        return router_id in self._heard

    def __len__(self) -> int:
        return len(self._heard)

    def others(self) -> list[str]:
        return sorted(router_id for router_id in self._heard if router_id != self.router_id)

    def met(self, router_ids: Iterable[str]) -> None:
        self._met = tuple(router_ids)

    def hear(self, router_id: str, number: int, now_s: float) -> bool:
        """Return whether a report is news; a restarted router continues from a larger number."""
        if number <= self._numbers.get(router_id, -1) and now_s - self._heard[router_id] < self._params.silent_s:
            return False
        if router_id == self.router_id and self.is_cut:  # none could be heard until now
            self._heard = dict.fromkeys(self._heard, now_s)
        self._numbers[router_id], self._heard[router_id] = number, now_s
        return True

    def refresh(self, now_s: float) -> bool:
        """Update silent and gone routers, about as often as reports are made. Returns whether any is newly gone."""
        params = self._params
        for router_id in (self.router_id, *self._met):
            self._heard.setdefault(router_id, now_s)
        self._met = ()
        self.is_cut = len(self._heard) > 1 and now_s - self._heard[self.router_id] > params.silent_s
        if self.is_cut:
            self.silent = tuple(self.others())
            return False
        gone = [router_id for router_id in self.others() if now_s - self._heard[router_id] > params.gone_s]
        for router_id in gone:
            del self._heard[router_id]
            self._numbers.pop(router_id, None)
        self.silent = tuple(r for r in self.others() if now_s - self._heard[r] > params.silent_s)
        return bool(gone)

    def part(self, heard: Mapping[str, Heard]) -> float:
        """Return this router's part of a limit: with the heard routers, or alone if cut off."""
        if not self.silent:
            return 1.0
        shares = self._shares(heard)
        return shares[self.router_id] if self.is_cut else 1.0 - sum(shares[router_id] for router_id in self.silent)

    def _shares(self, heard: Mapping[str, Heard]) -> dict[str, float]:
        """Return all shares, summing to 1, by last reported demand. Every router reads the same reports, so that all
        agree."""
        asked = {r: _asked_s(heard.get(r), at, self._params.demand_s) for r, at in self._heard.items()}
        total, floor = sum(asked.values()), self._params.floor
        even = 1 / len(asked)
        return {r: floor * even + (1 - floor) * (s / total if total > 0 else even) for r, s in asked.items()}


def _asked_s(heard: Heard | None, at: float, over_s: float) -> float:
    """Return demand in seconds of the limit; below 0.01 s it is 0."""
    if heard is None:
        return 0.0
    asked_s = heard.asked_s * math.exp(-max(at - heard.at, 0.0) / over_s)
    return asked_s if asked_s > 0.01 else 0.0


def running_at(peers: Peers, heard: Mapping[str, Heard]) -> tuple[int, int]:
    """Return (requests at once, held ones) at other routers."""
    known = [h for router_id, h in heard.items() if router_id in peers and router_id != peers.router_id]
    return sum(h.num_running for h in known), sum(h.num_held for h in known)


class Limiter:
    """The limits at one router. Times are epoch seconds of its own clock; others' clocks matter only for windows."""

    def __init__(self, router_id: str, params: LimiterParams = LimiterParams()) -> None:
        self.router_id, self.params = router_id, params
        self.peers = Peers(router_id, params)
        self._counts: dict[str, ScopeCount] = {}  # by scope id, longest unreviewed first
        self._changed: dict[str, ScopeCount] = {}  # to be reported, in order
        self._number = 0
        self._with_others_at, self._was_alone = 0.0, False
        self.urgent: dict[str, ScopeCount] = {}
        self.on_urgent: Callable[[], None] | None = None  # called when a scope is to be reported soon

    def __len__(self) -> int:
        return len(self._counts)

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self, scopes: tuple[Scope, ...], tokens: int, now_s: float) -> Reservation | LimitRefusal:
        """Reserve one request with `tokens` expected of prompt and answer in all scopes, or in none. Returns the
        longest refusal."""
        refusal: LimitRefusal | None = None
        counts, known, is_whole = [], self._counts, not self.peers.silent
        for scope in scopes:
            count = known.get(scope.scope_id) or self._new(scope.scope_id, now_s)
            counts.append(count)
            count.fill(1.0 if is_whole else self.peers.part(count.heard), now_s)
            request_s, token_s, most = scope.request_s, scope.token_s, scope.concurrent
            if (
                (request_s and count.requests_left_s < request_s - TINY_S)
                or (token_s and count.tokens_left_s < token_s * tokens - TINY_S)
                or (most and (not is_whole or count.num_running + count.elsewhere[0] >= most))
                or (scope.has_windows and (not is_whole or count.is_short(scope.limits, tokens, now_s)))
            ):
                found = self._refusal(scope, count, tokens, now_s)
                if found is not None and (refusal is None or found.wait_s > refusal.wait_s):
                    refusal = found
        urgent_s = self.params.urgent_s
        for scope, count in zip(scopes, counts, strict=True):
            request_s, tokens_s = scope.request_s, scope.token_s * tokens
            count.asked_since_s += (request_s if request_s > tokens_s else tokens_s) or 1.0
            count.used_at = now_s
            self._changed[scope.scope_id] = count
            if refusal is not None:
                continue
            count.num_running += 1
            count.reserved += tokens
            count.requests_left_s -= request_s
            count.requests_s += request_s
            count.tokens_left_s -= tokens_s
            count.tokens_s += tokens_s
            is_much = count.requests_s > urgent_s or count.tokens_s > urgent_s
            if is_much or (scope.concurrent and self._is_near(scope, count)):
                self._hurry(scope.scope_id, count)
        return refusal if refusal is not None else Reservation(scopes, counts, tokens)

    def _is_near(self, scope: Scope, count: ScopeCount) -> bool:
        running, most = count.num_running, scope.concurrent
        return running * len(self.peers) >= most or running + count.elsewhere[0] >= most

    def _hurry(self, scope_id: str, count: ScopeCount) -> None:
        if len(self.peers) > 1:
            self.urgent[scope_id] = count
            if self.on_urgent is not None:
                self.on_urgent()

    def end(self, reservation: Reservation, tokens: int, now_s: float) -> None:
        """End a request that took `tokens` of prompt and answer."""
        if reservation.is_over:
            return
        if reservation.is_held:
            self.release(reservation)
        reservation.is_over = reservation.was_sent = True
        reserved, is_whole = reservation.tokens, not self.peers.silent
        more = tokens - reserved
        for scope, count in zip(reservation.scopes, reservation.states, strict=True):
            if scope.token_s and more:
                count.fill(1.0 if is_whole else self.peers.part(count.heard), now_s)
                count.tokens_left_s -= scope.token_s * more
                count.tokens_s += scope.token_s * more
            if scope.has_windows and tokens:
                count.use(tokens, now_s)
            if scope.concurrent and self._is_near(scope, count):
                self._hurry(scope.scope_id, count)
            count.num_running -= 1
            count.reserved -= reserved
            self._changed[scope.scope_id] = count

    def hold(self, reservation: Reservation) -> LimitRefusal | None:
        """Count a request as held, or return why not; the caller then has to `end` it. One that was sent on and
        returned is never refused."""
        if reservation.is_held or reservation.is_over:
            return None
        for scope, count in zip(reservation.scopes, reservation.states, strict=True):
            most = scope.limits.queued
            if most and not reservation.was_sent and self._has_too_many(most, count, count.num_held, 1):
                return LimitRefusal(scope.scope_id, Limit.QUEUED, most, self.params.retry_s)
        reservation.is_held = True
        for scope, count in zip(reservation.scopes, reservation.states, strict=True):
            count.num_held += 1
            self._changed[scope.scope_id] = count
        return None

    def release(self, reservation: Reservation) -> None:
        reservation.was_sent = True
        if reservation.is_held:
            reservation.is_held = False
            for scope, count in zip(reservation.scopes, reservation.states, strict=True):
                count.num_held -= 1
                self._changed[scope.scope_id] = count

    def left(self, scopes: tuple[Scope, ...], now_s: float) -> tuple[Left | None, Left | None]:
        """Return (requests, tokens) left this minute, each in the scope with the least."""
        is_whole, part, fewest, least = not self.peers.silent, 1.0, math.inf, math.inf
        requests: Left | None = None
        tokens: Left | None = None
        for scope in scopes:
            request_s, token_s = scope.request_s, scope.token_s
            if not (request_s or token_s):
                continue
            count = self._counts.get(scope.scope_id) or self._new(scope.scope_id, now_s)
            if not is_whole:
                part = self.peers.part(count.heard)
            if count.at != now_s or count.part != part:  # else just filled by `admit`
                count.fill(part, now_s)
            if request_s and (num := count.requests_left_s / request_s) < fewest:
                fewest, left_s = num, count.requests_left_s
                requests = scope.limits.requests_per_minute, int(num + TINY_S) if num > 0 else 0, FULL_S - left_s / part
            if token_s and (num := count.tokens_left_s / token_s) < least:
                least, left_s = num, count.tokens_left_s
                tokens = scope.limits.tokens_per_minute, int(num + TINY_S) if num > 0 else 0, FULL_S - left_s / part
        return requests, tokens

    def _refusal(self, scope: Scope, count: ScopeCount, tokens: int, now_s: float) -> LimitRefusal | None:
        """Return the refusal: a used-up window, else the longer of the minute's limits, else too many at once."""
        limits = scope.limits
        worst: LimitRefusal | None = None
        if scope.request_s and (wait_s := count.wait_s(scope.request_s, count.requests_left_s)):
            worst = LimitRefusal(scope.scope_id, Limit.REQUESTS, limits.requests_per_minute, wait_s)
        wanted_s = scope.token_s * tokens
        if scope.token_s and wanted_s - count.tokens_left_s > TINY_S:
            is_too_large = tokens > limits.tokens_per_minute
            wait_s = math.inf if is_too_large else count.wait_s(wanted_s, count.tokens_left_s)
            if wait_s and (worst is None or wait_s > worst.wait_s):
                worst = LimitRefusal(scope.scope_id, Limit.TOKENS, limits.tokens_per_minute, wait_s)
        most = limits.concurrent
        if most and worst is None and self._has_too_many(most, count, count.num_running, 0):
            worst = LimitRefusal(scope.scope_id, Limit.CONCURRENT, most, self.params.retry_s)
        if scope.has_windows:
            return self._of_windows(scope, count, tokens, self._part(count), now_s) or worst
        return worst

    def _of_windows(
        self, scope: Scope, count: ScopeCount, tokens: int, part: float, now_s: float
    ) -> LimitRefusal | None:
        of_day, of_month = count.used(now_s)
        if self.peers.is_cut:  # others may use their share of the use unseen here
            unseen = count.unshown(now_s)
            of_day += int(unseen[0] * (1 - part) / part)
            of_month += int(unseen[1] * (1 - part) / part)
        limits, wanted = scope.limits, count.reserved + tokens
        if limits.tokens_per_month and of_month + wanted > limits.tokens_per_month:
            return LimitRefusal(scope.scope_id, Limit.MONTH, limits.tokens_per_month, until_next_month_s(now_s))
        if limits.tokens_per_day and of_day + wanted > limits.tokens_per_day:
            return LimitRefusal(scope.scope_id, Limit.DAY, limits.tokens_per_day, until_next_day_s(now_s))
        return None

    def _has_too_many(self, most: int, count: ScopeCount, num_here: int, kind: int) -> bool:
        """Whether one more exceeds the limit, or this router's share if cut off."""
        if self.peers.is_cut:
            return num_here >= max(int(most * self._part(count)), 1)
        return num_here + count.elsewhere[kind] >= most

    def _part(self, count: ScopeCount) -> float:
        return self.peers.part(count.heard) if self.peers.silent else 1.0

    def _new(self, scope_id: str, now_s: float) -> ScopeCount:
        made = self._counts[scope_id] = ScopeCount(self.router_id, now_s, asked_at=now_s, used_at=now_s)
        return made

    # -- reports ------------------------------------------------------------------------------------------------------

    def report(self, now_s: float) -> tuple[int, dict[str, ScopeUse]]:
        """Return (number, use by scope id), about twice a second. Names at most `most_rows` scopes with news, and
        repeats a few windows for restarted routers. Names none once no other router is known for `silent_s`; the first
        report after that begins to name all."""
        if self.peers.refresh(now_s):
            for count in self._counts.values():
                count.elsewhere = running_at(self.peers, count.heard)
        self.urgent.clear()
        self._number = max(self._number + 1, int(now_s * 1000))
        rows: dict[str, ScopeUse] = {}
        if len(self.peers) > 1 or not self._with_others_at:
            self._with_others_at = now_s
        is_alone = now_s - self._with_others_at > self.params.silent_s
        if is_alone:
            for count in self._changed.values():
                count.reported(now_s, self.params.demand_s)
            self._changed.clear()
        elif self._was_alone:
            self._changed |= self._counts
        self._was_alone = is_alone
        for scope_id in list(islice(self._changed, self.params.most_rows)):
            rows[scope_id] = self._row(self._changed.pop(scope_id), now_s)
        for scope_id in list(islice(self._counts, self.params.num_reviewed)):
            count = self._counts.pop(scope_id)
            if self._is_idle(count, now_s):
                continue
            self._counts[scope_id] = count
            if count.has_windows and not is_alone and scope_id not in rows and len(rows) < self.params.most_rows:
                rows[scope_id] = self._row(count, now_s, is_whole=True)
        return self._number, rows

    def report_urgent(self, now_s: float) -> tuple[int, dict[str, ScopeUse]]:
        self._number = max(self._number + 1, int(now_s * 1000))
        rows = {}
        for scope_id in list(islice(self.urgent, self.params.most_rows)):
            rows[scope_id] = self._row(self.urgent.pop(scope_id), now_s)
            self._changed.pop(scope_id, None)
        return self._number, rows

    def _row(self, count: ScopeCount, now_s: float, *, is_whole: bool = False) -> ScopeUse:
        own, shown = count.own_use(), count.shown
        count.fill(self._part(count), now_s)
        windows = count.windows() if is_whole else () if own is None else (own,)
        row = ScopeUse(
            requests_left_s=round(count.requests_left_s, 6),
            tokens_left_s=round(count.tokens_left_s, 6),
            requests_s=count.requests_s,
            tokens_s=count.tokens_s,
            asked_s=count.reported(now_s, self.params.demand_s),
            num_running=count.num_running,
            num_held=count.num_held,
            windows=windows,
        )
        if self.peers.is_cut:
            count.shown = shown
        return row

    def take(self, router_id: str, number: int, rows: Mapping[str, ScopeUse], now_s: float) -> None:
        """Apply a router's report, unless it is older than the last."""
        if not self.peers.hear(router_id, number, now_s):
            return
        is_own = router_id == self.router_id
        for scope_id, row in rows.items():
            count = self._counts.get(scope_id)
            if count is None:
                count = self._new(scope_id, now_s)
                count.requests_left_s, count.tokens_left_s = row.requests_left_s, row.tokens_left_s
            elif not is_own:
                count.fill(self._part(count), now_s)
                count.requests_left_s = self._followed(count.requests_left_s - row.requests_s, row.requests_left_s)
                count.tokens_left_s = self._followed(count.tokens_left_s - row.tokens_s, row.tokens_left_s)
            count.heard[router_id] = Heard(row.asked_s, row.num_running, row.num_held, now_s)
            if is_own:
                continue
            count.elsewhere = running_at(self.peers, count.heard)
            count.used_at = now_s
            for use in row.windows:  # news if this router's copy on disk was lost
                count.merge(use)

    def _followed(self, left_s: float, theirs_s: float) -> float:
        surplus_s, slack_s = left_s - theirs_s, self.params.slack_s
        if surplus_s > slack_s:
            return left_s - (surplus_s - slack_s) * self.params.pull
        return left_s - surplus_s * self.params.nudge if surplus_s > -slack_s else left_s

    def _is_idle(self, count: ScopeCount, now_s: float) -> bool:
        """Drop outdated parts; returns whether nothing is left to remember."""
        for router_id in [r for r in count.heard if r not in self.peers]:
            del count.heard[router_id]
        count.drop_past(now_s)
        if count.has_windows or count.num_running or now_s - count.used_at < self.params.forget_s:
            return False
        count.fill(self._part(count), now_s)
        return count.is_full()

    # -- a copy on disk ------------------------------------------------------------------------------------------------

    def copy(self, now_s: float) -> Iterator[tuple[str, ScopeUse | None]]:
        """Yield (scope id, use) for a restarted router; use is None if not needed. Windows of all routers are included,
        so that those of gone ones survive. The caller may pause."""
        for scope_id, count in list(self._counts.items()):
            count.fill(self._part(count), now_s)
            if not count.has_windows and count.is_full():
                yield scope_id, None
                continue
            left_s = count.requests_left_s, count.tokens_left_s
            yield scope_id, ScopeUse(requests_left_s=left_s[0], tokens_left_s=left_s[1], windows=count.windows())

    def restore(self, others: Iterable[str], kept: Mapping[str, ScopeUse], copied_at: float, now_s: float) -> None:
        self.peers.met(others)
        for scope_id, row in kept.items():
            count = self._new(scope_id, min(copied_at, now_s))
            count.requests_left_s, count.tokens_left_s = row.requests_left_s, row.tokens_left_s
            count.used_at = now_s
            for use in row.windows:
                count.merge(use)
            count.drop_past(now_s)
