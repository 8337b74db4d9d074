"""Corrective seasonal predictor: the mean of this window on past days, plus the recent deviation.

Paper: WarmServe section 5.1, Eq. 2-4.

    P(k,i)     = 1/D sum_{j=1..D} L(k-j, i)                                        (2) the season
    delta(k,i) = sum_{j=1..N} (L(k,i-j) - P(k,i-j)) 2^(N-j) / (2^N - 1)            (3) the correction
    forecast   = P(k,i) + delta(k,i)                                               (4)

Departures:
- Eq. 3 prints the weight 2^(j-1), which gives the newest error 0.1 % and the oldest 50 %, against "more importance to
  more recent errors" (erratum E1). `literal_weights=True` keeps it.
- With fewer than N errors the weights are normalised over those. On the first day, without a season, the forecast is
  the same weighted mean of the last loads.
- A forecast is never negative.

`forecast` is the rule on a whole series; `WarmserveCsp` applies it window by window, with the same numbers. The paper
forecasts average and peak concurrency of windows of 300 s; here requests and tokens are forecast too. D is all past
days: a model costs one row for each window of the day that ever had load. Departure: for windows after the next one the
season changes and the correction stays.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from glowplug.domain.bounds import Count
from glowplug.domain.snapshot import Forecast
from glowplug.domain.units import DAY_S
from glowplug.fleet.forecasts import WindowDemand
from glowplug.policies.prediction.port import NOTHING, WindowTotals, forecast_of, reading_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CspParams:
    num_errors: Count = 10  # N
    literal_weights: bool = False  # Eq. 3 as printed


def forecast(loads: Sequence[float], windows_per_day: int, params: CspParams = CspParams()) -> float:
    """Load of the window after `loads` (one value per window, oldest first, no gaps).

    Raises ValueError without windows in a day; returns 0 without any load.
    """
    if windows_per_day < 1:
        raise ValueError(f"{windows_per_day} windows a day")
    here = len(loads)
    errors = []  # newest first
    for back in range(1, min(params.num_errors, here) + 1):
        expected = season(loads, here - back, windows_per_day)
        if expected is not None:
            errors.append(loads[here - back] - expected)
    today = season(loads, here, windows_per_day)
    if today is None:
        recent = [loads[here - back] for back in range(1, min(params.num_errors, here) + 1)]
        return max(0.0, _weighted(recent, params.literal_weights))
    return max(0.0, today + _weighted(errors, params.literal_weights))


def season(loads: Sequence[float], index: int, windows_per_day: int) -> float | None:
    """P of window `index` (Eq. 2); None on the first day."""
    past = [loads[at] for at in range(index - windows_per_day, -1, -windows_per_day)]
    return sum(past) / len(past) if past else None


def _weighted(newest_first: Sequence[float], literal: bool) -> float:
    """Eq. 3, with weights that halve towards older values (or, literally, double)."""
    num = len(newest_first)
    weights = [float(2**at if literal else 2 ** (num - 1 - at)) / float(2**num - 1) for at in range(num)]
    return sum(weight * value for weight, value in zip(weights, newest_first, strict=True))


@dataclass(slots=True)
class WarmserveCsp:
    """`season_s` is a day, or less for compressed traces."""

    WINDOW_S: ClassVar[float] = 300.0
    window_s: float = 300.0
    params: CspParams = CspParams()
    season_s: float = DAY_S
    _seasons: dict[int, WindowDemand] = field(default_factory=dict)  # sums, by window of the day
    _last: deque[tuple[WindowDemand, WindowDemand | None]] = field(
        default_factory=deque
    )  # newest first: load, and error if any
    _count: int = 0
    _ended_at: float = 0.0

    def closed(self, window: WindowTotals) -> None:
        reading, number = reading_of(window), self._count
        season = self._season(number)
        error = None if season is None else WindowDemand(*(a - b for a, b in zip(reading, season, strict=True)))
        self._last.appendleft((reading, error))
        if len(self._last) > self.params.num_errors:
            self._last.pop()
        if reading != NOTHING:
            slot = number % self._per_day
            total = self._seasons.get(slot, NOTHING)
            self._seasons[slot] = WindowDemand(*(a + b for a, b in zip(total, reading, strict=True)))
        self._count = number + 1
        self._ended_at = window.started_at + window.window_s

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        """Forecast by Eq. 4; on the first day by the weighted mean of the last windows."""
        if self._count == 0:
            return ()
        loads = [load for load, _ in self._last]
        errors = [error for _, error in self._last if error is not None]
        found = []
        for n in range(num_ahead):
            season = self._season(self._count + n)
            base, rest = (NOTHING, loads) if season is None else (season, errors)
            by_kind = zip(*rest, strict=True) if rest else [()] * len(base)
            corrections = (_weighted(values, self.params.literal_weights) for values in by_kind)
            expected = WindowDemand(*(max(0.0, a + b) for a, b in zip(base, corrections, strict=True)))
            starts_at = self._ended_at + n * self.window_s
            found.append(forecast_of(expected, starts_at, self.window_s, now_s, "warmserve_csp"))
        return tuple(found)

    @property
    def _per_day(self) -> int:
        return max(1, round(self.season_s / self.window_s))

    def _season(self, number: int) -> WindowDemand | None:
        """P (Eq. 2)."""
        num_days = number // self._per_day
        if num_days == 0:
            return None
        total = self._seasons.get(number % self._per_day, NOTHING)
        return WindowDemand(*(value / num_days for value in total))
