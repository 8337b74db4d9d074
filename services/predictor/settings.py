"""Settings of the predictor."""

from pydantic import Field

from glowplug.controllers.predictor.params import PredictorParams
from glowplug.policies.throughput import CapacityParams
from glowplug.runtime.settings import ElectedSettings


class PredictorSettings(ElectedSettings):
    policy_prediction: str = "combined"  # see docs/policies.md
    window_s: float = Field(0.0, ge=0)  # what is counted and forecast at once; 0: what the policy's paper uses
    num_windows: int = Field(1440, ge=2)  # windows kept of each model
    num_windows_ahead: int = Field(2, ge=1, le=1000)  # windows forecast each time
    season_s: float = Field(0.0, ge=0)  # after which demand repeats, for policies that look for it; 0: a day
    capacity_busy_ratio: float = Field(0.5, ge=0)  # of an instance's limits in use, for a minute to show what it takes
    capacity_clean_share: float = Field(0.95, ge=0, le=1)  # of its requests in time, else it was used in full
    capacity_prompt_per_s: float = Field(0.0, ge=0)  # tokens one instance of any model takes, until minutes have shown
    capacity_response_per_s: float = Field(0.0, ge=0)
    capacity_total_per_s: float = Field(0.0, ge=0)

    def params(self) -> PredictorParams:
        return PredictorParams(
            window_s=self.window_s,
            num_windows=self.num_windows,
            num_ahead=self.num_windows_ahead,
            season_s=self.season_s,
            capacity=CapacityParams(
                busy_ratio=self.capacity_busy_ratio,
                clean_share=self.capacity_clean_share,
                prompt_per_s=self.capacity_prompt_per_s,
                response_per_s=self.capacity_response_per_s,
                total_per_s=self.capacity_total_per_s,
            ),
        )
