"""The latest forecast of each model, and the demand it expects until a start that begins now serves."""

from glowplug.domain.snapshot import Forecast
from glowplug.events.facts import ForecastMade
from glowplug.policies.prediction.port import is_newer, until, windows_from


class Forecasts:
    """Latest forecasts by model, each kept until its last window has been over for a window."""

    def __init__(self) -> None:
        self._ahead: dict[str, tuple[Forecast, ...]] = {}
        self._horizons_s: dict[str, float] = {}  # model_key -> seconds of a start

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def take(self, fact: ForecastMade, now_s: float) -> None:
        """Take the forecast made when a window closed; a late one does not replace a newer one."""
        if is_newer(fact.forecasts, self._ahead.get(fact.model_key, ()), now_s):
            self._ahead[fact.model_key] = fact.forecasts
            self._horizons_s[fact.model_key] = fact.horizon_s

    def of(self, model_key: str, now_s: float) -> Forecast | None:
        """The window now open, with the highest demand until a start begun now serves; None without one."""
        ahead = self._ahead.get(model_key)
        found = now_open(ahead, now_s) if ahead else None
        return until(found, ahead, now_s + self._horizons_s[model_key]) if found is not None and ahead else None

    def expected(self, now_s: float) -> dict[str, Forecast]:
        """The forecasts of all models; drops those that are over."""
        found = {key: self.of(key, now_s) for key in self._ahead}
        over = [key for key, forecast in found.items() if forecast is None]
        for key in over:
            del self._ahead[key], self._horizons_s[key]
        return {key: forecast for key, forecast in found.items() if forecast is not None}


def now_open(ahead: tuple[Forecast, ...], now_s: float) -> Forecast | None:
    """The forecast of the window now open: the one it lies in, else the first; None when all are over for a window."""
    if here := windows_from(ahead, now_s):
        return here[0]
    last = ahead[-1]
    is_over = last.starts_at > 0 and now_s > last.starts_at + 2 * last.window_s
    return None if is_over else (ahead[0] if now_s < ahead[0].starts_at or not ahead[0].starts_at else last)
