"""What the prefetcher of one node reads."""

from typing import Final, get_args

from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.prefetcher.messages import EFFECTS
from glowplug.controllers.reads import Reads
from glowplug.domain.instance import Instance
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model
from glowplug.events import commands, facts

READS: Final = Reads(
    service="prefetcher",
    tables={"models": Model, "instances": Instance, LEADERS: Leader},
    facts=(*get_args(facts.InstanceChange), facts.ModelDeployed, facts.ModelUndeployed),
    commands=(commands.FetchWeights, commands.DropWeights),
    effects=EFFECTS,
)
