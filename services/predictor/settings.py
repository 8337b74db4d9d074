"""Settings of the predictor."""

from pydantic import Field

from glowplug.runtime.settings import ElectedSettings


class PredictorSettings(ElectedSettings):
    window_s: float = Field(60.0, gt=0)
    num_windows: int = Field(1440, ge=2)
