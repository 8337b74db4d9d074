"""PreServe's scaler: a forecast of tokens plans each window, and the look-ahead corrects it.

Paper: PreServe sections 4.1 and 4.3.2, Algorithms 1 and 2. For the coming window, with P prompt and D response tokens
predicted and mu_p, mu_d, mu_t the most an instance was seen to serve without missing an objective:

    N = ceil( max(P / mu_p, D / mu_d, (P + D) / mu_t) ), at least 1

ready when it begins. Within it: one more instance for each whose anticipated KV use exceeds 95 % in more than a tenth
of the next l steps; and once a window, if every instance stays below 30 %, N_c - ceil(sum max U / T_mem) fewer.

Departures:
- The plan takes the larger of this window's forecast and the next one's; the paper takes the next one's alone, which
  drains one window early.
- A plan is made when its forecast arrives, shortly after the window's begin.
- A too full instance counts as answered for `again_s`, and each starting one answers one, lest a flickering figure or a
  slow start add many.
- A window begins with no fewer instances than run while one is, or just was, too full, and keeps those that the
  forecast needs: with windows about as long as a start, the next one would wait for them.
- The ceiling and the floor of 1 are ours (erratum E32); mu is per instance (E31), as fleet/throughput.py measures it;
  the number to scale down to is read as above, and at least one stays (E36).
- Cold data (section 4.3.3's default mode): without a forecast of tokens or a known capacity the look-ahead alone
  decides, and the reactive rule where no router looks ahead.
- Without expected load the model's keep-alive ends the last instance; `keep_alive_s: -1` is the paper's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from glowplug.domain.bounds import Count, Positive
from glowplug.domain.phrasing import counted, listed
from glowplug.domain.snapshot import Forecast, Outlook
from glowplug.fleet.throughput import MEMORY_RATIO, Capacity
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.prediction.preserve_anticipator import NUM_STEPS, OVERLOAD_RATIO, OVERLOAD_SHARE
from glowplug.policies.scaling.baselines import ReactiveParams, ReactiveState, reactive, why_now
from glowplug.policies.scaling.port import ScalingView, settle

WINDOW_S = 600.0  # the paper's, used without a forecast
Outlooks = Sequence[tuple[str, Outlook]]  # (instance_id, next steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerParams:
    overload_ratio: Positive = OVERLOAD_RATIO
    overload_share: Positive = OVERLOAD_SHARE
    idle_ratio: Positive = 0.30
    memory_ratio: Positive = MEMORY_RATIO  # T_mem
    num_steps: Count = NUM_STEPS  # l
    again_s: Positive = 30.0  # until an instance still too full adds another


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerState:
    window: int = -1
    shrunk: bool = False
    num_planned: int = 0
    num_forecast: int = 0
    answered: Mapping[str, float] = field(default_factory=dict)  # too full instance -> when one was added


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedNumber:
    """The wanted number, and why. `is_cold`: from the look-ahead, not from a plan of tokens."""

    num_wanted: int
    reason: str
    is_cold: bool = False


def tokens_of(predicted: Forecast) -> str:
    return f"{predicted.prompt_tokens:.0f} prompt and {predicted.response_tokens:.0f} response tokens"


def capacity_in(known: Forecast) -> Capacity:
    return Capacity(prompt_per_s=known.prompt_per_s, response_per_s=known.response_per_s, total_per_s=known.total_per_s)


def instances_for(predicted: Forecast, capacity: Capacity) -> int:
    if predicted.window_s <= 0:
        raise ValueError(f"a window of {predicted.window_s} s")
    share = share_of(predicted.prompt_tokens, predicted.response_tokens, predicted.window_s, capacity)
    return max(1, math.ceil(share - 1e-9))


def share_of(prompt_tokens: float, response_tokens: float, window_s: float, capacity: Capacity) -> float:
    """max(P / mu_p, D / mu_d, (P + D) / mu_t) of Algorithm 2, not rounded. A rate of 0 is unknown and does
    not count."""
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
    """Return the unanswered instances that will be too full, and all answered ones."""
    recent = {i: at for i, at in answered.items() if now_s - at < params.again_s}
    hot = sorted(i for i, outlook in outlooks if outlook.over_share > params.overload_share and i not in recent)
    num_answers = max(0, num_coming - len(recent))  # starting, not counted as an answer yet
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
) -> tuple[WantedNumber, ScalerState]:
    """Decide the number of instances. `num_running` includes `num_coming`, not draining ones; `window` is the present
    window's number."""
    fresh, answered = overloaded(outlooks, state.answered, num_coming, now_s, params)
    if window != state.window:
        state = ScalerState(window=window, num_planned=num_running, answered=state.answered)
        if predicted is not None and capacity != Capacity():
            planned = instances_for(predicted, capacity)
            wanted, why = planned, f"{tokens_of(predicted)} are expected in this window"
            if answered and planned < num_running + len(fresh):
                wanted, state = num_running + len(fresh), replace(state, answered=answered)
                why = f"{why}, and {counted(len(answered), 'instance')} will be too full or was a moment ago"
            return WantedNumber(num_wanted=wanted, reason=why), replace(state, num_planned=wanted, num_forecast=planned)
    state = replace(state, answered=answered)
    if fresh:
        state = replace(state, num_planned=max(num_running, state.num_planned) + len(fresh))
        why = f"{listed(sorted(fresh))} will fill more than {params.overload_ratio:.0%} of the KV cache"
        return WantedNumber(num_wanted=state.num_planned, reason=why), state
    calm = outlooks and all(o.peak_ratio < params.idle_ratio for _, o in outlooks)
    if calm and not state.shrunk and num_running > 1:
        wanted = max(1, state.num_forecast, math.ceil(sum(o.peak_ratio for _, o in outlooks) / params.memory_ratio))
        if wanted < num_running:
            why = f"every instance stays below {params.idle_ratio:.0%} of its KV cache"
            return WantedNumber(num_wanted=wanted, reason=why), replace(state, shrunk=True, num_planned=wanted)
    why = "nothing is predicted, and no instance is too full or too empty"
    if predicted is not None:
        why = "the plan of this window stands"
    return WantedNumber(num_wanted=state.num_planned, reason=why), state


@dataclass(frozen=True, slots=True, kw_only=True)
class PreserveParams:
    scaler: ScalerParams = field(default_factory=ScalerParams)
    shrink_after_s: Positive = 10.0  # of the reactive rule, for cold data


@dataclass(frozen=True, slots=True, kw_only=True)
class PreserveState:
    scaler: ScalerState = field(default_factory=ScalerState)
    cold: ReactiveState | None = None  # likewise


def scale(
    view: ScalingView, state: PreserveState | None = None, params: PreserveParams = PreserveParams()
) -> tuple[ScaleDecision, PreserveState]:
    state = state or PreserveState()
    plan, scaler = plan_for(view, state.scaler, params)
    if plan.is_cold and not view.load.outlook_by_instance:
        decision, kept = reactive(view, state.cold, ReactiveParams(shrink_after_s=params.shrink_after_s))
        return decision, PreserveState(scaler=scaler, cold=kept)
    if plan.is_cold:
        plan, scaler = _look_ahead(view, state.scaler, plan.reason, params)
    wanted = max(plan.num_wanted, 1 if view.demand else 0)
    return settle(view, wanted, plan.reason), PreserveState(scaler=scaler)


def plan_for(view: ScalingView, state: ScalerState, params: PreserveParams) -> tuple[WantedNumber, ScalerState]:
    if view.forecast is None:
        return _added(view, state, "there is no forecast", params)
    predicted = _prediction(view.forecast, view.next_forecast)
    if predicted.prompt_tokens + predicted.response_tokens < 1:
        return WantedNumber(num_wanted=0, reason="no tokens are expected of it"), state
    capacity = capacity_in(view.forecast)
    if capacity == Capacity():
        return _added(view, state, "no window has shown yet how many tokens an instance takes", params)
    return _on_the_fleet(view, predicted, capacity, state, params)


def _on_the_fleet(
    view: ScalingView, predicted: Forecast | None, capacity: Capacity, state: ScalerState, params: PreserveParams
) -> tuple[WantedNumber, ScalerState]:
    """Run Algorithm 2; a forecast's arrival begins a window."""
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


def _added(view: ScalingView, state: ScalerState, why: str, params: PreserveParams) -> tuple[WantedNumber, ScalerState]:
    """Plan with cold data: one more for each too full instance, no fewer shortly after."""
    fresh, answered = overloaded(outlooks_of(view), state.answered, view.num_coming, view.now_s, params.scaler)
    wanted = view.num_coming_or_there + len(fresh) if answered else 0
    said = "no instance fills its KV cache too far"
    if answered:
        full = f"fill more than {params.scaler.overload_ratio:.0%} of the KV cache, or did a moment ago"
        said = f"{counted(len(answered), 'instance')} will {full}"
    return WantedNumber(num_wanted=wanted, reason=f"{said}; {why}", is_cold=True), ScalerState(answered=answered)


def _look_ahead(
    view: ScalingView, state: ScalerState, why: str, params: PreserveParams
) -> tuple[WantedNumber, ScalerState]:
    """Section 4.3.2 alone, starting from the demand."""
    if not view.demand:
        return WantedNumber(num_wanted=0, reason=why_now(view), is_cold=True), state
    target, after = _on_the_fleet(view, None, Capacity(), state, params)
    wanted = max(view.needed, target.num_wanted)
    return WantedNumber(num_wanted=wanted, reason=f"{target.reason}; {why}", is_cold=True), after


def _prediction(now: Forecast, after: Forecast | None) -> Forecast:
    if after is None:
        return now
    capacity = capacity_in(now)
    return max(now, after, key=lambda one: (instances_for(one, capacity), one.prompt_tokens + one.response_tokens))


def outlooks_of(view: ScalingView) -> Outlooks:
    """Return READY instances' outlooks; if any has none, of overloaded ones alone."""
    ready, known = view.ready, view.load.outlook_by_instance
    if any(i.instance_id not in known for i in ready):
        ready = [i for i in ready if i.instance_id in known and known[i.instance_id].over_share > 0]
    return [(i.instance_id, known[i.instance_id]) for i in ready]
