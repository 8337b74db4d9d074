"""What the predictor reads."""

from typing import Final

from glowplug.controllers.reads import Reads
from glowplug.domain.model import Model
from glowplug.events import facts

READS: Final = Reads(
    service="predictor",
    tables={"models": Model},
    facts=(facts.ModelDeployed,),
    telemetry=(facts.RouterLoadReported, facts.RequestFinished),
)
