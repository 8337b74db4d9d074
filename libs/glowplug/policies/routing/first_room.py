"""The first instance with room, of those a router has known longest.

HydraServe's published code sends a request so (the paper does not say): what came first is filled first, and what a
burst added runs out of work soonest and goes by its keep-alive (section 8.1).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from glowplug.domain.snapshot import Target
from glowplug.policies.decisions import RouteDecision


def route(targets: Sequence[Target], params: Mapping[str, Any] | None = None, state: str = "") -> RouteDecision:
    """The first of `targets`, in the order given, that has room."""
    for target in targets:
        if target.num_in_flight < target.max_concurrency:
            return RouteDecision(target.instance_id, "it is the first that may run another request")
    return RouteDecision("", "every instance runs as many requests as it may")
