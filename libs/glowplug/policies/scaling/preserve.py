"""PreServe's scaler on the fleet: the forecast of tokens plans each window, the look-ahead puts it right within.

Paper: PreServe sections 4.1 and 4.3.2, Algorithm 2; the arithmetic is `preserve_scaler.py`. At the beginning of a
window the tokens forecast for it and for the one after say how many instances there should be, so that those for the
next are there when it begins; within it each instance that will be too full brings one more, and once all are nearly
empty some go.

Departures:
- The plan is for the larger of this window's forecast and the next one's: the paper takes the next one's alone, which
  takes instances away one window early (`literal_next=True`).
- A window's plan is made when its forecast comes, a moment after it has begun.
- Cold data (section 4.3.3's default mode): with no forecast of tokens, or before any clean window has shown what an
  instance takes, the look-ahead alone says how many there are, and the reactive rule where no router looks ahead.
- At least one instance stays, as in the paper (erratum E32), while anything is expected; when nothing is, the model's
  keep-alive ends the last one. `keep_alive_s: -1` in the model is the paper's.
"""

from dataclasses import dataclass, field

from glowplug.domain.phrasing import counted
from glowplug.domain.snapshot import Forecast
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling import preserve_scaler
from glowplug.policies.scaling.baselines import ReactiveParams, ReactiveState, reactive, why_now
from glowplug.policies.scaling.port import ScalingView, settle
from glowplug.policies.scaling.preserve_scaler import (
    Capacity,
    Outlooks,
    ScalerParams,
    ScalerState,
    Target,
    instances_for,
)

WINDOW_S = 600.0  # the paper's, where no forecast says another


@dataclass(frozen=True, slots=True, kw_only=True)
class PreserveParams:
    scaler: ScalerParams = field(default_factory=ScalerParams)
    literal_next: bool = False  # plan for the next window alone
    shrink_after_s: float = 10.0  # of the reactive rule while data is cold


@dataclass(frozen=True, slots=True, kw_only=True)
class PreserveState:
    scaler: ScalerState = field(default_factory=ScalerState)
    cold: ReactiveState | None = None  # of the rule while data is cold


def scale(
    view: ScalingView, state: PreserveState | None = None, params: PreserveParams = PreserveParams()
) -> tuple[ScaleDecision, PreserveState]:
    """The number of instances `model` should have now, and which of its instances to drain or to take back."""
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
    """The plan of this window as it is now (Algorithm 2, then section 4.3.2)."""
    if view.forecast is None:
        return _added(view, state, "there is no forecast", params)
    predicted = _prediction(view.forecast, view.next_forecast, params)
    if predicted.prompt_tokens + predicted.response_tokens < 1:
        return Target(num_wanted=0, reason="no tokens are expected of it"), state
    capacity = Capacity.of(view.forecast)
    if capacity == Capacity():
        return _added(view, state, "no window has shown yet how many tokens an instance takes", params)
    return _algorithm_2(view, predicted, capacity, state, params)


def _algorithm_2(
    view: ScalingView, predicted: Forecast | None, capacity: Capacity, state: ScalerState, params: PreserveParams
) -> tuple[Target, ScalerState]:
    """With a number that changes with each window: its forecast comes a moment after it begins."""
    return preserve_scaler.scale(
        max(1, view.num_coming_or_there),
        int(view.now_s // WINDOW_S) if view.forecast is None else int(view.forecast.made_at * 1000),
        predicted,
        capacity,
        _outlooks(view),
        state,
        params.scaler,
        num_coming=view.num_coming,
        now_s=view.now_s,
    )


def _added(view: ScalingView, state: ScalerState, why: str, params: PreserveParams) -> tuple[Target, ScalerState]:
    """With cold data: one more for each instance that will be too full, none less while any was; no plan besides."""
    fresh, answered = preserve_scaler.overloaded(
        _outlooks(view), state.answered, view.num_coming, view.now_s, params.scaler
    )
    wanted = view.num_coming_or_there + len(fresh) if answered else 0
    said = "no instance fills its KV cache too far"
    if answered:
        full = f"fill more than {params.scaler.overload_ratio:.0%} of the KV cache, or did a moment ago"
        said = f"{counted(len(answered), 'instance')} will {full}"
    return Target(num_wanted=wanted, reason=f"{said}; {why}", is_cold=True), ScalerState(answered=answered)


def _look_ahead(view: ScalingView, state: ScalerState, why: str, params: PreserveParams) -> tuple[Target, ScalerState]:
    """With cold data: section 4.3.2 alone, from the number that demand takes."""
    if not view.demand:
        return Target(num_wanted=0, reason=why_now(view), is_cold=True), state
    target, after = _algorithm_2(view, None, Capacity(), state, params)
    wanted = max(view.needed, target.num_wanted)
    return Target(num_wanted=wanted, reason=f"{target.reason}; {why}", is_cold=True), after


def _prediction(now: Forecast, after: Forecast | None, params: PreserveParams) -> Forecast:
    """What to plan for: this window's forecast or the next one's, whichever takes more."""
    if after is None or params.literal_next:
        return after or now
    capacity = Capacity.of(now)
    return max(now, after, key=lambda one: (instances_for(one, capacity), one.prompt_tokens + one.response_tokens))


def _outlooks(view: ScalingView) -> Outlooks:
    """What the routers' look-ahead says of each READY instance; nothing unless it is of all of them."""
    ready, known = view.ready, view.load.outlook_by_instance
    if any(i.instance_id not in known for i in ready):
        ready = [i for i in ready if i.instance_id in known and known[i.instance_id].over_share > 0]
    return [(i.instance_id, known[i.instance_id]) for i in ready]
