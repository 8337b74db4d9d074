"""The predictor, first form: keeps what happened per model and window, so that forecasts have a past to learn from.

No forecasting policy is in force yet: forecasts are empty and every other service lives without them. Load is
concurrency (WarmServe section 4.1: average is time-weighted, peak is the maximum of a window) and tokens per window
(PreServe section 4.1).
"""

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from glowplug.controllers.effects import Effect, Tick
from glowplug.controllers.load_reports import LoadReports
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events.facts import RequestFinished, RouterLoadReported


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorParams:
    window_s: float = 60.0
    num_windows: int = 1440  # windows kept per model
    max_models: int = 5000  # about 0.3 kB each while idle, and as much for each window in which it was not
    router_lease_s: float = 30.0  # what a router silent for longer held and ran is gone with it


@dataclass(slots=True)
class Window:
    """One window of one model: token counts are exact only where `tokens_exact` covers every request."""

    started_at: float
    num_requests: int = 0
    num_cold: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    num_tokens_exact: int = 0
    concurrency_peak: int = 0
    concurrency_seconds: float = 0.0  # integral of concurrency over the window


@dataclass(slots=True)
class _Series:
    """Windows in which something happened, by number; the others are nothing and cost nothing."""

    first: int = 0  # number of the oldest window kept, empty or not
    last: int = 0  # ... of the open one
    windows: dict[int, Window] = field(default_factory=dict)
    by_router: dict[str, int] = field(default_factory=dict)
    changed_at: float = 0.0

    @property
    def concurrency(self) -> int:
        return sum(self.by_router.values())


class PredictorController:
    """Counts what happened, per model and window; its forecasts stay empty while no forecasting policy is in force."""

    def __init__(self, params: PredictorParams = PredictorParams()) -> None:
        self.params = params
        self.forecasts: dict[str, Forecast] = {}
        self._series: dict[str, _Series] = {}
        self._reports = LoadReports()
        self._heard_at: dict[str, float] = {}  # router_id -> when it reported last

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        if isinstance(stimulus, Tick):
            for router_id in [r for r, at in self._heard_at.items() if now_s - at > self.params.router_lease_s]:
                del self._heard_at[router_id]
                self._reports.forget(router_id)
                self._absent(router_id, frozenset(), now_s)
            for series in self._series.values():
                self._advance(series, now_s)
            return []
        data = stimulus.data
        if isinstance(data, RouterLoadReported):
            self._heard_at[data.router_id] = now_s
            self._absent(data.router_id, self._reports.take(data).keys(), now_s)
            for key, load in data.loads.items():
                self._load(key, data.router_id, load, now_s)
        elif isinstance(data, RequestFinished):
            self._finished(data, now_s)
        return []

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Table `models`: series of models that are gone are dropped, but none over an emptied store."""
        for key in [k for k in self._series if rows and k not in rows]:
            del self._series[key]
        return []

    def inherit(self, earlier: "PredictorController", now_s: float) -> None:
        """The past is nowhere but in the memory of those who lived through it."""
        self.forecasts, self._series = earlier.forecasts, earlier._series
        self._reports, self._heard_at = earlier._reports, earlier._heard_at

    def windows(self, model_key: str) -> list[Window]:
        """Oldest first, empty ones too; the last one is still open."""
        series, width = self._series.get(model_key), self.params.window_s
        if series is None:
            return []
        numbers = range(series.first, series.last + 1)
        return [series.windows.get(n) or Window(started_at=n * width) for n in numbers]

    @property
    def model_keys(self) -> list[str]:
        return sorted(self._series)

    def _of(self, model_key: str, now_s: float) -> _Series | None:
        series = self._series.get(model_key)
        if series is None:
            if len(self._series) >= self.params.max_models:
                return None
            number = int(now_s // self.params.window_s)
            series = self._series[model_key] = _Series(first=number, last=number, changed_at=now_s)
        self._advance(series, now_s)
        return series

    def _open(self, series: _Series) -> Window:
        """The window of now, to be written into."""
        window = series.windows.get(series.last)
        if window is None:
            started_at = series.last * self.params.window_s
            window = series.windows[series.last] = Window(started_at, concurrency_peak=series.concurrency)
        return window

    def _advance(self, series: _Series, now_s: float) -> None:
        """Close windows up to `now_s`, spreading the current concurrency over them; what is too old is dropped."""
        width, number = self.params.window_s, int(now_s // self.params.window_s)
        oldest = number - self.params.num_windows + 1
        if series.last < oldest:  # a long silence of ours: what lies before would be dropped at once
            series.last, series.changed_at = oldest, max(series.changed_at, oldest * width)
        while series.last < number and series.concurrency:
            end = (series.last + 1) * width
            self._open(series).concurrency_seconds += series.concurrency * max(0.0, end - series.changed_at)
            series.changed_at = max(series.changed_at, end)
            series.last += 1
        series.last = max(series.last, number)
        if series.concurrency:
            self._open(series).concurrency_seconds += series.concurrency * max(0.0, now_s - series.changed_at)
        series.changed_at = max(series.changed_at, now_s)
        series.first = max(series.first, oldest)
        while series.windows and (first := next(iter(series.windows))) < oldest:
            del series.windows[first]

    def _load(self, key: str, router_id: str, load: ModelLoad, now_s: float) -> None:
        series = self._of(key, now_s)
        if series is None:
            return
        series.by_router[router_id] = load.num_waiting + load.num_in_flight
        if series.concurrency:
            window = self._open(series)
            window.concurrency_peak = max(window.concurrency_peak, series.concurrency)

    def _absent(self, router_id: str, present: Set[str], now_s: float) -> None:
        """A report is whole: of models that are not in it the router holds and runs nothing (any more)."""
        for key, series in self._series.items():
            if key not in present and router_id in series.by_router:
                self._advance(series, now_s)
                del series.by_router[router_id]

    def _finished(self, data: RequestFinished, now_s: float) -> None:
        series = self._of(data.model_key, now_s)
        if series is None:
            return
        window = self._open(series)
        window.num_requests += 1
        window.num_cold += data.cold
        window.prompt_tokens += data.prompt_tokens
        window.response_tokens += data.response_tokens
        window.num_tokens_exact += data.tokens_exact
