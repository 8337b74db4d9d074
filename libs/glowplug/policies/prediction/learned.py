"""Forecasters that need numpy, which the extra `predictor` installs: without it, making one raises an error by its
name."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from glowplug.domain.errors import BadRequest
from glowplug.domain.units import DAY_S
from glowplug.policies.prediction.port import Forecaster


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesParams:
    num_past: int = 12  # k
    num_hidden: int = 8
    num_epochs: int = 120
    learning_rate: float = 0.01
    held_out: float = 0.2  # share of the samples held out, the newest
    max_batch: int = 240  # samples per pass: with more, every second or third one, alternating
    max_days: int = 7  # trained on; a day of 10-minute windows is about 1 kB
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadParams:
    min_days: int = 2  # days of data before the first training
    min_active: float = 0.5  # share of windows with any token
    epochs_per_window: int = 5  # about 50 ms of a core for both series
    season_s: float = DAY_S  # a day; less for traces squeezed in time
    series: SeriesParams = field(default_factory=SeriesParams)


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedParams:
    num_horizons: int = 12  # windows ahead that have weights of their own
    spike_ratio: float = 10.0  # times the highest load kept, above which a window is cut
    max_windows: int = 4032  # most windows kept: 7 days, or less where windows are shorter than 150 s
    season_s: float = DAY_S  # a day; less for traces squeezed in time


def _alike(window_s: float, season_s: float) -> Any:
    """Build the shared object that learns how models change over the day."""
    return _module("combined").Alike(max(1, round((season_s or DAY_S) / window_s)))


@dataclass(frozen=True)
class MakeCombined:
    """The factory of `combined` for the port. Raises BadRequest where numpy is missing."""

    WINDOW_S: float = 300.0
    FOLLOWS_STARTS: bool = True
    alike: Callable[[float, float], Any] = _alike  # builds what the forecasters of several models share

    def __call__(
        self, window_s: float, *, season_s: float = 0.0, alike: Any = None, params: CombinedParams = CombinedParams()
    ) -> Forecaster:
        params = replace(params, season_s=season_s or params.season_s)
        made: Forecaster = _module("combined").Combined(window_s, params, alike=alike)
        return made


@dataclass(frozen=True)
class MakePreserveWorkload:
    """The factory of `preserve_workload` for the port. Raises BadRequest where numpy is missing."""

    WINDOW_S: float = 600.0

    def __call__(
        self, window_s: float, *, season_s: float = 0.0, params: WorkloadParams = WorkloadParams()
    ) -> Forecaster:
        module = _module("preserve_workload")
        made: Forecaster = module.PreserveWorkload(window_s, replace(params, season_s=season_s or params.season_s))
        return made


def _module(name: str) -> Any:
    try:
        return import_module(f"glowplug.policies.prediction.{name}")
    except ImportError as error:
        missing = error.name or "numpy"
        raise BadRequest(
            f"{name} needs {missing}, which the extra brings: pip install 'glowplug[predictor]'",
            param="policy_prediction",
        ) from error


combined = MakeCombined()
preserve_workload = MakePreserveWorkload()
