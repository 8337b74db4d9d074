"""No prewarming."""

from glowplug.policies.prewarming.port import PrewarmPlan, PrewarmView, outdated


def nothing(view: PrewarmView) -> PrewarmPlan:
    """Plan no replica, and score existing ones, left by an earlier policy, as worth nothing."""
    return PrewarmPlan(drops=outdated(view))
