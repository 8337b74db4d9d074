"""The union of the papers' scaling rules; docs/adr/0015 and 0025 give the reasons, with figures.

Waiting and running requests set the floor. A plan by PreServe's token forecast may raise it, once another model is less
likely to lack GPUs than this instance to be needed. HydraServe's groups supply several instances with one cold start
(section 6.1); its rule for arrivals (section 6.1) applies only while a prewarmed copy makes that cheap (mCache's
workload then has a fifth fewer fetches, simulated). WarmServe's four fifths of the slots are not used: it decides the
replicas.

A spare instance is drained after the keep-alive (HydraServe section 8.1), and earlier once not worth its GPUs
(`policies/worth.py`): when the probability of its need within a start from nothing is below `price` per GPU, by the
forecast, and without a plan also by the time since that need. It goes at once while another model finds no GPU. A
pipeline grows for needed instances, not for kept ones.

In PreServe one instance stays while any load is expected (erratum E32). Here the first starts for a request and the
last ends by its keep-alive.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated, ClassVar, Final, Self

from glowplug.domain.bounds import Bounded, Bounds, Positive
from glowplug.domain.instance import InstanceState
from glowplug.domain.phrasing import counted
from glowplug.domain.snapshot import Forecast
from glowplug.fleet.start_times import FROM_NOTHING, MAX_START_S
from glowplug.fleet.throughput import Capacity
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling import hydraserve, preserve
from glowplug.policies.scaling.baselines import why_now
from glowplug.policies.scaling.port import ScalingView, learning, settle, worths
from glowplug.policies.scaling.preserve import WINDOW_S, ScalerState, WantedNumber
from glowplug.policies.worth import NEVER_S, PRICE, Asking, asked, idle_worth, level

# The union's plan: instances for the token forecast, made safe by its band, corrected by arrivals and missed
# objectives.
#
# Of PreServe (section 4.1, Algorithm 2, line 5), not rounded, for every window w that is forecast:
#
#     need_w = max(P_w / mu_p, D_w / mu_d, (P_w + D_w) / mu_t)
#
# PreServe plans for that number, at the beginning of a window, two windows ahead. Ours:
#
#     s_w  = log(need_w(q) / need_w) / z_q          spread of the forecast's error, by its upper quantile q (a normal's)
#     safe = exp(m + z s_w) need_w                  m: what is learned, below; z: how much of the band is planned for
#     seen = exp(m) need_w (k + n) / (k + e)        n requests have come in this window where e were expected: gamma and
#                                                   Poisson, with k = 1 / s^2, as many requests as the forecast is worth
#     late = (backlog - patience) / start           instances that process the prompts' backlog in a start's time
#     x_w  = max(safe, seen) + late
#     up   = max of ceil(x_w - slack) over the windows for which a later start would be too late
#     down = max of ceil(x_w + slack) over all windows that are forecast
#     full = ceil of what routers expect in KV caches in the coming steps, with what they hold, over full_ratio of one;
#            here and in the backlog batch is left out, as in the forecast
#     N    = max(up, full, min(there, down)), and not below an N of the last start's time
#
# so that instances start in time, none is drained that a later window would restart, and a need about a whole number
# changes nothing. Capacity depends on the number of instances, bursts and prompt lengths, so mu cannot always be right:
# m follows the windows' share of their objective (`Forecast.objective_ratio`):
#
#     m += up (min(ratio, most) - aim)    ratio above aim; then not again before a start that this brings has served
#     m -= down (aim - ratio)             else
#
# Latency grows suddenly with load, so `aim` is at that point, and one step up equals many down. A plan's decision has
# no known end: arrivals, and the end of the last start's N, change with each call.
#
# Section 4.3.2 adds one instance for each that fills its cache too far; here all caches count together, since requests
# go where cache is free. With cold data (no forecast, tokens or mu) PreServe's own plan is used.

MOST_SHARE: Final = 100.0  # bound of exp(m), either way
Factor = Annotated[float, Bounds(least=1 / MOST_SHARE, most=MOST_SHARE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanParams(Bounded):
    """`up` and `down` are steps of m, a logarithm."""

    cold: preserve.PreserveParams = field(default_factory=preserve.PreserveParams)  # also of section 4.3.2
    z: float = 0.7  # spreads to plan for
    widest: float = 0.3  # bound of a spread
    slack: float = 0.2  # tolerance, in instances
    aim: Positive = 0.8  # a window's target share of its objective
    most: Positive = 2.0  # bound of a window's ratio to its objective
    up: float = 0.2
    down: float = 0.02
    least_share: Factor = 0.7  # bounds of exp(m)
    most_share: Factor = 1.6
    full_ratio: Positive = 0.9  # of all KV caches together
    patience_s: float = 1.0  # s of prompts that may queue at an instance
    start_s: Positive = 30.0  # before any was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    scaler: ScalerState = field(default_factory=ScalerState)
    m: float = 0.0
    raised_at: float = -math.inf
    made_at: float = -1.0  # of the current forecast; -1: none yet with mu known
    seen_at: float = 0.0  # since when its window's arrivals are counted ...
    arrived_before: int = 0  # ... and the count at that time
    num_held: int = 0  # instances wanted recently ...
    held_until: float = 0.0  # ... and are kept until then

    @property
    def answered(self) -> Mapping[str, float]:
        return self.scaler.answered


def plan_for(view: ScalingView, state: PlanState, params: PlanParams) -> tuple[WantedNumber, PlanState]:
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
    return WantedNumber(num_wanted=wanted, reason=reason), state


def need(share: float, wide: float, m: float, seen: float, params: PlanParams) -> float:
    """Return a window's need, by its band or by arrivals. `wide`: s_w."""
    return share * math.exp(m) * max(math.exp(params.z * wide), seen)


def expected_share(one: Forecast) -> float:
    return preserve.share_of(one.prompt_tokens, one.response_tokens, one.window_s, preserve.capacity_in(one))


def spread(one: Forecast, share: float) -> float:
    """Return s_w around the expected `share`; 0 without a band."""
    upper = one.quantiles[-1] if one.quantiles else None
    if upper is None or not 0.5 < upper.share < 1 or share <= 0:
        return 0.0
    high = preserve.share_of(upper.prompt_tokens, upper.response_tokens, one.window_s, preserve.capacity_in(one))
    return max(0.0, math.log(high / share)) / _deviations(upper.share) if high > 0 else 0.0


@lru_cache(maxsize=16)
def _deviations(share: float) -> float:
    return NormalDist().inv_cdf(share)


def seen_ratio(view: ScalingView, now: Forecast, wide: float, state: PlanState) -> float:
    """Return this window's load over its forecast by requests so far, without batch; at least 1. `wide`: s_w."""
    elapsed_s = view.now_s - state.seen_at
    if not (view.load.num_urgent_arrived and now.num_requests > 0 and elapsed_s > 0 and wide > 0):
        return 1.0
    expected = now.num_requests * min(1.0, elapsed_s / now.window_s)
    came, weight = view.load.num_urgent_arrived - state.arrived_before, 1 / wide**2
    return max(1.0, (weight + came) / (weight + expected))


def backlog(view: ScalingView, now: Forecast, params: PlanParams) -> float:
    """Return an instance's seconds for the waiting prompts, beyond `patience_s` for each READY one."""
    if now.prompt_per_s <= 0 or now.num_requests <= 0:
        return 0.0
    outlooks = view.load.outlook_by_instance
    known = [i.instance_id for i in view.ready if i.instance_id in outlooks]
    queued = sum(outlooks[one].queued_tokens * _urgent_share(view, one) for one in known)
    waiting = view.load.num_urgent_waiting * now.prompt_tokens / now.num_requests
    return max(0.0, (queued + waiting) / now.prompt_per_s - params.patience_s * len(view.ready))


def cached(view: ScalingView, now: Forecast) -> float:
    """Return the KV caches filled by held requests and the coming steps."""
    outlooks = preserve.outlooks_of(view)
    if not outlooks:
        return 0.0
    tokens = _tokens(now) / now.num_requests if now.num_requests > 0 else 0.0
    kv_tokens = max(1, max(i.kv_tokens for i in view.ready))
    running = sum(one.peak_ratio * _urgent_share(view, instance_id) for instance_id, one in outlooks)
    return running + view.load.num_urgent_waiting * tokens / kv_tokens


def _urgent_share(view: ScalingView, instance_id: str) -> float:
    num = view.load.in_flight_by_instance.get(instance_id, 0)
    return view.load.urgent_on(instance_id) / num if num else 1.0


def _judged(view: ScalingView, now: Forecast, state: PlanState, params: PlanParams) -> PlanState:
    """Move m by the last window's objective ratio, if that window was planned for and m's last raise has served."""
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
        state,
        m=m,
        raised_at=raised_at,
        made_at=now.made_at,
        seen_at=view.now_s,
        arrived_before=view.load.num_urgent_arrived,
    )


def _tokens(one: Forecast) -> float:
    return one.prompt_tokens + one.response_tokens


def _reason(view: ScalingView, one: Forecast, up: int, wanted: int, seen: float, late: float) -> str:
    if up < wanted:
        return "a later window is expected to take as many as there are"
    ahead_s = max(0.0, one.starts_at - view.now_s)
    within = f"in the window that begins in {ahead_s:.0f} s" if ahead_s else "in this window"
    reason = f"{preserve.tokens_of(one)} are expected {within}"
    if seen > 1.2:
        reason += f", and {seen:.1f} times of what was expected has come so far"
    return f"{reason}, and prompts wait for {late:.1f} instances more" if late >= 0.5 else reason


EVEN: Final = 0.5  # P(a plan's last instance is needed): a plan is for the expected load
NOTHING: Final = frozenset(kind.value for kind in FROM_NOTHING)
UNSEEN_S: Final = 1.0
MOST_M: Final = math.log(MOST_SHARE)
NEW: Final = {"m": 0.0, "raised_at": -math.inf, "start_s": UNSEEN_S}
ROUNDING_S: Final = 1e-6  # sums of times are rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionParams:
    plan: PlanParams = field(default_factory=PlanParams)
    arrivals: hydraserve.HydraserveParams = field(default_factory=hydraserve.HydraserveParams)
    price: float = PRICE  # seconds of waiting that a second of a GPU has to save
    protect_s: Positive = 5.0  # no drain while an instance is that young
    spare_s: Positive = 10.0  # idle, under an endless keep-alive


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionState:
    FORMAT: ClassVar[str] = "union/1"

    plan: PlanState = field(default_factory=PlanState)
    arrivals: hydraserve.HydraserveState | None = None
    short_at: float = float("-inf")
    needed_at: tuple[float, ...] = ()  # when at least one, two, ... instances were last wanted
    start_s: float = UNSEEN_S

    def learned(self) -> Self:
        plan = PlanState(m=self.plan.m, raised_at=self.plan.raised_at)
        return replace(self, plan=plan, arrivals=None, short_at=-math.inf, needed_at=())

    def figures(self) -> dict[str, float]:
        """Return m (a logarithm), its last growth (epoch seconds), and a start's seconds."""
        found = {"m": self.plan.m, "raised_at": self.plan.raised_at, "start_s": self.start_s}
        return {name: value for name, value in found.items() if value != NEW[name]}

    @classmethod
    def with_figures(cls, figures: Mapping[str, float], now_s: float) -> Self:
        """A future time counts as now, since a clock was set. Raises ValueError as in `Learns`."""
        if unknown := figures.keys() - NEW.keys():
            raise ValueError(f"there is no figure {min(unknown)!r}")
        if not all(map(math.isfinite, figures.values())):
            raise ValueError("a figure is not finite")
        known = {**NEW, **figures}
        if abs(known["m"]) > MOST_M or not 0 <= known["start_s"] <= MAX_START_S:
            raise ValueError("a figure is out of bounds")
        plan = PlanState(m=known["m"], raised_at=min(known["raised_at"], now_s))
        return cls(plan=plan, start_s=known["start_s"])


@learning(UnionState)
def scale(
    view: ScalingView, state: UnionState | None = None, params: UnionParams = UnionParams()
) -> tuple[ScaleDecision, UnionState]:
    state = state or UnionState()
    plan, scaler = plan_for(view, state.plan, params.plan)
    is_planned = not plan.is_cold and plan.num_wanted > 0
    if not (plan.is_cold or view.demand) and plan.num_wanted == 1:
        plan = replace(plan, num_wanted=0)
    arrivals = hydraserve.watch(view, state.arrivals, params.arrivals)
    short_at = view.now_s if view.short_elsewhere else state.short_at
    options = [(view.needed, why_now(view))]
    start_s = _start_s(view, state)
    if asked(Asking(idle_s=view.now_s - short_at), _window_s(view)) <= EVEN:
        options.append((plan.num_wanted, plan.reason))  # from the look-ahead, with cold data
    if view.is_prewarmed and is_short(view):  # the rest of a burst costs little then
        options.append(hydraserve.target(view, arrivals, params.arrivals))
    wanted, reason = max(options, key=lambda option: option[0])
    needed_at = _needed(view, state, wanted)
    kept = needed = wanted
    if not view.short_elsewhere:
        most = view.num_running - _num_idle(view, arrivals.idle_since, params)
        # A plan covers later windows.
        idle_s = [NEVER_S if is_planned else view.now_s - at for at in needed_at]
        kept = max(wanted, min(most, _worth_keeping(view, wanted, idle_s, start_s, params)))
    if kept > wanted:
        wanted, reason = kept, f"{counted(kept, 'instance')} may be needed again before one could start"
    growing = is_growing(view, params)
    decision = settle(
        view,
        wanted,
        reason,
        may_go=lambda _: not growing,
        group_size=params.arrivals.group_size,
        inputs={"planned": -1 if plan.is_cold else plan.num_wanted},
    )
    decision = replace(decision, num_required=min(decision.num_required, max(needed, view.floor)))
    after = UnionState(plan=scaler, arrivals=arrivals, short_at=short_at, needed_at=needed_at, start_s=start_s)
    if hydraserve.is_quiet(view, arrivals) and scaler == state.plan and not scaler.answered and not decision.drain:
        decision = replace(decision, stands_until=_stands_until(view, after, params))
    return decision, after


def _start_s(view: ScalingView, state: UnionState) -> float:
    """Return seconds of the newest start from nothing; of any kind while none is known."""
    took = {i.start_kind in NOTHING: i.ready_at - i.created_at for i in view.ready if i.ready_at > i.created_at}
    start_s = took.get(True) or (max(state.start_s, took[False]) if took else state.start_s)
    return min(start_s, MAX_START_S)


def _window_s(view: ScalingView) -> float:
    return view.forecast.window_s if view.forecast is not None and view.forecast.window_s > 0 else WINDOW_S


def _num_idle(view: ScalingView, idle_since: Mapping[str, float], params: UnionParams) -> int:
    alive_s = view.model.keep_alive_s if view.model.keep_alive_s >= 0 else params.spare_s
    idle = [i.instance_id for i in view.ready if view.now_s - idle_since.get(i.instance_id, view.now_s) >= alive_s]
    if not idle:
        return 0
    can_become = worths(view.running)
    return sum(can_become[instance_id] for instance_id in idle)


def _needed(view: ScalingView, state: UnionState, wanted: int) -> tuple[float, ...]:
    before, num = state.needed_at, max(wanted, view.num_running)
    return tuple(view.now_s if at < wanted else before[at] if at < len(before) else view.now_s for at in range(num))


def _worth_keeping(view: ScalingView, wanted: int, idle_s: Sequence[float], start_s: float, params: UnionParams) -> int:
    """Return running instances worth their GPUs, at least `wanted`; a single last one goes by its keep-alive. `idle_s`:
    seconds since more than none, one, ... were wanted."""
    number = max(1, wanted)
    while number < view.num_running:
        asking = level(view.forecast, number, view.per_instance, idle_s[number])
        if idle_worth(asking, start_s) < params.price * view.model.num_gpus:
            break
        number += 1
    return number if number > 1 else wanted


def _stands_until(view: ScalingView, state: UnionState, params: UnionParams) -> float:
    if view.short_elsewhere or view.draining or view.num_coming or view.num_running > max(1, view.floor):
        return 0.0
    moments = [state.short_at + _window_s(view)]
    for instance in view.running:
        last_used_at = max(view.load.last_active_at, instance.ready_at)
        moments += [instance.created_at + params.protect_s, last_used_at + view.model.keep_alive_s]
    return min((at - ROUNDING_S for at in moments if at > view.now_s), default=math.inf)


def is_growing(view: ScalingView, params: UnionParams) -> bool:
    if view.load.num_waiting:
        return True
    return any(i.state is not InstanceState.READY or view.now_s - i.created_at < params.protect_s for i in view.running)


def is_short(view: ScalingView) -> bool:
    """Return whether requests wait for a slot, not by routing's hold under a TPOT objective."""
    if not view.model.slo.tpot_s:
        return view.load.num_waiting > 0
    return view.load.num_waiting > 0 and view.demand > sum(i.max_concurrency for i in view.ready)
