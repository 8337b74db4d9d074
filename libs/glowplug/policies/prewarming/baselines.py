"""No prewarming."""

from glowplug.policies.prewarming.port import PrewarmPlan, PrewarmView, outdated


def nothing(view: PrewarmView) -> PrewarmPlan:
    """Plan no replica; existing ones, left by a policy that was in force before, are worth nothing."""
    return PrewarmPlan(drops=outdated(view))
