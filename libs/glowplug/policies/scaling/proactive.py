"""Scaling by the forecast alone, and by the larger of forecast and demand.

The baselines "Proactive" and "Hybrid" of PreServe section 5.3: predicted load says how many instances there are;
hybrid also looks at the load of now. With tokens and capacities known the number is PreServe's
ceil(max(P / mu_p, D / mu_d, (P + D) / mu_t)); before that it is the expected concurrency over the batch size.

Departures: a held request is never left without any instance; without a forecast proactive keeps what runs (and says
so), hybrid is reactive; the last instance goes by the model's keep-alive when nothing is expected.
"""

import math
from dataclasses import dataclass

from glowplug.domain.model import Model
from glowplug.domain.snapshot import FleetSnapshot, Forecast
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling import reactive
from glowplug.policies.scaling.preserve_scaler import Capacity, WindowTokens, instances_for
from glowplug.policies.scaling.standing import Standing, settle, standing


@dataclass(frozen=True, slots=True, kw_only=True)
class ProactiveParams:
    use_peak: bool = True  # of concurrency, where tokens cannot say; False: its mean
    nothing_ratio: float = 0.01  # expected concurrency below this is none


def scale(
    snapshot: FleetSnapshot, model: Model, state: None = None, params: ProactiveParams = ProactiveParams()
) -> tuple[ScaleDecision, None]:
    """The number of instances the forecast says."""
    st = standing(snapshot, model)
    wanted, reason = target(st, params)
    return settle(st, wanted, reason), None


def hybrid(
    snapshot: FleetSnapshot,
    model: Model,
    state: reactive.ReactiveState | None = None,
    params: ProactiveParams = ProactiveParams(),
) -> tuple[ScaleDecision, reactive.ReactiveState | None]:
    """The larger of what the forecast says and what the demand of now takes."""
    st = standing(snapshot, model)
    if st.forecast is None:
        decision, state = reactive.scale(snapshot, model, state)
        return decision, state
    wanted, reason = target(st, params)
    if st.needed > wanted:
        wanted, reason = st.needed, reactive.why(st)
    return settle(st, wanted, reason), None


def target(st: Standing, params: ProactiveParams = ProactiveParams()) -> tuple[int, str]:
    """Instances for the forecast of the window of now, and why."""
    if st.forecast is None:
        there = max(st.num_coming_or_there, 1 if st.demand else 0)
        return (there if st.demand else 0), "there is no forecast, so that what runs stays while requests come"
    tokens, capacity = expected_tokens(st.forecast), capacity_of(st.forecast)
    age_s = max(0.0, st.now_s - st.forecast.made_at)
    told = f"a forecast that is {age_s:.0f} s old"
    expected = st.forecast.concurrency_peak if params.use_peak else st.forecast.concurrency_mean
    if capacity != Capacity() and tokens.prompt_tokens + tokens.response_tokens >= 1:
        wanted = instances_for(tokens, capacity)
        return (
            wanted,
            f"{told} expects {tokens.prompt_tokens:.0f} prompt and {tokens.response_tokens:.0f} response tokens",
        )
    if expected >= params.nothing_ratio:
        wanted = math.ceil(expected / st.per_instance - 1e-9)
        return max(1, wanted), f"{told} expects {expected:.2f} requests at once"
    return (1 if st.demand else 0), f"{told} expects nothing"


def expected_tokens(forecast: Forecast) -> WindowTokens:
    """The forecast in PreServe's unit."""
    return WindowTokens(
        prompt_tokens=forecast.prompt_tokens,
        response_tokens=forecast.response_tokens,
        window_s=forecast.window_s,
    )


def capacity_of(forecast: Forecast) -> Capacity:
    """What one instance takes, as the forecast brings it."""
    return Capacity(
        prompt_per_s=forecast.prompt_per_s,
        response_per_s=forecast.response_per_s,
        total_per_s=forecast.total_per_s,
    )
