"""Rates that change, and arrivals that follow them: a renewal process in operational time, where a second lasts as long
as the rate says. Gaps are Gamma with a coefficient of variation; the first one is what is left of a gap already begun,
so that no burst stands at the start of every run."""

import math
from collections.abc import Iterable, Iterator
from random import Random
from typing import NamedTuple

from glowplug.domain.units import DAY_S

WEEK_S = 7 * DAY_S


class Span(NamedTuple):
    """`rate` requests a second in `[from_s, from_s + width_s)`."""

    from_s: float
    width_s: float
    rate: float


def renewal(spans: Iterable[Span], cv: float, chance: Random) -> Iterator[float]:
    """Times of arrivals over spans in order of time, without gaps between them. Raises ValueError for a negative cv."""
    if not cv >= 0:
        raise ValueError(f"arrivals with CV {cv}")
    shape = 1 / max(cv * cv, 1e-4)  # below CV 0.01 it is a clock
    wait = chance.random() * chance.gammavariate(shape + 1, 1 / shape)
    for span in spans:
        if span.rate <= 0:
            continue
        left = span.rate * span.width_s
        while wait < left:
            left -= wait
            yield span.from_s + span.width_s - left / span.rate
            wait = chance.gammavariate(shape, 1 / shape)
        wait -= left


def hours(weekday: tuple[float, ...], weekend: tuple[float, ...], at_s: float) -> float:
    """The share of the mean weekday rate at `at_s` seconds after a Monday's 00:00, between the middles of the hours."""
    middle, within = divmod((at_s - 1800.0) % WEEK_S, 3600.0)

    def at(hour: int) -> float:
        day, of_day = divmod(hour, 24)
        return (weekend if day % 7 >= 5 else weekday)[of_day]

    share = within / 3600.0
    return at(int(middle)) * (1 - share) + at(int(middle) + 1) * share


def stray(sigma: float, keep: float, chance: Random) -> Iterator[float]:
    """Factors around a mean of 1, one per window: exp of an AR(1) of stationary `sigma`."""
    value = chance.gauss(0.0, 1.0)
    step = math.sqrt(max(0.0, 1 - keep * keep))
    while True:
        yield math.exp(sigma * value - sigma * sigma / 2)
        value = keep * value + step * chance.gauss(0.0, 1.0)


def between(quantiles: tuple[float, ...], share: float) -> float:
    """A value of the distribution whose 0 ... 100 % points these are, at `share` in [0, 1)."""
    at = share * (len(quantiles) - 1)
    low = min(int(at), len(quantiles) - 2)
    return quantiles[low] + (at - low) * (quantiles[low + 1] - quantiles[low])
