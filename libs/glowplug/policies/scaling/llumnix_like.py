"""Scaling by the average freeness of the instances, after Llumnix (the baseline of PreServe section 5.3).

Llumnix calls freeness the number of decode steps an instance's batch could still run before its KV cache is full, F =
(M - sum of V) / B with M the cache in tokens, V what each request is counted for and B the batch. When the average is
below `low_steps` for `hold_s` one instance is added; when above `high_steps` for as long, the one with the fewest
requests is drained.

Departures: V is the peak that the router's look-ahead expects, not blocks counted inside the engine, and nothing is
migrated between instances: it is Llumnix-like. Where the KV size of an instance is not known, or no router looks ahead,
the share of its batch in use is compared with `high_ratio` and `low_ratio` instead.
"""

import math
from dataclasses import dataclass

from glowplug.domain.instance import Instance
from glowplug.domain.phrasing import counted
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.port import ScalingView, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class LlumnixParams:
    low_steps: float = 10.0
    high_steps: float = 60.0
    high_ratio: float = 0.9  # share in use above which an instance is full, where steps cannot be counted
    low_ratio: float = 0.4
    hold_s: float = 5.0  # how long a threshold must be passed to count


@dataclass(frozen=True, slots=True, kw_only=True)
class LlumnixState:
    """Since when too little has been free, or too much (epoch seconds; None: not now)."""

    tight_since: float | None = None
    loose_since: float | None = None


def scale(
    view: ScalingView, state: LlumnixState | None = None, params: LlumnixParams = LlumnixParams()
) -> tuple[ScaleDecision, LlumnixState]:
    """Add or drain one instance when the average freeness has been out of its range for a while."""
    state = state or LlumnixState()
    ready, there = view.ready, view.num_coming_or_there
    if not ready:
        wanted = max(there, 1 if view.demand else 0)
        return settle(view, wanted if view.demand else 0, "no instance is ready yet"), LlumnixState()
    spaces = [_free(view, i, params) for i in ready]
    tight, loose = sum(s[0] for s in spaces) / len(ready) < 0, sum(s[1] for s in spaces) / len(ready) > 0
    tight = tight or view.load.num_waiting > 0
    since = LlumnixState(
        tight_since=(view.now_s if state.tight_since is None else state.tight_since) if tight else None,
        loose_since=(view.now_s if state.loose_since is None else state.loose_since) if loose and not tight else None,
    )
    is_coming = there > len(ready)
    if since.tight_since is not None and view.now_s - since.tight_since >= params.hold_s and not is_coming:
        reason = f"{counted(len(ready), 'instance')} had too little free on average for {params.hold_s:g} s"
        return settle(view, there + 1, reason), LlumnixState()
    if since.loose_since is not None and view.now_s - since.loose_since >= params.hold_s:
        reason = f"{counted(len(ready), 'instance')} had much free on average for {params.hold_s:g} s"
        decision = settle(view, there - 1 if there > 1 or not view.demand else there, reason)
        return decision, LlumnixState() if decision.drain else since
    return settle(view, there, f"{counted(len(ready), 'instance')} had neither too little free nor much"), since


def _free(view: ScalingView, instance: Instance, params: LlumnixParams) -> tuple[float, float]:
    """Distances of the instance's freeness from the lower and the upper threshold, each in that threshold's unit."""
    outlook = view.load.outlook_by_instance.get(instance.instance_id)
    batch = view.in_flight(instance)
    if outlook is not None and instance.kv_tokens > 0:
        steps = (1 - outlook.peak_ratio) * instance.kv_tokens / batch if batch else math.inf
        steps = min(steps, 2 * params.high_steps)  # an empty instance does not outweigh all others
        return steps - params.low_steps, steps - params.high_steps
    used = outlook.peak_ratio if outlook is not None else batch / max(1, instance.max_concurrency)
    return params.high_ratio - used, params.low_ratio - used
