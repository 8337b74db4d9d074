"""The tables and commands that the agent of one node reads."""

from typing import Final

from glowplug.controllers.agent.messages import EFFECTS
from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.reads import Reads
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.lease import Leader
from glowplug.events import commands

READS: Final = Reads(
    service="agent",
    tables={"instances": Instance, "nodes": Node, LEADERS: Leader},
    commands=(
        commands.StartInstance,
        commands.StopInstance,
        commands.JoinStages,
        commands.ConsolidateInstance,
        commands.ResumeInstance,
    ),
    effects=EFFECTS,
)
