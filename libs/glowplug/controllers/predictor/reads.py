"""The tables, facts and telemetry that the predictor reads."""

from typing import Final, get_args

from glowplug.controllers.reads import Reads
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import facts

READS: Final = Reads(
    service="predictor",
    tables={"models": Model, "instances": Instance},
    facts=(facts.ModelDeployed, *get_args(facts.InstanceChange)),
    telemetry=(facts.RouterLoadReported, facts.RouterRequestsFinished),
)
