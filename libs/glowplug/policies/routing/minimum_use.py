"""Minimum use: the instance whose capacity is used least (PreServe section 3.2.2, "MU").

Departure: the paper weighs GPU utilization and memory usage; a Target carries neither, so use is the share of its
concurrent requests that is taken. On instances of one size this is least request; on unequal ones it is not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from glowplug.domain.snapshot import Target
from glowplug.policies.decisions import RouteDecision


def route(targets: Sequence[Target], params: Mapping[str, Any] | None = None, state: str = "") -> RouteDecision:
    """The target with the lowest `num_in_flight / max_concurrency` that has room."""
    free = [t for t in targets if t.num_in_flight < t.max_concurrency]
    if not free:
        return RouteDecision("", "every instance runs as many requests as it may")
    best = min(free, key=lambda t: (t.num_in_flight / t.max_concurrency, t.instance_id))
    return RouteDecision(best.instance_id, "it uses the smallest share of its slots")
