"""Settings of the predictor."""

from pydantic import Field

from glowplug.runtime.settings import ElectedSettings


class PredictorSettings(ElectedSettings):
    policy_prediction: str = "none"  # see docs/policies.md
    window_s: float = Field(0.0, ge=0)  # what is counted and forecast at once; 0: what the policy's paper uses
    num_windows: int = Field(1440, ge=2)  # windows kept of each model
    num_windows_ahead: int = Field(2, ge=1, le=1000)  # windows forecast each time
    season_s: float = Field(0.0, ge=0)  # after which demand repeats, for policies that look for it; 0: a day
