"""Settings of the placer."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from glowplug.controllers.placer.params import PlacerParams
from glowplug.policies.systems import UNION
from glowplug.runtime.settings import ElectedSettings, a_policy

HOLE_GRACE_S = 3.0  # in which an engine notices a lost stage at its next step, and its agent reports it


@dataclass(kw_only=True)
class PlacerSettings(ElectedSettings):
    policy_placement: Annotated[str, a_policy("placement")] = UNION.policies["placement"]
    policy_eviction: Annotated[str, a_policy("eviction")] = UNION.policies["eviction"]
    policy_prewarming: Annotated[str, a_policy("prewarming")] = UNION.policies["prewarming"]
    params: PlacerParams = field(default_factory=lambda: PlacerParams(**UNION.params["placer"]))

    def controller_params(self) -> PlacerParams:
        return replace(self.params, follows_parts=True, hole_grace_s=HOLE_GRACE_S)
