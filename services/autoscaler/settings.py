"""Settings of the autoscaler."""

from pathlib import Path

from glowplug.domain.instance import Becomes
from glowplug.runtime.settings import ElectedSettings, SourceSettings, advanced


class AutoscalerSettings(ElectedSettings, SourceSettings):
    models_dir: Path | None = None  # folder of model files; changes are followed
    access_dir: Path | None = None  # folder of files of tenants and keys; changes are followed
    policy_scaling: str = "union"
    stop_becomes: Becomes = "prewarmed"  # what an idle instance becomes where its engine can
    forecast_lead_s: float = advanced(0.0, ge=0)  # scaling sees the forecast for this far ahead
