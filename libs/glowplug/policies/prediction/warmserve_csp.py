"""Corrective seasonal predictor: the mean of this window on past days, plus what the last windows say about today.

Paper: WarmServe section 5.1, Eq. 2-4.

    P(k,i)     = 1/D sum_{j=1..D} L(k-j, i)                                        (2) the season
    delta(k,i) = sum_{j=1..N} (L(k,i-j) - P(k,i-j)) 2^(N-j) / (2^N - 1)            (3) the correction
    forecast   = P(k,i) + delta(k,i)                                               (4)

Departures:
- Eq. 3 prints the weight 2^(j-1), which gives the newest error 0.1 % and the oldest 50 % although "more importance to
  more recent errors" is meant (erratum E1). `literal_weights=True` keeps it as printed.
- With fewer than N errors known the weights are normalised by those there are. In the first day, when there is no
  season, the forecast is the same weighted mean of the last loads themselves.
- A forecast is never negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CspParams:
    num_days: int = 0  # D: past days averaged; 0 takes all there are ("3 to 6" in the evaluation)
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
        expected = season(loads, here - back, windows_per_day, params.num_days)
        if expected is not None:
            errors.append(loads[here - back] - expected)
    today = season(loads, here, windows_per_day, params.num_days)
    if today is None:
        recent = [loads[here - back] for back in range(1, min(params.num_errors, here) + 1)]
        return max(0.0, _weighted(recent, params.literal_weights))
    return max(0.0, today + _weighted(errors, params.literal_weights))


def season(loads: Sequence[float], index: int, windows_per_day: int, num_days: int = 0) -> float | None:
    """P of window `index` (Eq. 2): the mean of that window on the days before; None on the first day."""
    first = index % windows_per_day
    if num_days > 0:
        first = max(first, index - num_days * windows_per_day)
    past = [loads[at] for at in range(index - windows_per_day, first - 1, -windows_per_day)]
    return sum(past) / len(past) if past else None


def _weighted(newest_first: Sequence[float], literal: bool) -> float:
    """Their mean, with weights that halve from each to the next (or, literally, double)."""
    num = len(newest_first)
    if num == 0:
        return 0.0
    total = float(2**num - 1)
    if literal:
        return sum(value * float(2**at) for at, value in enumerate(newest_first)) / total
    return sum(value * float(2 ** (num - 1 - at)) for at, value in enumerate(newest_first)) / total
