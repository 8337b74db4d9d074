"""The predictor's bounds, and what a window must show to say what one instance takes."""

from dataclasses import dataclass, field

from glowplug.domain.bounds import check_bounds
from glowplug.policies.scaling.preserve import Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityParams:
    """What counts as a window that shows what an instance takes, and what is known before the first one."""

    busy_ratio: float = 0.5  # of its batch that an instance must have run on average
    clean_share: float = 0.95  # of a window's requests that must have met their objectives
    min_share: float = 0.2  # of the window that one must have been busy
    normalized_s: float = 0.2  # seconds per response token, for models without objectives
    prompt_per_s: float = 0.0  # what one instance of any model is known to take before the first window
    response_per_s: float = 0.0
    total_per_s: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def profiled(self) -> Capacity:
        """mu before anything was measured."""
        return Capacity(
            prompt_per_s=self.prompt_per_s, response_per_s=self.response_per_s, total_per_s=self.total_per_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorParams:
    window_s: float = 0.0  # 0: what the policy's paper uses
    season_s: float = 0.0  # 0: a day; a trace squeezed in time has shorter ones
    num_windows: int = 1440  # windows kept per model
    max_models: int = 5000  # about 0.3 kB each while idle, and as much for each window in which it was not
    router_lease_s: float = 30.0  # what a router silent for longer held and ran is gone with it
    num_ahead: int = 2  # windows forecast: PreServe looks two ahead (Algorithm 2)
    capacity: CapacityParams = field(default_factory=CapacityParams)

    def __post_init__(self) -> None:
        check_bounds(self, num_windows=2, max_models=1, num_ahead=1)
