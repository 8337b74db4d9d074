"""The inputs of the placer."""

from collections.abc import Callable
from typing import Any, Final, get_args

from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.operator import CORDONS, Cordon
from glowplug.controllers.reads import Reads
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model
from glowplug.events import commands, facts
from glowplug.fleet.start_times import START_TIMES, StartRow
from glowplug.policies.placement.port import wants_seconds
from glowplug.policies.prewarming.port import reads_profile

READS: Final = Reads(
    service="placer",
    tables={
        "models": Model,
        "nodes": Node,
        "instances": Instance,
        CORDONS: Cordon,
        LEADERS: Leader,
        START_TIMES: StartRow,
    },
    facts=(
        *get_args(facts.InstanceChange),
        facts.NodeJoined,
        facts.NodeLeft,
        facts.ModelDeployed,
        facts.WeightsFetched,
        facts.WeightsPartFetched,
        facts.WeightsFetchFailed,
        facts.ForecastMade,
    ),
    telemetry=(facts.RouterLoadReported, facts.NodeBeat),
    telemetry_if_asked=(facts.RouterRequestsFinished,),
    commands=(commands.PlaceInstance, commands.CancelPlacement),
)


def reads_of(place: Callable[..., Any], prewarm: Callable[..., Any] | None) -> Reads:
    """Include ends of requests only where a policy learns from them."""
    return READS.asked(wants_seconds(place) or reads_profile(prewarm))
