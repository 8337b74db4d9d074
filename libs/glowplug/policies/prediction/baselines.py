"""No forecast."""

from dataclasses import dataclass
from typing import ClassVar

from glowplug.domain.snapshot import Forecast
from glowplug.policies.prediction.port import WindowTotals


@dataclass(slots=True)
class Nothing:
    """Forecast nothing."""

    WINDOW_S: ClassVar[float] = 60.0
    window_s: float = 60.0

    def closed(self, window: WindowTotals) -> None:
        """Keep nothing."""

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        return ()
