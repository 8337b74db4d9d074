"""The tables, facts and telemetry that the autoscaler reads."""

from typing import Final, get_args

from glowplug.controllers.autoscaler.learned import SCALING_LEARNED, LearnedRow
from glowplug.controllers.reads import Reads
from glowplug.domain.access import KEYS, TENANTS, ApiKey, Tenant
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import facts

READS: Final = Reads(
    service="autoscaler",
    tables={
        "models": Model,
        "instances": Instance,
        "nodes": Node,
        SCALING_LEARNED: LearnedRow,
        KEYS: ApiKey,
        TENANTS: Tenant,
    },
    facts=(
        *get_args(facts.InstanceChange),
        facts.RequestWaiting,
        facts.ModelUndeployed,
        facts.ModelKeepAliveAsked,
        facts.ForecastMade,
        facts.KeyRemoved,
        facts.TenantRemoved,
    ),
    telemetry=(facts.RouterLoadReported,),
)
