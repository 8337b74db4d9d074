"""Forecasters that need numpy, which the extra `predictor` brings: without it they are refused by name when made."""

from importlib import import_module
from typing import Any, ClassVar

from glowplug.domain.errors import BadRequest
from glowplug.policies.prediction.port import Forecaster


class MakePreserveWorkload:
    """`preserve_workload`: a factory as the port wants it. Raises BadRequest where there is no numpy."""

    WINDOW_S: ClassVar[float] = 600.0
    HAS_SEASON: ClassVar[bool] = True

    def __call__(self, window_s: float, *, season_s: float = 86400.0, params: Any = None) -> Forecaster:
        try:
            module = import_module("glowplug.policies.prediction.preserve_workload")
        except ImportError as error:
            missing = error.name or "numpy"
            raise BadRequest(
                f"preserve_workload needs {missing}, which the extra brings: pip install 'glowplug[predictor]'",
                param="policy_prediction",
            ) from error
        made: Forecaster = module.PreserveWorkload(window_s, params or module.WorkloadParams(season_s=season_s))
        return made


preserve_workload = MakePreserveWorkload()
