"""Settings of the autoscaler."""

from pathlib import Path

from pydantic import Field

from glowplug.runtime.settings import ElectedSettings


class AutoscalerSettings(ElectedSettings):
    models_dir: Path | None = None  # model files, read at start and again when they change
    models_poll_s: float = Field(1.0, gt=0)
    policy_scaling: str = "reactive"
