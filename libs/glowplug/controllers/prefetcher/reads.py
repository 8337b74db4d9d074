"""The inputs of one node's prefetcher."""

from typing import Final, get_args

from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.prefetcher.messages import EFFECTS
from glowplug.controllers.reads import Reads
from glowplug.domain.instance import Instance
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model
from glowplug.events import commands, facts
from glowplug.policies.caching.mcache_importance import CacheFacts, ImportanceParams, request_counter
from glowplug.policies.registry import choose

READS: Final = Reads(
    service="prefetcher",
    tables={"models": Model, "instances": Instance, LEADERS: Leader},
    facts=(*get_args(facts.InstanceChange), facts.ModelDeployed, facts.ModelUndeployed),
    telemetry_if_asked=(facts.RouterLoadReported,),
    commands=(commands.FetchWeights, commands.DropWeights),
    effects=EFFECTS,
)


def reads_of(caching: str, importance: ImportanceParams) -> Reads:
    """Include the routers' loads only for a policy that orders by requests. Raises BadRequest for an unknown policy of
    the kind `caching`."""
    worth = CacheFacts(penalty_s=lambda name, num_bytes: 0.0, importance=importance)
    return READS.asked(request_counter(choose("caching", caching)(worth)) is not None)
