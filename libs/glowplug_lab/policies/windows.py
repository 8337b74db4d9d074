"""Forecasters without a load model: the last window, the mean of the last ones, the same time yesterday.

Baselines for learned forecasts (WarmServe section 7.4 and PreServe section 5.2 compare with moving averages and
seasonal models). All are deterministic.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from glowplug.domain.snapshot import Forecast
from glowplug.domain.units import DAY_S
from glowplug.fleet.forecasts import WindowDemand
from glowplug.policies.prediction.port import NOTHING, WindowTotals, forecast_of, mean_of, reading_of


@dataclass(slots=True)
class MovingAverage:
    """Forecast the mean of the last `num_windows`, and of their peaks."""

    WINDOW_S: ClassVar[float] = 60.0
    SOURCE: ClassVar[str] = "moving_average"
    window_s: float = 60.0
    num_windows: int = 10
    _ended_at: float = 0.0
    _past: deque[WindowDemand] = field(default_factory=deque)

    def closed(self, window: WindowTotals) -> None:
        self._past.append(reading_of(window))
        if len(self._past) > self.num_windows:
            self._past.popleft()
        self._ended_at = window.started_at + window.window_s

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        if not self._past:
            return ()
        mean = mean_of(self._past)
        starts = (self._ended_at + n * self.window_s for n in range(num_ahead))
        return tuple(forecast_of(mean, at, self.window_s, now_s, self.SOURCE) for at in starts)


@dataclass(slots=True)
class LastWindow(MovingAverage):
    SOURCE: ClassVar[str] = "last_window"
    num_windows: int = 1


@dataclass(slots=True)
class SeasonalNaive:
    """Forecast the same window `season_s` (a day) before; on the first day, the last window.

    Empty windows are not stored: an idle model costs next to nothing.
    """

    WINDOW_S: ClassVar[float] = 60.0
    window_s: float = 60.0
    season_s: float = DAY_S
    _ended_at: float = 0.0
    _first_at: float | None = None
    _past: dict[int, WindowDemand] = field(default_factory=dict)  # by window number

    def closed(self, window: WindowTotals) -> None:
        if self._first_at is None:
            self._first_at = window.started_at
        number = self._number(window.started_at)
        reading = reading_of(window)
        self._past.pop(number - self._per_season, None)
        if reading == NOTHING:
            self._past.pop(number, None)
        else:
            self._past[number] = reading
        self._ended_at = window.started_at + window.window_s

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        if self._first_at is None:
            return ()
        found = []
        for n in range(num_ahead):
            starts_at = self._ended_at + n * self.window_s
            before_at = starts_at - self.season_s
            last = self._past.get(self._number(self._ended_at) - 1, NOTHING)
            then = self._past.get(self._number(before_at), NOTHING) if before_at >= self._first_at else last
            found.append(forecast_of(then, starts_at, self.window_s, now_s, "seasonal_naive"))
        return tuple(found)

    @property
    def _per_season(self) -> int:
        return max(1, round(self.season_s / self.window_s))

    def _number(self, at_s: float) -> int:
        return round(at_s / self.window_s)
