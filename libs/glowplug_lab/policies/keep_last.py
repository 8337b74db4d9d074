"""SLLM-GPU, the autoscaling baseline of WarmServe section 7.1: drained models stay on their GPUs until memory is
needed. The least recently used goes first (among equal starts, the place with the least loss is taken)."""

from glowplug.policies.prewarming.port import PrewarmPlan, PrewarmView, outdated


def keep_last(view: PrewarmView) -> PrewarmPlan:
    """Score replicas by recency: 1 if used now, 1/2 a second later, towards 0."""
    scores = {
        row.instance_id: 1 / (1 + max(0.0, view.now_s - view.last_used_at.get(row.model_key, 0.0)))
        for rows in view.fleet.dormant.values()
        for row in rows
    }
    return PrewarmPlan(drops=outdated(view), scores=scores)
