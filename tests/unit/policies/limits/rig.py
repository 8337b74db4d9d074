"""Routers with one limit under a virtual clock: late reports, clock skew, an absent bus."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from glowplug.domain.access import AccessLimits
from glowplug.domain.limits import ScopeUse
from glowplug.policies.limits.limiter import Limiter
from glowplug.policies.limits.scope import LimitRefusal, Reservation, Scope

START_S = 1_790_000_000.0
REPORT_EVERY_S, REPORT_SOONEST_S = 0.5, 0.05


def scopes(scope_id: str = "tenant/acme", **limits: int) -> tuple[Scope, ...]:
    return (Scope(scope_id, AccessLimits(**limits)),)


def expect_admitted(answer: Reservation | LimitRefusal) -> Reservation:
    assert isinstance(answer, Reservation), answer
    return answer


def expect_refused(answer: Reservation | LimitRefusal | None) -> LimitRefusal:
    assert isinstance(answer, LimitRefusal)
    return answer


@dataclass
class Routers:
    """Routers by index; `clock_s` is each one's clock offset."""

    num: int
    asked: tuple[Scope, ...]
    delay_s: float = 0.5
    clock_s: tuple[float, ...] = (0.0, 2.0, -2.0)
    now_s: float = START_S
    is_bus_away: bool = False
    is_hurrying: bool = True  # urgent news is reported soon
    dead: set[int] = field(default_factory=set)
    admitted: list[tuple[float, int]] = field(default_factory=list)  # time, router
    refused: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.limiters = [Limiter(f"r-{n}") for n in range(self.num)]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._hurried: set[int] = set()  # about to report urgent news
        for n in range(self.num):
            self._at(self.now_s + REPORT_EVERY_S * n / self.num, lambda n=n: self._report(n))  # type: ignore[misc]

    def clock(self, n: int) -> float:
        return self.now_s + self.clock_s[n]

    def run(self, seconds: float, rates: Callable[[float], list[float]], tokens: int = 0) -> None:
        """Send each router its rate (by the seconds since the call); each request ends at once with its reserved
        tokens.
        """
        began_s, step_s = self.now_s, 0.01
        owed = [0.0] * self.num
        for step in range(round(seconds / step_s)):
            self._until(began_s + step * step_s)
            for n, rate in enumerate(rates(step * step_s)):
                owed[n] += rate * step_s
                while owed[n] >= 1:
                    owed[n] -= 1
                    self.ask(n, tokens)
        self._until(began_s + seconds)

    def ask(self, n: int, tokens: int) -> None:
        answer = self.limiters[n].admit(self.asked, tokens, self.clock(n))
        if isinstance(answer, Reservation):
            self.admitted.append((self.now_s, n))
            self.limiters[n].end(answer, tokens, self.clock(n))
        else:
            self.refused.append((self.now_s, n))
        if self.is_hurrying and self.limiters[n].urgent and n not in self._hurried:
            self._hurried.add(n)
            self._at(self.now_s + REPORT_SOONEST_S, lambda: self._report_urgent(n))

    def _report_urgent(self, n: int) -> None:
        self._hurried.discard(n)
        if n not in self.dead and self.limiters[n].urgent:
            self._send(n, *self.limiters[n].report_urgent(self.clock(n)))

    def per_minute(self, seconds: float) -> float:
        return sum(at > self.now_s - seconds for at, _ in self.admitted) * 60 / seconds

    def refused_within(self, seconds: float) -> int:
        return sum(at > self.now_s - seconds for at, _ in self.refused)

    def _report(self, n: int) -> None:
        self._at(self.now_s + REPORT_EVERY_S, lambda: self._report(n))
        if n in self.dead:
            return
        self._send(n, *self.limiters[n].report(self.clock(n)))

    def _send(self, n: int, number: int, rows: dict[str, ScopeUse]) -> None:
        if not self.is_bus_away:
            for other in range(self.num):
                self._at(self.now_s + self.delay_s, lambda other=other: self._take(other, n, number, rows))  # type: ignore[misc]

    def _take(self, n: int, sender: int, number: int, rows: dict[str, ScopeUse]) -> None:
        if n not in self.dead:
            self.limiters[n].take(f"r-{sender}", number, rows, self.clock(n))

    def _at(self, at: float, job: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at, next(self._order), job))

    def _until(self, at: float) -> None:
        while self._due and self._due[0][0] <= at:
            self.now_s, _, job = heapq.heappop(self._due)
            job()
        self.now_s = at
