"""The shape of a forecaster: one per model, which learns every window that closes and forecasts those to come.

A name of the kind "prediction" is a factory (`MakeForecaster`); the factory "none" makes one that forecasts nothing. A
factory's `WINDOW_S` is the window its paper uses; a predictor takes it unless its settings give another.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Protocol

from glowplug.domain.snapshot import Forecast, Quantile
from glowplug.fleet.forecasts import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTotals:
    """The load of one closed window of one model. Tokens and requests are sums over it."""

    started_at: float  # epoch seconds
    window_s: float
    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    concurrency_mean: float = 0.0  # time-weighted (WarmServe section 5.1)
    concurrency_peak: float = 0.0  # the highest (WarmServe section 5.1)


class Forecaster(Protocol):
    """One model's forecaster. Deterministic: the same windows give the same forecasts, without a clock or random
    source.

    A factory with `FOLLOWS_STARTS` is asked for as many windows as a start of the model takes, and readers look that
    far ahead; the papers' have a constant number.
    """

    WINDOW_S: ClassVar[float]  # seconds

    def closed(self, window: WindowTotals) -> None:
        """Learn a window that has closed. Every window is passed, empty ones too, oldest first, without a gap; the
        forecaster bounds its own memory."""

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        """Forecast the `num_ahead` windows after the last closed one, the next one first (`starts_at` is where the last
        one ended). Empty while nothing can be said. `source` is the policy's name; the predictor adds `error_ratio` and
        the rates (mu)."""


MakeForecaster = Callable[..., Forecaster]
"""Makes one of windows of so many seconds, and of a `season_s` where it has such a parameter."""


def make_with(make: MakeForecaster, window_s: float, season_s: float = 0.0, alike: Any = None) -> Forecaster:
    """Make one model's forecaster, with seasons of `season_s` where it has seasons (0: a day; a trace squeezed in time
    has shorter ones), and with the object `alike` where it shares one with other models' forecasters (`shared`)."""
    known, given = signature(make).parameters, {}
    if season_s > 0 and "season_s" in known:
        given["season_s"] = season_s
    if alike is not None and "alike" in known:
        given["alike"] = alike
    return make(window_s, **given)


def shared(make: MakeForecaster, window_s: float, season_s: float = 0.0) -> Any:
    """Make the object that the forecasters of one predictor share; None where the policy shares nothing."""
    make_alike = getattr(make, "alike", None)
    return None if make_alike is None else make_alike(window_s, season_s)


NOTHING = Reading(0.0, 0.0, 0.0, 0.0, 0.0)


def reading_of(window: WindowTotals) -> Reading:
    """The five numbers of a closed window."""
    return Reading(*(float(getattr(window, kind)) for kind in Reading._fields))


def mean_of(readings: Collection[Reading]) -> Reading:
    """Mean of the readings, kind by kind; NOTHING without readings."""
    count = max(1, len(readings))
    return Reading(*(sum(kind) / count for kind in zip(*readings, strict=True))) if readings else NOTHING


def forecast_of(
    expected: Reading,
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
