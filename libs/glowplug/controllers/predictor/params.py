"""Bounds and times of the predictor."""

from dataclasses import dataclass, field

from glowplug.domain.bounds import check_bounds
from glowplug.fleet.throughput import CapacityParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorParams:
    window_s: float = 0.0  # 0: as in the policy's paper
    season_s: float = 0.0  # 0: a day; shorter for a trace squeezed in time
    num_windows: int = 1440  # per model
    max_models: int = 5000  # about 0.3 kB each, and per busy window
    router_lease_s: float = 30.0  # then a silent router's load is dropped
    num_ahead: int = 2  # PreServe looks two ahead (Algorithm 2)
    capacity: CapacityParams = field(default_factory=CapacityParams)

    def __post_init__(self) -> None:
        check_bounds(self, num_windows=2, max_models=1, num_ahead=1)
