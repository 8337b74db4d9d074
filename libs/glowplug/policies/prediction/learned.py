"""The factory of `combined`, which needs numpy: without the extra `predictor` it raises BadRequest."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from glowplug.domain.bounds import Count, Positive
from glowplug.domain.errors import BadRequest
from glowplug.domain.units import DAY_S
from glowplug.policies.prediction.port import Forecaster


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinedParams:
    num_horizons: Count = 12  # with weights of their own
    spike_ratio: Positive = 10.0  # times the highest load kept, cutting a window
    max_windows: Count = 4032  # 7 days, or less where windows are shorter than 150 s
    season_s: Positive = DAY_S  # a day; less for traces squeezed in time


def _alike(window_s: float, season_s: float) -> Any:
    return _module("combined").Alike(max(1, round((season_s or DAY_S) / window_s)))


@dataclass(frozen=True)
class MakeCombined:
    """The factory of `combined`. Raises BadRequest without numpy."""

    WINDOW_S: float = 300.0
    FOLLOWS_STARTS: bool = True
    alike: Callable[[float, float], Any] = _alike  # builds the state shared by the forecasters of several models

    def __call__(
        self, window_s: float, *, season_s: float = 0.0, alike: Any = None, params: CombinedParams = CombinedParams()
    ) -> Forecaster:
        params = replace(params, season_s=season_s or params.season_s)
        made: Forecaster = _module("combined").Combined(window_s, params, alike=alike)
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
