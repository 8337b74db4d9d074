"""Settings of the predictor."""

from pydantic import Field

from glowplug.controllers.predictor.params import PredictorParams
from glowplug.fleet.throughput import CapacityParams
from glowplug.runtime.settings import ElectedSettings, advanced


class PredictorSettings(ElectedSettings):
    policy_prediction: str = "combined"
    window_s: float = Field(0.0, ge=0)  # length of a window; 0: as in the policy's paper
    num_windows: int = advanced(1440, ge=2)  # windows kept of each model
    num_windows_ahead: int = advanced(2, ge=1, le=1000)  # windows forecast each time
    season_s: float = advanced(0.0, ge=0)  # after which demand repeats; 0: a day
    capacity_busy_ratio: float = advanced(0.5, ge=0)  # of its limits, from which a minute counts
    capacity_clean_share: float = advanced(0.95, ge=0, le=1)  # of its requests in time; below, it was full
    capacity_prompt_per_s: float = advanced(0.0, ge=0)  # of one instance, until measured
    capacity_response_per_s: float = advanced(0.0, ge=0)
    capacity_total_per_s: float = advanced(0.0, ge=0)

    def params(self) -> PredictorParams:
        return self.filled(
            PredictorParams,
            num_ahead=self.num_windows_ahead,
            capacity=CapacityParams(
                busy_ratio=self.capacity_busy_ratio,
                clean_share=self.capacity_clean_share,
                prompt_per_s=self.capacity_prompt_per_s,
                response_per_s=self.capacity_response_per_s,
                total_per_s=self.capacity_total_per_s,
            ),
        )
