"""The inputs of the router."""

from typing import Final, get_args

from glowplug.controllers.reads import Reads
from glowplug.controllers.router.messages import EFFECTS
from glowplug.domain.access import KEYS, TENANTS, ApiKey, Tenant
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import facts
from glowplug.fleet.start_times import START_TIMES, StartRow

READS: Final = Reads(
    service="router",
    tables={  # in this order: whether calls need a key is known before any model
        TENANTS: Tenant,
        KEYS: ApiKey,
        "models": Model,
        "instances": Instance,
        START_TIMES: StartRow,
    },
    facts=(
        *get_args(facts.InstanceChange),
        facts.ModelDeployed,
        facts.ModelUndeployed,
        facts.KeyChanged,
        facts.KeyRemoved,
        facts.TenantChanged,
        facts.TenantRemoved,
    ),
    telemetry=(facts.RouterLoadReported, facts.RouterUsageReported),
    effects=EFFECTS,
)
