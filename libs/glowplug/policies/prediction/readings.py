"""What a window brought as five numbers, and a forecast made of such five."""

from collections.abc import Collection
from typing import NamedTuple

from glowplug.domain.snapshot import Forecast
from glowplug.policies.prediction.port import WindowTotals


class Reading(NamedTuple):
    """One window, by kind of load: each may be forecast by the same rule."""

    num_requests: float
    prompt_tokens: float
    response_tokens: float
    concurrency_mean: float
    concurrency_peak: float


NOTHING = Reading(0.0, 0.0, 0.0, 0.0, 0.0)


def reading_of(window: WindowTotals) -> Reading:
    """The five numbers of a closed window."""
    return Reading(
        float(window.num_requests),
        float(window.prompt_tokens),
        float(window.response_tokens),
        float(window.concurrency_mean),
        float(window.concurrency_peak),
    )


def mean_of(readings: Collection[Reading]) -> Reading:
    """Their mean, kind by kind; of no reading: nothing."""
    count = max(1, len(readings))
    return Reading(*(sum(kind) / count for kind in zip(*readings, strict=True))) if readings else NOTHING


def forecast_of(expected: Reading, starts_at: float, window_s: float, made_at: float, source: str) -> Forecast:
    """The forecast of one window. The peak is never below the mean."""
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
    )
