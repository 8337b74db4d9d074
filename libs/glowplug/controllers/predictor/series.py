"""Demand of each model, window by window.

Load is concurrency (WarmServe section 5.1: average is time-weighted, peak is the maximum of a window) and tokens per
window (PreServe section 4.1).
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from glowplug.policies.prediction.port import WindowTotals


@dataclass(slots=True)
class Window:
    """Demand of one model in one window; its token counts are exact where `num_tokens_exact` covers every request."""

    started_at: float
    num_requests: int = 0
    num_cold: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    num_tokens_exact: int = 0
    concurrency_peak: int = 0
    concurrency_seconds: float = 0.0  # integral of concurrency over the window
    num_missed: int = 0  # requests that missed an objective of their model, or failed
    num_judged: int = 0  # requests that count for `objective_sum`
    objective_sum: float = 0.0  # sum of the shares of their objective that they took
    instance_seconds: float = 0.0  # integral of the number of instances that ran something
    kv_peak_ratio: float = 0.0  # fullest KV cache that a router expected
    slots_per_instance: int = 0  # most requests that an instance ran at once; 0: not reported

    @property
    def objective_ratio(self) -> float:
        """The share of its objective that the window took: above 1 it missed. 0 where no request counts."""
        return self.objective_sum / self.num_judged if self.num_judged else 0.0

    def totals(self, window_s: float) -> WindowTotals:
        """The sums that a forecaster learns."""
        return WindowTotals(
            started_at=self.started_at,
            window_s=window_s,
            num_requests=self.num_requests,
            prompt_tokens=self.prompt_tokens,
            response_tokens=self.response_tokens,
            concurrency_mean=self.concurrency_seconds / window_s,
            concurrency_peak=self.concurrency_peak,
        )


@dataclass(frozen=True, slots=True)
class RouterLoad:
    """The requests of a model that one router holds and runs, and the instances that run them."""

    concurrency: int
    busy: Collection[str]


@dataclass(slots=True)
class Series:
    """Windows in which something happened, by number (the start of a window over its width); no others are kept."""

    window_s: float
    num_kept: int
    first: int = 0  # number of the oldest window kept, empty or not
    last: int = 0  # ... of the open one
    windows: dict[int, Window] = field(default_factory=dict)
    by_router: dict[str, RouterLoad] = field(default_factory=dict)  # router_id -> its latest report
    concurrency: int = 0  # of all routers
    changed_at: float = 0.0

    def at(self, number: int) -> Window:
        """The window of that number, closed or open; an empty one where nothing happened."""
        return self.windows.get(number) or Window(started_at=number * self.window_s)

    def open(self) -> Window:
        """The window that is open now, to be written to."""
        window = self.windows.get(self.last)
        if window is None:
            started_at = self.last * self.window_s
            window = self.windows[self.last] = Window(started_at, concurrency_peak=self.concurrency)
        return window

    def advance(self, now_s: float) -> None:
        """Close windows up to `now_s`, spreading the current concurrency over them, and drop those too old."""
        width, number = self.window_s, int(now_s // self.window_s)
        if number == self.last:
            self._spread(now_s)
            return
        oldest = number - self.num_kept + 1
        if self.last < oldest:  # after a long pause of this process, older windows would be dropped at once
            self.last, self.changed_at = oldest, max(self.changed_at, oldest * width)
        while self.last < number and self.concurrency:
            self._spread((self.last + 1) * width)
            self.last += 1
        self.last = max(self.last, number)
        self._spread(now_s)
        self.first = max(self.first, oldest)
        while self.windows and (first := next(iter(self.windows))) < oldest:
            del self.windows[first]

    def report(self, router_id: str, load: RouterLoad, kv_peak_ratio: float = 0.0, slots: int = 0) -> None:
        """Take one router's load from now on, on instances of `slots` each, and the highest KV cache usage that it
        expects of any of them."""
        before = self.by_router.get(router_id)
        self.by_router[router_id] = load
        self.concurrency += load.concurrency - (before.concurrency if before else 0)
        if self.concurrency:
            window = self.open()
            window.concurrency_peak = max(window.concurrency_peak, self.concurrency)
            window.kv_peak_ratio = max(window.kv_peak_ratio, kv_peak_ratio)
            window.slots_per_instance = max(window.slots_per_instance, slots)

    def left(self, router_id: str) -> None:
        """Note that a router holds and runs nothing any more."""
        self.concurrency -= self.by_router.pop(router_id).concurrency

    def _spread(self, until_s: float) -> None:
        """Count the running load up to `until_s`."""
        if self.concurrency:
            seconds, window = max(0.0, until_s - self.changed_at), self.open()
            window.concurrency_seconds += self.concurrency * seconds
            window.instance_seconds += self._num_busy() * seconds
        self.changed_at = max(self.changed_at, until_s)

    def _num_busy(self) -> int:
        if len(self.by_router) == 1:
            return len(next(iter(self.by_router.values())).busy)
        return len({i for load in self.by_router.values() for i in load.busy})
