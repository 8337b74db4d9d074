"""Settings of the autoscaler."""

from pathlib import Path

from pydantic import Field

from glowplug.domain.instance import Becomes
from glowplug.runtime.settings import ElectedSettings, SourceSettings


class AutoscalerSettings(ElectedSettings, SourceSettings):
    models_dir: Path | None = None  # model files, read at start and again when they change
    models_poll_s: float = Field(1.0, gt=0)
    models_read_s: float = Field(5.0, gt=0)  # a model file (and the size of its weights) is read within it, or kept out
    policy_scaling: str = "union"  # see docs/policies.md
    stop_becomes: Becomes = "prewarmed"  # what an idle instance becomes, if it can
    forecast_lead_s: float = Field(0.0, ge=0)  # policies see the forecast of the window so far ahead
