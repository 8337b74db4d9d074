"""PreServe's scaler: the forecast of tokens plans each window, and the look-ahead corrects the plan within it.

Paper: PreServe sections 4.1 and 4.3.2, Algorithms 1 and 2. For the window to come, with P prompt and D response tokens
predicted and mu_p, mu_d, mu_t the most an instance has been seen to serve without missing an objective:

    N = ceil( max(P / mu_p, D / mu_d, (P + D) / mu_t) ), at least 1

so that the instances for a window are there when it begins. Within it: one more instance for each whose anticipated KV
use exceeds 95 % in more than a tenth of the next l steps; and once a window, if every instance stays below 30 % over
all of them, N_c - ceil(sum max U / T_mem) fewer.

Departures:
- The plan is for the larger of this window's forecast and the next one's: the paper takes the next one's alone, which
  drains instances one window early.
- A window's plan is made when its forecast comes, a moment after it has begun.
- An instance that is too full counts as answered for `again_s`, and each starting instance answers one, so that neither
  a flickering figure nor a slow start adds many at once.
- A window begins with no fewer instances than run while one of them is too full or was a moment ago, and within it none
  is drained that the forecast needs: with windows about as long as a start, the next window would have to wait for it.
- The ceiling and the floor of 1 are ours (erratum E32); mu is per instance (E31), as fleet/throughput.py measures
  it; the number to scale down to is read as above, and at least one stays (E36).
- Cold data (section 4.3.3's default mode): without a forecast of tokens, or while an instance's capacity is known from
  neither clean windows nor a profile, the look-ahead alone decides, and the reactive rule where no router looks ahead.
- At least one instance stays, as in the paper, while any load is expected; when none is, the model's keep-alive ends
  the last one. `keep_alive_s: -1` in the model is the paper's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from glowplug.domain.phrasing import counted, listed
from glowplug.domain.snapshot import Forecast, Outlook
from glowplug.fleet.throughput import MEMORY_RATIO, Capacity
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.prediction.preserve_anticipator import NUM_STEPS, OVERLOAD_RATIO, OVERLOAD_SHARE
from glowplug.policies.scaling.baselines import ReactiveParams, ReactiveState, reactive, why_now
from glowplug.policies.scaling.port import ScalingView, settle

WINDOW_S = 600.0  # the paper's, used where there is no forecast
Outlooks = Sequence[tuple[str, Outlook]]  # (instance_id, anticipated load over the next steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerParams:
    overload_ratio: float = OVERLOAD_RATIO
    overload_share: float = OVERLOAD_SHARE
    idle_ratio: float = 0.30
    memory_ratio: float = MEMORY_RATIO  # T_mem
    num_steps: int = NUM_STEPS  # l
    again_s: float = 30.0  # an instance still too full after this adds another


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    """The scaler's memory of one model."""

    window: int = -1  # the last window that began
    shrunk: bool = False  # whether this window has scaled down already
    num_planned: int = 0
    num_forecast: int = 0  # instances that the forecast needed; 0: no forecast
    answered: Mapping[str, float] = field(default_factory=dict)  # too full instance -> when one was added


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The number of instances there should be, and why. `is_cold`: the number comes from the look-ahead, not from a
    plan of tokens."""

    num_wanted: int
    reason: str
    is_cold: bool = False


def tokens_of(predicted: Forecast) -> str:
    """The tokens of a forecast, as a part of a sentence."""
    return f"{predicted.prompt_tokens:.0f} prompt and {predicted.response_tokens:.0f} response tokens"


def capacity_in(known: Forecast) -> Capacity:
    """The capacity (mu) that a forecast carries."""
    return Capacity(prompt_per_s=known.prompt_per_s, response_per_s=known.response_per_s, total_per_s=known.total_per_s)


def instances_for(predicted: Forecast, capacity: Capacity) -> int:
    """N of Algorithm 2, line 5."""
    if predicted.window_s <= 0:
        raise ValueError(f"a window of {predicted.window_s} s")
    share = share_of(predicted.prompt_tokens, predicted.response_tokens, predicted.window_s, capacity)
    return max(1, math.ceil(share - 1e-9))


def share_of(prompt_tokens: float, response_tokens: float, window_s: float, capacity: Capacity) -> float:
    """max(P / mu_p, D / mu_d, (P + D) / mu_t) of Algorithm 2, not rounded: the share of an instance that a window of so
    many tokens takes. A rate of 0 is unknown and does not count."""
    prompt, response = prompt_tokens / window_s, response_tokens / window_s
    needs = (
        (prompt, capacity.prompt_per_s),
        (response, capacity.response_per_s),
        (prompt + response, capacity.total_per_s),
    )
    return max(need / most if most > 0 else 0.0 for need, most in needs)


def overloaded(
    outlooks: Outlooks,
    answered: Mapping[str, float],
    num_coming: int,
    now_s: float,
    params: ScalerParams = ScalerParams(),
) -> tuple[list[str], dict[str, float]]:
    """Instances that will be too full and for which none was added yet, and all that count as answered now."""
    recent = {i: at for i, at in answered.items() if now_s - at < params.again_s}
    hot = sorted(i for i, outlook in outlooks if outlook.over_share > params.overload_share and i not in recent)
    num_answers = max(0, num_coming - len(recent))  # starting, and not yet counted as an answer
    return hot[num_answers:], recent | dict.fromkeys(hot, now_s)


def algorithm_2(
    num_running: int,
    window: int,
    predicted: Forecast | None,
    capacity: Capacity,
    outlooks: Outlooks,
    state: ScalerState,
    params: ScalerParams = ScalerParams(),
    *,
    num_coming: int = 0,
    now_s: float = 0.0,
) -> tuple[Target, ScalerState]:
    """Decide how many instances one model should have now. `num_running` counts the `num_coming`, not draining ones;
    `window` is the number of the present window; `predicted` is its forecast."""
    fresh, answered = overloaded(outlooks, state.answered, num_coming, now_s, params)
    if window != state.window:
        state = ScalerState(window=window, num_planned=num_running, answered=state.answered)
        if predicted is not None and capacity != Capacity():
            planned = instances_for(predicted, capacity)
            wanted, why = planned, f"{tokens_of(predicted)} are expected in this window"
            if answered and planned < num_running + len(fresh):
                wanted, state = num_running + len(fresh), replace(state, answered=answered)
                why = f"{why}, and {counted(len(answered), 'instance')} will be too full or was a moment ago"
            return Target(num_wanted=wanted, reason=why), replace(state, num_planned=wanted, num_forecast=planned)
    state = replace(state, answered=answered)
    if fresh:
        state = replace(state, num_planned=max(num_running, state.num_planned) + len(fresh))
        why = f"{listed(sorted(fresh))} will fill more than {params.overload_ratio:.0%} of the KV cache"
        return Target(num_wanted=state.num_planned, reason=why), state
    calm = outlooks and all(o.peak_ratio < params.idle_ratio for _, o in outlooks)
    if calm and not state.shrunk and num_running > 1:
        wanted = max(1, state.num_forecast, math.ceil(sum(o.peak_ratio for _, o in outlooks) / params.memory_ratio))
        if wanted < num_running:
            why = f"every instance stays below {params.idle_ratio:.0%} of its KV cache"
            return Target(num_wanted=wanted, reason=why), replace(state, shrunk=True, num_planned=wanted)
    why = "nothing is predicted, and no instance is too full or too empty"
    if predicted is not None:
        why = "the plan of this window stands"
    return Target(num_wanted=state.num_planned, reason=why), state


# on the fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class PreserveParams:
    scaler: ScalerParams = field(default_factory=ScalerParams)
    shrink_after_s: float = 10.0  # of the reactive rule, for cold data


@dataclass(frozen=True, slots=True, kw_only=True)
class PreserveState:
    scaler: ScalerState = field(default_factory=ScalerState)
    cold: ReactiveState | None = None  # of the reactive rule, for cold data


def scale(
    view: ScalingView, state: PreserveState | None = None, params: PreserveParams = PreserveParams()
) -> tuple[ScaleDecision, PreserveState]:
    """Decide by forecast and look-ahead how many instances `model` should have, and which to drain or to take back."""
    state = state or PreserveState()
    plan, scaler = plan_for(view, state.scaler, params)
    if plan.is_cold and not view.load.outlook_by_instance:
        decision, kept = reactive(view, state.cold, ReactiveParams(shrink_after_s=params.shrink_after_s))
        return decision, PreserveState(scaler=scaler, cold=kept)
    if plan.is_cold:
        plan, scaler = _look_ahead(view, state.scaler, plan.reason, params)
    wanted = max(plan.num_wanted, 1 if view.demand else 0)
    return settle(view, wanted, plan.reason), PreserveState(scaler=scaler)


def plan_for(view: ScalingView, state: ScalerState, params: PreserveParams) -> tuple[Target, ScalerState]:
    """The current plan of this window (Algorithm 2, then section 4.3.2)."""
    if view.forecast is None:
        return _added(view, state, "there is no forecast", params)
    predicted = _prediction(view.forecast, view.next_forecast)
    if predicted.prompt_tokens + predicted.response_tokens < 1:
        return Target(num_wanted=0, reason="no tokens are expected of it"), state
    capacity = capacity_in(view.forecast)
    if capacity == Capacity():
        return _added(view, state, "no window has shown yet how many tokens an instance takes", params)
    return _on_the_fleet(view, predicted, capacity, state, params)


def _on_the_fleet(
    view: ScalingView, predicted: Forecast | None, capacity: Capacity, state: ScalerState, params: PreserveParams
) -> tuple[Target, ScalerState]:
    """Run Algorithm 2 on the view. A new window, with another number, begins once its forecast comes."""
    return algorithm_2(
        max(1, view.num_coming_or_there),
        int(view.now_s // WINDOW_S) if view.forecast is None else int(view.forecast.made_at * 1000),
        predicted,
        capacity,
        outlooks_of(view),
        state,
        params.scaler,
        num_coming=view.num_coming,
        now_s=view.now_s,
    )


def _added(view: ScalingView, state: ScalerState, why: str, params: PreserveParams) -> tuple[Target, ScalerState]:
    """Plan with cold data: one more for each instance that will be too full, no fewer while one was recently; else no
    plan."""
    fresh, answered = overloaded(outlooks_of(view), state.answered, view.num_coming, view.now_s, params.scaler)
    wanted = view.num_coming_or_there + len(fresh) if answered else 0
    said = "no instance fills its KV cache too far"
    if answered:
        full = f"fill more than {params.scaler.overload_ratio:.0%} of the KV cache, or did a moment ago"
        said = f"{counted(len(answered), 'instance')} will {full}"
    return Target(num_wanted=wanted, reason=f"{said}; {why}", is_cold=True), ScalerState(answered=answered)


def _look_ahead(view: ScalingView, state: ScalerState, why: str, params: PreserveParams) -> tuple[Target, ScalerState]:
    """Plan with cold data: section 4.3.2 alone, starting from the number that demand takes."""
    if not view.demand:
        return Target(num_wanted=0, reason=why_now(view), is_cold=True), state
    target, after = _on_the_fleet(view, None, Capacity(), state, params)
    wanted = max(view.needed, target.num_wanted)
    return Target(num_wanted=wanted, reason=f"{target.reason}; {why}", is_cold=True), after


def _prediction(now: Forecast, after: Forecast | None) -> Forecast:
    """The forecast to plan for: this window's or the next one's, whichever takes more."""
    if after is None:
        return now
    capacity = capacity_in(now)
    return max(now, after, key=lambda one: (instances_for(one, capacity), one.prompt_tokens + one.response_tokens))


def outlooks_of(view: ScalingView) -> Outlooks:
    """The routers' outlook of each READY instance; of overloaded ones alone where some instance has none."""
    ready, known = view.ready, view.load.outlook_by_instance
    if any(i.instance_id not in known for i in ready):
        ready = [i for i in ready if i.instance_id in known and known[i.instance_id].over_share > 0]
    return [(i.instance_id, known[i.instance_id]) for i in ready]
