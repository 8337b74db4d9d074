"""Settings of the autoscaler."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.policies.systems import UNION
from glowplug.runtime.settings import ElectedSettings, SourceSettings, a_policy


@dataclass(kw_only=True)
class AutoscalerSettings(ElectedSettings, SourceSettings):
    models_dir: Path | None = None  # folder of model files; changes are followed
    access_dir: Path | None = None  # folder of files of tenants and keys; changes are followed
    policy_scaling: Annotated[str, a_policy("scaling")] = UNION.policies["scaling"]
    params: AutoscalerParams = field(default_factory=lambda: AutoscalerParams(**UNION.params["autoscaler"]))
