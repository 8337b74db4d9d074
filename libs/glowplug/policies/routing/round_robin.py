"""Round robin: the next instance by id after the one chosen last (PreServe section 3.2.2, a baseline)."""

from collections.abc import Mapping, Sequence
from typing import Any

from glowplug.domain.snapshot import Target
from glowplug.policies.decisions import RouteDecision


def route(targets: Sequence[Target], params: Mapping[str, Any] | None = None, state: str = "") -> RouteDecision:
    """The first target with room whose id follows `state`, wrapping round to the lowest id."""
    free = sorted(t.instance_id for t in targets if t.num_in_flight < t.max_concurrency)
    if not free:
        return RouteDecision("", "every instance runs as many requests as it may")
    after = next((instance_id for instance_id in free if instance_id > state), free[0])
    return RouteDecision(after, "its turn is next")
