"""The union's plan: how many instances the forecast of tokens takes, made safe by its band, and put right by what came
and by what missed its objective.

Of PreServe (section 4.1, Algorithm 2, line 5), not rounded, for every window w that is forecast:

    need_w = max(P_w / mu_p, D_w / mu_d, (P_w + D_w) / mu_t)

PreServe plans for that number, at the beginning of a window, two windows ahead. Ours:

    s_w  = log(need_w(q) / need_w) / z_q            spread of the forecast's error, by its upper quantile q (a normal's)
    safe = exp(m + z s_w) need_w                    m: what is learned, below; z: how much of the band is planned for
    seen = exp(m) need_w (k + n) / (k + e)          n requests have come in this window where e were expected: gamma and
                                                    Poisson, with k = 1 / s^2, as many requests as the forecast is worth
    late = (backlog - patience) / start             instances that work off in a start's time what prompts wait for
    x_w  = max(safe, seen) + late
    up   = max of ceil(x_w - slack) over the windows that a start begun now comes too late to serve
    down = max of ceil(x_w + slack) over all windows that are forecast
    full = ceil of what routers expect in KV caches in the coming steps, with what they hold, over full_ratio of one
    N    = max(up, full, min(there, down)), and not below an N of the last start's time

so that a start is asked for in time, by the seconds that starts of the model take, none goes that a later window would
start again, and a need about a whole number starts and stops nothing. What one instance takes depends on how many share
the load, on bursts within a window and on the lengths of prompts, so mu alone cannot be right for all of them. m
follows how much of their objective the windows take (`Forecast.objective_ratio`):

    m += up (min(ratio, most) - aim)    ratio above aim; then not again before a start that this brings has served
    m -= down (aim - ratio)             else

Latency hardly grows with the load until it grows at once, so `aim` lies where it begins to, and one step up is as large
as many down.

No answer of a plan stands until a known moment: what has come, and when the last start's N ends, change with each call.

Section 4.3.2 brings one more for each instance that will fill its cache too far; requests go where there is free cache,
so here all caches count together. With cold data (no forecast, no tokens or no mu) PreServe's own plan stands as it is.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Final

from glowplug.domain.bounds import check_bounds
from glowplug.domain.snapshot import Forecast
from glowplug.policies.scaling import preserve
from glowplug.policies.scaling.port import ScalingView
from glowplug.policies.scaling.preserve import ScalerState, Target
from glowplug.policies.throughput import Capacity
from glowplug.policies.worth import FROM_ZERO

MOST_SHARE: Final = 100.0  # no plan is off by more, either way


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParams:
    """`up` and `down` are of m, a logarithm."""

    cold: preserve.PreserveParams = field(default_factory=preserve.PreserveParams)  # and of section 4.3.2
    z: float = field(default=0.7, metadata=FROM_ZERO)  # spreads of the forecast's error
    widest: float = field(default=0.3, metadata=FROM_ZERO)  # a spread counts as so much at most: a backlog widens it
    slack: float = field(default=0.2, metadata=FROM_ZERO)  # of an instance
    aim: float = 0.8  # of the objective
    most: float = 2.0  # a window counts as so much of its objective at most
    up: float = field(default=0.2, metadata=FROM_ZERO)
    down: float = field(default=0.02, metadata=FROM_ZERO)
    least_share: float = 0.7  # exp(m): of the instances that mu asks for, between these two
    most_share: float = 1.6
    full_ratio: float = 0.9  # of the KV caches together
    patience_s: float = field(default=1.0, metadata=FROM_ZERO)  # of prompts, which an instance may have before it
    start_s: float = 30.0  # where no start has been seen

    def __post_init__(self) -> None:
        most = {"least_share": MOST_SHARE, "most_share": MOST_SHARE}
        check_bounds(
            self,
            above_0=("aim", "most", "start_s"),
            most=most,
            least_share=1 / MOST_SHARE,
            most_share=1 / MOST_SHARE,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """What the plan remembers of one model."""

    scaler: ScalerState = field(default_factory=ScalerState)
    m: float = 0.0
    raised_at: float = -math.inf  # when m last grew
    made_at: float = -1.0  # of the forecast that stands; -1: none has stood with mu known
    seen_at: float = 0.0  # since when arrivals of its window are counted ...
    arrived_before: int = 0  # ... and how many had come by then
    num_held: int = 0  # as many were wanted of late ...
    held_until: float = 0.0  # ... and stay until then

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
    shares = [expected_share(one) for one in windows]
    spreads = [min(params.widest, spread(one, share)) for one, share in zip(windows, shares, strict=True)]
    there, seen = view.num_coming_or_there, seen_ratio(view, now, spreads[0], state)
    start_s = view.start_s or params.start_s
    late = backlog(view, now, params) / start_s
    needs = [
        (need(share, wide, state.m, seen, params) + late, one)
        for one, share, wide in zip(windows, shares, spreads, strict=True)
    ]
    in_time = view.now_s + start_s
    most, why = max((pair for pair in needs if pair[1] is now or pair[1].starts_at < in_time), key=lambda pair: pair[0])
    up = math.ceil(most - params.slack)
    down = math.ceil(max(pair[0] for pair in needs) + params.slack)
    wanted = max(1, up, min(there, down))
    reason = _reason(view, why, up, wanted, seen, late)
    if (full := cached(view, now) / params.full_ratio) > wanted:
        wanted = math.ceil(full)
        reason = f"what runs and waits will fill the KV caches of {full:.1f} instances within the next steps"
    if wanted >= state.num_held or view.now_s >= state.held_until:
        state = replace(state, num_held=wanted, held_until=view.now_s + start_s)
    elif wanted < min(state.num_held, there):
        wanted, reason = min(state.num_held, there), "what was asked for a moment ago has hardly served yet"
    return Target(num_wanted=wanted, reason=reason), state


def need(share: float, wide: float, m: float, seen: float, params: PlanParams) -> float:
    """Instances that a window takes, not rounded: by its band, or as what has come so far says. `share`: that are
    expected to do; `wide`: s_w."""
    return share * math.exp(m) * max(math.exp(params.z * wide), seen)


def expected_share(one: Forecast) -> float:
    """Instances that what is expected of a window takes by mu, not rounded."""
    return preserve.share_of(one.prompt_tokens, one.response_tokens, one.window_s, preserve.capacity_in(one))


def spread(one: Forecast, share: float) -> float:
    """s_w: of the log of what comes over what is expected (`share`); 0 where the policy says no band."""
    upper = one.quantiles[-1] if one.quantiles else None
    if upper is None or not 0.5 < upper.share < 1 or share <= 0:
        return 0.0
    high = preserve.share_of(upper.prompt_tokens, upper.response_tokens, one.window_s, preserve.capacity_in(one))
    return max(0.0, math.log(high / share)) / _deviations(upper.share) if high > 0 else 0.0


@lru_cache(maxsize=16)  # a forecast has two quantiles
def _deviations(share: float) -> float:
    """z_q: standard deviations of a normal one above its mean, below which that share lies."""
    return NormalDist().inv_cdf(share)


def seen_ratio(view: ScalingView, now: Forecast, wide: float, state: PlanState) -> float:
    """What this window brings over what was expected of it, by the requests that have come so far; at least 1.
    `wide`: its s_w."""
    elapsed_s = view.now_s - state.seen_at
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


def cached(view: ScalingView, now: Forecast) -> float:
    """KV caches that would be full with what routers expect in the coming steps, and with what they hold."""
    outlooks = preserve.outlooks_of(view)
    if not outlooks:
        return 0.0
    tokens = _tokens(now) / now.num_requests if now.num_requests > 0 else 0.0
    kv_tokens = max(1, max(i.kv_tokens for i in view.ready))
    return sum(one.peak_ratio for _, one in outlooks) + view.load.num_waiting * tokens / kv_tokens


def _judged(view: ScalingView, now: Forecast, state: PlanState, params: PlanParams) -> PlanState:
    """The state once a new forecast has come: what the window before took of its objective moves m, if it was planned
    for and what m was raised by before has served."""
    if now.made_at == state.made_at:
        return state
    m, raised_at = state.m, state.raised_at
    has_served = view.now_s - raised_at >= (view.start_s or params.start_s) + now.window_s
    if state.made_at >= 0 and now.objective_ratio > 0 and has_served:
        over = min(now.objective_ratio, params.most) - params.aim
        m += (params.up if over > 0 else params.down) * over
        m = min(math.log(params.most_share), max(math.log(params.least_share), m))
        raised_at = view.now_s if over > 0 else raised_at
    return replace(
        state, m=m, raised_at=raised_at, made_at=now.made_at, seen_at=view.now_s, arrived_before=view.load.num_arrived
    )


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
