"""The union's plan: how many instances the forecast of tokens takes, made safe by its band, and put right by what came
and by what missed its objective.

Of PreServe (section 4.1, Algorithm 2, line 5), not rounded, for every window w that is forecast:

    need_w = max(P_w / mu_p, D_w / mu_d, (P_w + D_w) / mu_t)

PreServe plans for that number, at the beginning of a window, two windows ahead. Ours:

    s_w  = log(need_w(q) / need_w) / z_q            spread of the forecast's error, by its upper quantile q (a normal's)
    safe = exp(z s_w) need_w                        z: how much of the band is planned for
    seen = need_w (k + n) / (k + e), k = 1 / s^2    n requests have come in this window where e were expected: gamma and
                                                    Poisson, where the forecast knows as much as k requests say; below
                                                    z = 0 as much less as `safe`
    late = (backlog - patience) / start             instances that work off in a start's time what prompts wait for
    up   = max of ceil(max(safe, seen) + late) over the windows that a start begun now comes too late to serve
    down = the same over all windows that are forecast
    N    = max(up, min(there, down))

so that a start is asked for in time, by the seconds that starts of the model take, and none goes that a later window
would start again. z follows what the windows show (`Forecast.objective_ratio`: of their objective, how much they took):

    z += gain (min(ratio, most) - aim)              for each window that has closed

A window that missed raises it by more than one that held lowers it. What one instance takes depends on how many share
the load, on bursts within a window and on the lengths of prompts, so mu alone cannot be right for all of them; z is.

Section 4.3.2 stays: one more for each instance that will fill its cache too far, and none goes meanwhile. With cold data
(no forecast, no tokens or no mu) PreServe's own plan stands as it is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist

from glowplug.domain.phrasing import counted, listed
from glowplug.domain.snapshot import Forecast
from glowplug.policies.scaling import preserve
from glowplug.policies.scaling.port import ScalingView
from glowplug.policies.scaling.preserve import ScalerState, Target
from glowplug.policies.throughput import Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParams:
    """`z` counts spreads of the forecast's error."""

    cold: preserve.PreserveParams = field(default_factory=preserve.PreserveParams)  # and of section 4.3.2
    z: float = 1.0  # to begin with
    z_least: float = -2.0
    z_most: float = 4.0
    gain: float = 0.25
    aim: float = 0.6  # of the objective
    most: float = 3.0  # a window counts as so much of its objective at most
    patience_s: float = 1.0  # of prompts, which an instance may have before it
    start_s: float = 30.0  # where no start has been seen


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """What the plan remembers of one model."""

    scaler: ScalerState = field(default_factory=ScalerState)
    z: float | None = None  # None: no window has been judged
    made_at: float = -1.0  # of the forecast that stands
    seen_at: float = 0.0  # since when arrivals of its window are counted ...
    arrived_before: int = 0  # ... and how many had come by then

    @property
    def answered(self) -> Mapping[str, float]:
        """Instances that were too full, and when one was added for each."""
        return self.scaler.answered


def plan_for(view: ScalingView, state: PlanState, params: PlanParams) -> tuple[Target, PlanState]:
    """How many instances there should be for what is expected, and why."""
    windows = view.windows
    now = windows[0] if windows else None
    if now is None or preserve.capacity_in(now) == Capacity() or all(_tokens(one) < 1 for one in windows):
        target, scaler = preserve.plan_for(view, state.scaler, params.cold)
        return target, replace(state, scaler=scaler)
    state = _judged(view, now, state, params)
    fresh, answered = preserve.overloaded(
        preserve.outlooks_of(view), state.answered, view.num_coming, view.now_s, params.cold.scaler
    )
    state = replace(state, scaler=replace(state.scaler, answered=answered))
    there, seen = view.num_coming_or_there, seen_ratio(view, now, state)
    start_s, z = view.start_s or params.start_s, params.z if state.z is None else state.z
    late = backlog(view, now, params) / start_s
    needs = [(one, math.ceil(need(one, z, seen) + late - 1e-9)) for one in windows]
    up, why = max(
        ((num, one) for one, num in needs if one.starts_at < view.now_s + start_s or one is now), key=lambda pair: pair[0]
    )
    down = max(num for _, num in needs)
    wanted = max(1, up, min(there, down))
    reason = _reason(view, why, up, wanted, seen, late)
    if answered and wanted < there + len(fresh):
        wanted = there + len(fresh)
        full = f"more than {params.cold.scaler.overload_ratio:.0%} of the KV cache"
        said = f"{listed(fresh)} will fill {full}" if fresh else f"{counted(len(answered), 'instance')} filled {full}"
        reason = said if fresh else f"{said} a moment ago"
    return Target(num_wanted=wanted, reason=reason), state


def need(one: Forecast, z: float, seen: float = 1.0) -> float:
    """Instances that a window takes, not rounded: `z` spreads above what is expected, or as what came so far says."""
    expected = preserve.share_of(one.prompt_tokens, one.response_tokens, one.window_s, preserve.capacity_in(one))
    wide = spread(one)
    return expected * max(math.exp(z * wide), seen * math.exp(min(0.0, z) * wide))


def spread(one: Forecast) -> float:
    """s_w: of the log of what comes over what is expected; 0 where the policy says no band."""
    capacity = preserve.capacity_in(one)
    expected = preserve.share_of(one.prompt_tokens, one.response_tokens, one.window_s, capacity)
    upper = one.quantiles[-1] if one.quantiles else None
    if upper is None or not 0.5 < upper.share < 1 or expected <= 0:
        return 0.0
    high = preserve.share_of(upper.prompt_tokens, upper.response_tokens, one.window_s, capacity)
    return max(0.0, math.log(high / expected)) / NormalDist().inv_cdf(upper.share) if high > 0 else 0.0


def seen_ratio(view: ScalingView, now: Forecast, state: PlanState) -> float:
    """What this window brings over what was expected of it, by the requests that have come so far; at least 1."""
    elapsed_s, wide = view.now_s - state.seen_at, spread(now)
    if not (view.load.num_arrived and now.num_requests > 0 and elapsed_s > 0 and wide > 0):
        return 1.0
    expected = now.num_requests * min(1.0, elapsed_s / now.window_s)
    came, weight = view.load.num_arrived - state.arrived_before, 1 / wide**2
    return max(1.0, (weight + came) / (weight + expected))


def backlog(view: ScalingView, now: Forecast, params: PlanParams) -> float:
    """Seconds of one instance that the prompts take which wait beyond what each READY one may have before it."""
    if now.prompt_per_s <= 0 or now.num_requests <= 0:
        return 0.0
    outlooks = view.load.outlook_by_instance
    queued = sum(outlooks[i.instance_id].queued_tokens for i in view.ready if i.instance_id in outlooks)
    waiting = view.load.num_waiting * now.prompt_tokens / now.num_requests
    return max(0.0, (queued + waiting) / now.prompt_per_s - params.patience_s * len(view.ready))


def _judged(view: ScalingView, now: Forecast, state: PlanState, params: PlanParams) -> PlanState:
    """The state once a new forecast has come: what the window before took of its objective moves z."""
    if now.made_at == state.made_at:
        return state
    z = params.z if state.z is None else state.z
    if now.objective_ratio > 0:
        z += params.gain * (min(now.objective_ratio, params.most) - params.aim)
    z = min(params.z_most, max(params.z_least, z))
    return replace(state, z=z, made_at=now.made_at, seen_at=view.now_s, arrived_before=view.load.num_arrived)


def _tokens(one: Forecast) -> float:
    return one.prompt_tokens + one.response_tokens


def _reason(view: ScalingView, one: Forecast, up: int, wanted: int, seen: float, late: float) -> str:
    """Why so many."""
    if up < wanted:
        return "a later window is expected to take as many as there are"
    ahead_s = max(0.0, one.starts_at - view.now_s)
    within = f"in the window that begins in {ahead_s:.0f} s" if ahead_s else "in this window"
    reason = f"{preserve.tokens_of(one)} are expected {within}"
    if seen > 1.2:
        reason += f", and {seen:.1f} times of what was expected has come so far"
    return f"{reason}, and prompts wait for {late:.1f} instances more" if late >= 0.5 else reason
