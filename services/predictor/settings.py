"""Settings of the predictor."""

from dataclasses import dataclass, field
from typing import Annotated

from glowplug.controllers.predictor.params import PredictorParams
from glowplug.policies.systems import UNION
from glowplug.runtime.settings import ElectedSettings, a_policy


@dataclass(kw_only=True)
class PredictorSettings(ElectedSettings):
    policy_prediction: Annotated[str, a_policy("prediction")] = UNION.policies["prediction"]
    params: PredictorParams = field(default_factory=PredictorParams)
