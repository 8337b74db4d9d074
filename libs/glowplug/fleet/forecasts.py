"""Keep the latest forecasts of each model, and the demand expected until a start begun now serves."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from glowplug.domain.snapshot import Forecast
from glowplug.events.facts import ForecastMade


class WindowDemand(NamedTuple):
    num_requests: float
    prompt_tokens: float
    response_tokens: float
    concurrency_mean: float
    concurrency_peak: float


@dataclass(frozen=True, slots=True)
class Ahead:
    """Forecasts of one model: ordered `windows`, and the seconds of a start."""

    windows: tuple[Forecast, ...] = ()
    horizon_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.windows)

    def after(self, fact: ForecastMade, now_s: float) -> "Ahead":
        """Return the newer of both; a known one from the future yields, as its maker's clock was ahead."""
        made, known = fact.forecasts, self.windows
        is_newer = bool(made) and not (known and made[0].made_at < known[0].made_at <= now_s)
        return Ahead(made, fact.horizon_s) if is_newer else self

    def windows_from(self, at_s: float) -> tuple[Forecast, ...]:
        """Return the window around `at_s` and all later ones, or ()."""
        for number, forecast in enumerate(self.windows):
            if forecast.starts_at <= at_s < forecast.starts_at + forecast.window_s:
                return self.windows[number:]
        return ()

    def nearest(self, at_s: float) -> Forecast | None:
        """Return the window around `at_s`, else the first; the last for one extra window, then None."""
        if here := self.windows_from(at_s):
            return here[0]
        if not self.windows:
            return None
        first, last = self.windows[0], self.windows[-1]
        if at_s < first.starts_at or not first.starts_at:
            return first
        return last if at_s <= last.starts_at + 2 * last.window_s else None

    def until_a_start_serves(self, here: Forecast, at_s: float) -> Forecast:
        """Return `here` with each kind of load at its maximum until a start at `at_s` serves."""
        after = [one for one in self.windows if here.starts_at < one.starts_at < at_s + self.horizon_s]
        if not after:
            return here
        return replace(
            here, **{kind: max(getattr(one, kind) for one in (here, *after)) for kind in WindowDemand._fields}
        )

    def changes_at(self, at_s: float) -> float:
        """Next time that a window begins, enters the horizon or ends; inf without forecasts."""
        edges = (
            at for f in self.windows for at in (f.starts_at - self.horizon_s, f.starts_at, f.starts_at + f.window_s)
        )
        return min((at for at in edges if at > at_s), default=math.inf)

    def is_over(self, now_s: float) -> bool:
        return bool(self.windows) and now_s >= self.windows[-1].starts_at + self.windows[-1].window_s


class Forecasts:
    """Latest forecasts by model, dropped one window after their last."""

    def __init__(self) -> None:
        self._ahead: dict[str, Ahead] = {}

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def take(self, fact: ForecastMade, now_s: float) -> None:
        if ahead := self._ahead.get(fact.model_key, Ahead()).after(fact, now_s):
            self._ahead[fact.model_key] = ahead

    def of(self, model_key: str, now_s: float) -> Forecast | None:
        """The open window with the highest demand until a start begun now serves, or None."""
        ahead = self._ahead.get(model_key, Ahead())
        here = ahead.nearest(now_s)
        return ahead.until_a_start_serves(here, now_s) if here is not None else None

    def expected(self, now_s: float) -> dict[str, Forecast]:
        """Forecasts of all models, after dropping those that are over."""
        found = {key: self.of(key, now_s) for key in self._ahead}
        for key in [key for key, forecast in found.items() if forecast is None]:
            del self._ahead[key]
        return {key: forecast for key, forecast in found.items() if forecast is not None}
