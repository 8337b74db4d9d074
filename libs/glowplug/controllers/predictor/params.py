"""Bounds and times of the predictor."""

from dataclasses import dataclass, field
from typing import Annotated

from glowplug.domain.bounds import Bounded, Bounds, Count
from glowplug.domain.reading import SETTING
from glowplug.fleet.throughput import CapacityParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorParams(Bounded):
    window_s: Annotated[float, SETTING] = 0.0  # length of a window; 0: as in the policy's paper
    season_s: float = 0.0  # 0: a day; shorter for a trace squeezed in time
    num_windows: Annotated[int, Bounds(least=2)] = 1440  # per model
    max_models: Count = 5000  # about 0.3 kB each, and per busy window
    router_lease_s: float = 30.0  # then a silent router's load is dropped
    # windows forecast each time; PreServe looks two ahead (Algorithm 2)
    num_ahead: Annotated[Count, Bounds(least=1, most=1000)] = 2
    capacity: CapacityParams = field(default_factory=CapacityParams)
