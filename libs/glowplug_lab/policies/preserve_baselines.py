"""The baselines of PreServe section 5.3 that scale by its forecast without the look-ahead.

`proactive` takes the forecast's number, `hybrid` the larger of that and reactive's. Until tokens and capacities are
known, that number is expected concurrency over batch size. Without a forecast, proactive keeps the running instances
(and says so) and hybrid is reactive. A held request always gets an instance.
"""

import math

from glowplug.fleet.throughput import Capacity
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.baselines import ReactiveState, reactive, why_now
from glowplug.policies.scaling.port import ScalingView, settle
from glowplug.policies.scaling.preserve import capacity_in, instances_for, tokens_of

NOTHING_EXPECTED = 0.01  # concurrency below this counts as none


def proactive(view: ScalingView, state: None = None) -> tuple[ScaleDecision, None]:
    """Scale to the forecast's number of instances."""
    wanted, reason = target(view)
    return settle(view, wanted, reason), None


def hybrid(view: ScalingView, state: ReactiveState | None = None) -> tuple[ScaleDecision, ReactiveState | None]:
    """Scale to the larger of the forecast's number and the present demand's."""
    if view.forecast is None:
        return reactive(view, state)
    wanted, reason = target(view)
    if view.needed > wanted:
        wanted, reason = view.needed, why_now(view)
    return settle(view, wanted, reason), None


def target(view: ScalingView) -> tuple[int, str]:
    if view.forecast is None:
        there = max(view.num_coming_or_there, 1) if view.demand else 0
        return there, "there is no forecast, so that what runs stays while requests come"
    forecast, capacity = view.forecast, capacity_in(view.forecast)
    source = f"a forecast that is {max(0.0, view.now_s - forecast.made_at):.0f} s old"
    expected = forecast.concurrency_peak
    if capacity != Capacity() and forecast.prompt_tokens + forecast.response_tokens >= 1:
        return instances_for(forecast, capacity), f"{source} expects {tokens_of(forecast)}"
    if expected >= NOTHING_EXPECTED:
        wanted = math.ceil(expected / view.per_instance - 1e-9)
        return max(1, wanted), f"{source} expects {expected:.2f} requests at once"
    return (1 if view.demand else 0), f"{source} expects nothing"
