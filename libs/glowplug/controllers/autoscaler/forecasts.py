"""Forecasts as they were last told, by the window they are about."""

from glowplug.domain.snapshot import Forecast
from glowplug.events.facts import ForecastMade


class ForecastBook:
    """model_key -> the forecasts of the latest `forecast.made`. A forecast counts while its window lasts: a predictor
    that falls silent is a predictor without a forecast, once what it said has gone by."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Forecast, ...]] = {}

    def apply(self, told: ForecastMade) -> None:
        """Take it, unless a later one is known."""
        known = self._told.get(told.model_key)
        if not told.forecasts or (known and known[0].made_at > told.forecasts[0].made_at):
            return
        self._told[told.model_key] = told.forecasts

    def at(self, model_key: str, at_s: float) -> tuple[Forecast | None, Forecast | None]:
        """Of the window that holds `at_s`, and of the one after it; None where there is none."""
        told = self._told.get(model_key, ())
        for number, forecast in enumerate(told):
            if forecast.starts_at <= at_s < forecast.starts_at + forecast.window_s:
                return forecast, told[number + 1] if number + 1 < len(told) else None
        return None, None

    def forget(self, model_key: str) -> None:
        """Of a model that is no more."""
        self._told.pop(model_key, None)

    def expire(self, now_s: float) -> None:
        """Drop what is about windows that are over."""
        for key in [k for k, told in self._told.items() if now_s >= told[-1].starts_at + told[-1].window_s]:
            del self._told[key]
