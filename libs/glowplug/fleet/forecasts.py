"""The latest forecasts of each model, and the demand they expect until a start that begins now serves."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from glowplug.domain.snapshot import Forecast
from glowplug.events.facts import ForecastMade


class Reading(NamedTuple):
    """The load of one window, by kind: each may be forecast by the same rule."""

    num_requests: float
    prompt_tokens: float
    response_tokens: float
    concurrency_mean: float
    concurrency_peak: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """The latest forecasts of one model: `windows` in order, and how many seconds a start takes."""

    windows: tuple[Forecast, ...] = ()
    horizon_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.windows)

    def after(self, fact: ForecastMade, now_s: float) -> "Ahead":
        """What holds once `fact` has come: a late one replaces no newer one, unless that is from the future, since then
        the clock that made it was ahead."""
        made, known = fact.forecasts, self.windows
        is_newer = bool(made) and not (known and made[0].made_at < known[0].made_at <= now_s)
        return Ahead(made, fact.horizon_s) if is_newer else self

    def windows_from(self, at_s: float) -> tuple[Forecast, ...]:
        """The window that holds `at_s` and all later ones; () where none holds it."""
        for number, forecast in enumerate(self.windows):
            if forecast.starts_at <= at_s < forecast.starts_at + forecast.window_s:
                return self.windows[number:]
        return ()

    def nearest(self, at_s: float) -> Forecast | None:
        """The window that holds `at_s`, else the first; the last for one window more; None once that is over."""
        if here := self.windows_from(at_s):
            return here[0]
        if not self.windows:
            return None
        first, last = self.windows[0], self.windows[-1]
        if at_s < first.starts_at or not first.starts_at:
            return first
        return last if at_s <= last.starts_at + 2 * last.window_s else None

    def until_a_start_serves(self, here: Forecast, at_s: float) -> Forecast:
        """`here` with, for each kind of load, the maximum over it and the windows that begin before a start of `at_s`
        serves."""
        after = [one for one in self.windows if here.starts_at < one.starts_at < at_s + self.horizon_s]
        if not after:
            return here
        return replace(here, **{kind: max(getattr(one, kind) for one in (here, *after)) for kind in Reading._fields})

    def changes_at(self, at_s: float) -> float:
        """The first time after `at_s` when a window begins, comes within the horizon or ends; inf without forecasts."""
        edges = (
            at for f in self.windows for at in (f.starts_at - self.horizon_s, f.starts_at, f.starts_at + f.window_s)
        )
        return min((at for at in edges if at > at_s), default=math.inf)

    def is_over(self, now_s: float) -> bool:
        return bool(self.windows) and now_s >= self.windows[-1].starts_at + self.windows[-1].window_s


class Forecasts:
    """Latest forecasts by model, each kept until its last window has been over for a window."""

    def __init__(self) -> None:
        self._ahead: dict[str, Ahead] = {}

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def take(self, fact: ForecastMade, now_s: float) -> None:
        if ahead := self._ahead.get(fact.model_key, Ahead()).after(fact, now_s):
            self._ahead[fact.model_key] = ahead

    def of(self, model_key: str, now_s: float) -> Forecast | None:
        """The window now open, with the highest demand until a start begun now serves; None without one."""
        ahead = self._ahead.get(model_key, Ahead())
        here = ahead.nearest(now_s)
        return ahead.until_a_start_serves(here, now_s) if here is not None else None

    def expected(self, now_s: float) -> dict[str, Forecast]:
        """The forecasts of all models; drops those that are over."""
        found = {key: self.of(key, now_s) for key in self._ahead}
        for key in [key for key, forecast in found.items() if forecast is None]:
            del self._ahead[key]
        return {key: forecast for key, forecast in found.items() if forecast is not None}
