"""What the router reads."""

from typing import Final, get_args

from glowplug.controllers.reads import Reads
from glowplug.controllers.router.messages import EFFECTS
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import facts
from glowplug.policies.start_times import START_TIMES, StartRow

READS: Final = Reads(
    service="router",
    tables={"models": Model, "instances": Instance, START_TIMES: StartRow},
    facts=(
        *get_args(facts.InstanceChange),
        facts.ModelDeployed,
        facts.ModelUndeployed,
    ),
    telemetry=(facts.RouterLoadReported,),
    effects=EFFECTS,
)
