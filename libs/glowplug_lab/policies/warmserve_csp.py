"""Corrective seasonal predictor: the mean of this window on past days, plus the recent deviation from it.

Paper: WarmServe section 5.1, Eq. 2-4.

    P(k,i)     = 1/D sum_{j=1..D} L(k-j, i)                                        (2) the season
    delta(k,i) = sum_{j=1..N} (L(k,i-j) - P(k,i-j)) 2^(N-j) / (2^N - 1)            (3) the correction
    forecast   = P(k,i) + delta(k,i)                                               (4)

Departures:
- Eq. 3 prints the weight 2^(j-1), which gives the newest error 0.1 % and the oldest 50 % although "more importance to
  more recent errors" is meant (erratum E1). `literal_weights=True` keeps it as printed.
- With fewer than N errors known the weights are normalised over the known ones. On the first day, when there is no
  season, the forecast is the same weighted mean of the last loads themselves.
- A forecast is never negative.

`forecast` is the rule itself, on a whole series. `WarmserveCsp` applies it window by window to every kind of load: the
paper forecasts the average and the peak concurrency of windows of 300 s, each on its own; here requests and tokens are
forecast by the same rule, so that one forecast serves all readers. Both give the same numbers: a season is a running
sum for each window of the day, and of the errors only the last N are kept. So the past of a model costs one row for
each window of the day in which it ever had load, however many days there were: D is all of them. Departure: for windows
after the next one the season changes and the correction stays.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from glowplug.domain.snapshot import Forecast
from glowplug.domain.units import DAY_S
from glowplug.fleet.forecasts import Reading
from glowplug.policies.prediction.port import NOTHING, WindowTotals, forecast_of, reading_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CspParams:
    num_errors: int = 10  # N: lookback windows
    literal_weights: bool = False  # Eq. 3 as printed


def forecast(loads: Sequence[float], windows_per_day: int, params: CspParams = CspParams()) -> float:
    """The load of the window that follows `loads` (any one unit; one value per window, oldest first, no gaps).

    Raises ValueError when there is no day, and returns 0 when there is no load at all.
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
    """P of window `index` (Eq. 2): the mean of that window on the days before; None on the first day."""
    past = [loads[at] for at in range(index - windows_per_day, -1, -windows_per_day)]
    return sum(past) / len(past) if past else None


def _weighted(newest_first: Sequence[float], literal: bool) -> float:
    """Eq. 3: the values' mean, with weights that halve from each to the next older one (or, literally, double)."""
    num = len(newest_first)
    weights = [float(2**at if literal else 2 ** (num - 1 - at)) / float(2**num - 1) for at in range(num)]
    return sum(weight * value for weight, value in zip(weights, newest_first, strict=True))


@dataclass(slots=True)
class WarmserveCsp:
    """One model's predictor. `season_s` is a day; other lengths are for compressed traces."""

    WINDOW_S: ClassVar[float] = 300.0
    window_s: float = 300.0
    params: CspParams = CspParams()
    season_s: float = DAY_S
    _seasons: dict[int, Reading] = field(default_factory=dict)  # window of the day -> sum over past days
    _last: deque[tuple[Reading, Reading | None]] = field(default_factory=deque)  # newest first: load, and error if any
    _count: int = 0  # windows learned
    _ended_at: float = 0.0

    def closed(self, window: WindowTotals) -> None:
        """Learn the newest window: first its error against its season, then its part in the season."""
        reading, number = reading_of(window), self._count
        season = self._season(number)
        error = None if season is None else Reading(*(a - b for a, b in zip(reading, season, strict=True)))
        self._last.appendleft((reading, error))
        if len(self._last) > self.params.num_errors:
            self._last.pop()
        if reading != NOTHING:
            slot = number % self._per_day
            total = self._seasons.get(slot, NOTHING)
            self._seasons[slot] = Reading(*(a + b for a, b in zip(total, reading, strict=True)))
        self._count = number + 1
        self._ended_at = window.started_at + window.window_s

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        """Forecast each window ahead by Eq. 4; on the first day by the weighted mean of the last windows themselves."""
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
            expected = Reading(*(max(0.0, a + b) for a, b in zip(base, corrections, strict=True)))
            starts_at = self._ended_at + n * self.window_s
            found.append(forecast_of(expected, starts_at, self.window_s, now_s, "warmserve_csp"))
        return tuple(found)

    @property
    def _per_day(self) -> int:
        return max(1, round(self.season_s / self.window_s))

    def _season(self, number: int) -> Reading | None:
        """P of window `number` (Eq. 2): its mean on the days before; None on the first day."""
        num_days = number // self._per_day
        if num_days == 0:
            return None
        total = self._seasons.get(number % self._per_day, NOTHING)
        return Reading(*(value / num_days for value in total))
