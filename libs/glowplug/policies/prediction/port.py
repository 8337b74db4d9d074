"""The shape of a forecaster: one per model, fed with every closed window.

A "prediction" policy is a factory (`MakeForecaster`), "none" the one that forecasts nothing. `WINDOW_S` is its paper's
window, unless the predictor's settings give another.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Protocol

from glowplug.domain.snapshot import Forecast, Quantile
from glowplug.fleet.forecasts import WindowDemand


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTotals:
    """One model's load in a closed window; tokens and requests are sums."""

    started_at: float
    window_s: float
    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    concurrency_mean: float = 0.0  # time-weighted (WarmServe section 5.1)
    concurrency_peak: float = 0.0  # the highest (WarmServe section 5.1)


class Forecaster(Protocol):
    """One model's forecaster, deterministic in its windows. With `FOLLOWS_STARTS` it forecasts as many windows as a
    start takes; the papers' number is constant."""

    WINDOW_S: ClassVar[float]  # seconds

    def closed(self, window: WindowTotals) -> None:
        """Learn a closed window: every one, empty too, oldest first. Memory is bounded."""

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        """Forecast the `num_ahead` windows after the last closed one (`starts_at` is its end); () while too little is
        known. `source` is the policy's name; the predictor adds `error_ratio` and the rates (mu)."""


MakeForecaster = Callable[..., Forecaster]
"""Make one with windows, and seasons if any, of so many seconds."""


def make_with(make: MakeForecaster, window_s: float, season_s: float = 0.0, alike: Any = None) -> Forecaster:
    """Make one model's forecaster, with seasons of `season_s` (0: a day) and the shared object `alike` where it has
    them."""
    known, given = signature(make).parameters, {}
    if season_s > 0 and "season_s" in known:
        given["season_s"] = season_s
    if alike is not None and "alike" in known:
        given["alike"] = alike
    return make(window_s, **given)


def shared(make: MakeForecaster, window_s: float, season_s: float = 0.0) -> Any:
    """Make the state shared by a predictor's forecasters, or None."""
    make_alike = getattr(make, "alike", None)
    return None if make_alike is None else make_alike(window_s, season_s)


NOTHING = WindowDemand(0.0, 0.0, 0.0, 0.0, 0.0)


def reading_of(window: WindowTotals) -> WindowDemand:
    return WindowDemand(*(float(getattr(window, kind)) for kind in WindowDemand._fields))


def mean_of(readings: Collection[WindowDemand]) -> WindowDemand:
    count = max(1, len(readings))
    return WindowDemand(*(sum(kind) / count for kind in zip(*readings, strict=True))) if readings else NOTHING


def forecast_of(
    expected: WindowDemand,
    starts_at: float,
    window_s: float,
    made_at: float,
    source: str,
    *,
    quantiles: tuple[Quantile, ...] = (),
    anomaly: str = "",
) -> Forecast:
    """Make the forecast of one window. The peak is never below the mean."""
    return Forecast(
        made_at=made_at,
        window_s=window_s,
        concurrency_mean=expected.concurrency_mean,
        concurrency_peak=max(expected.concurrency_peak, expected.concurrency_mean),
        source=source,
        starts_at=starts_at,
        num_requests=expected.num_requests,
        prompt_tokens=expected.prompt_tokens,
        response_tokens=expected.response_tokens,
        quantiles=quantiles,
        anomaly=anomaly,
    )
