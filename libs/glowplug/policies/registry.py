"""Policies by name. A service picks one from configuration: `GLOWPLUG_POLICY_<ROOM>=name`."""

from collections.abc import Callable
from typing import Any

from glowplug.domain.errors import BadRequest
from glowplug.policies.placement import first_fit
from glowplug.policies.residency import lru
from glowplug.policies.residency.caching import CACHING
from glowplug.policies.routing import least_loaded, minimum_use, round_robin
from glowplug.policies.scaling import reactive

Policy = Callable[..., Any]

ROOMS: dict[str, dict[str, Policy]] = {
    "routing": {
        "least_loaded": least_loaded.route,
        "round_robin": round_robin.route,
        "minimum_use": minimum_use.route,
    },
    "placement": {"first_fit": first_fit.place},
    "scaling": {"reactive": reactive.scale},
    "residency": {"lru": lru.evict},
    "prediction": {},
    "prewarming": {},
    "caching": {**CACHING},
}


def choose(room: str, name: str) -> Policy:
    """The policy `name` of `room`. Raises BadRequest naming the field and what there is."""
    policies = ROOMS[room]
    if name not in policies:
        known = ", ".join(sorted(policies)) or "none yet"
        raise BadRequest(f"no {room} policy named {name!r} (there are: {known})", param=f"policy_{room}")
    return policies[name]
