"""Forecasters that need numpy, which the extra `predictor` brings: without it they are refused by name when made."""

from dataclasses import dataclass, field, replace
from importlib import import_module

from glowplug.domain.errors import BadRequest
from glowplug.domain.units import DAY_S
from glowplug.policies.prediction.port import Forecaster


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesParams:
    num_past: int = 12  # k
    num_hidden: int = 8
    num_epochs: int = 120
    learning_rate: float = 0.01
    held_out: float = 0.2  # share of the samples, the newest
    max_batch: int = 240  # samples a pass sees: with more, every second one, or third, in turns
    max_days: int = 7  # trained on; a day of 10-minute windows is about 1 kB
    literal_scale: bool = False  # min-max of the tokens, as the paper has it, not of their logarithms
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadParams:
    min_days: int = 2  # of data before the first training
    min_active: float = 0.5  # share of windows with any token
    epochs_per_window: int = 5  # about 50 ms of a core for both series
    season_s: float = DAY_S  # a day; less for traces squeezed in time
    series: SeriesParams = field(default_factory=SeriesParams)


@dataclass(frozen=True)
class MakePreserveWorkload:
    """`preserve_workload`: a factory as the port wants it. Raises BadRequest where there is no numpy."""

    WINDOW_S: float = 600.0

    def __call__(
        self, window_s: float, *, season_s: float = 0.0, params: WorkloadParams = WorkloadParams()
    ) -> Forecaster:
        try:
            module = import_module("glowplug.policies.prediction.preserve_workload")
        except ImportError as error:
            missing = error.name or "numpy"
            raise BadRequest(
                f"preserve_workload needs {missing}, which the extra brings: pip install 'glowplug[predictor]'",
                param="policy_prediction",
            ) from error
        made: Forecaster = module.PreserveWorkload(window_s, replace(params, season_s=season_s or params.season_s))
        return made


preserve_workload = MakePreserveWorkload()
