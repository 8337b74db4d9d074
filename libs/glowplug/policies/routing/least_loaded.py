"""Least request: the instance with the fewest requests in flight (PreServe section 3.2.2, "LR"; WarmServe's router)."""

from collections.abc import Mapping, Sequence
from typing import Any

from glowplug.domain.snapshot import Target
from glowplug.policies.decisions import RouteDecision


def route(targets: Sequence[Target], params: Mapping[str, Any] | None = None, state: str = "") -> RouteDecision:
    """The target with the fewest requests in flight that has room."""
    best: Target | None = None
    for target in targets:
        if target.num_in_flight >= target.max_concurrency:
            continue
        if best is None or (target.num_in_flight, target.instance_id) < (best.num_in_flight, best.instance_id):
            best = target
    if best is None:
        return RouteDecision("", "every instance runs as many requests as it may")
    return RouteDecision(best.instance_id, "it has the fewest requests in flight")
