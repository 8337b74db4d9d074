"""The union of the papers' scaling rules: how many instances run. docs/adr/0015 and 0025 give the reasons, with
figures.

Requests that wait or run set the floor. A plan by PreServe's forecast of tokens (`union_plan.py`) may raise the number,
once an instance of another model is less likely to lack GPUs than this one is to be needed (a plan is as likely too
large as too small). HydraServe's groups supply several new instances with one cold start (section 6.1). Its rule for
arrivals (section 6.1) adds instances for requests that are still to come only while a prewarmed copy makes that cheap
(mCache's workload then has a fifth fewer fetches, simulated). WarmServe's own rule, four fifths of the slots on
average, is not used: WarmServe decides which replicas there are.

A spare instance is drained once it has run nothing for the model's keep-alive (HydraServe section 8.1), and earlier
once it is not worth its GPUs (`policies/worth.py`): when the probability that so many are needed before one could start
again is below `price` for each of its GPUs: by the forecast, and without a plan also by the time since so many were
last needed. Its GPUs come free only when it leaves nothing there, so that start is one from nothing. It is drained at
once while an instance of another model finds no GPU. A pipeline grows for needed instances, not for kept ones.

In PreServe one instance stays while any load is expected (erratum E32), requested or not. Here the first instance
starts for a request and the last one ends by its keep-alive.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Self

from glowplug.domain.instance import InstanceState
from glowplug.domain.phrasing import counted
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling import hydraserve, union_plan
from glowplug.policies.scaling.baselines import why_now
from glowplug.policies.scaling.port import ScalingView, learning, settle, worths
from glowplug.policies.scaling.preserve import WINDOW_S
from glowplug.policies.start_times import FROM_NOTHING, MAX_START_S
from glowplug.policies.worth import FROM_ZERO, NEVER_S, PRICE, Asking, asked, idle_worth, level

EVEN: Final = 0.5  # P(a plan's last instance is needed), since a plan is for the expected load
NOTHING: Final = frozenset(kind.value for kind in FROM_NOTHING)
UNSEEN_S: Final = 1.0  # duration of a start before any was seen
MOST_M: Final = math.log(union_plan.MOST_SHARE)  # bound of m
NEW: Final = {"m": 0.0, "raised_at": -math.inf, "start_s": UNSEEN_S}  # the learned figures before anything is learned
ROUNDING_S: Final = 1e-6  # subtracted from a decision's time limit, since sums of times are rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionParams:
    plan: union_plan.PlanParams = field(default_factory=union_plan.PlanParams)
    arrivals: hydraserve.HydraserveParams = field(default_factory=hydraserve.HydraserveParams)
    price: float = field(default=PRICE, metadata=FROM_ZERO)  # seconds of waiting that a second of a GPU has to save
    protect_s: float = 5.0  # no instance is drained while one is that young
    spare_s: float = 10.0  # idle seconds before a spare one is drained where the keep-alive is endless


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionState:
    """The union's memory of one model: the states of PreServe and HydraServe, and times."""

    FORMAT: ClassVar[str] = "union/1"

    plan: union_plan.PlanState = field(default_factory=union_plan.PlanState)
    arrivals: hydraserve.HydraserveState | None = None
    short_at: float = float("-inf")  # when another model last lacked GPUs
    needed_at: tuple[float, ...] = ()  # when at least one, two, ... instances were last wanted
    start_s: float = UNSEEN_S  # duration of the last start from nothing

    def learned(self) -> Self:
        """Return the learned part, which holds whatever the load."""
        plan = union_plan.PlanState(m=self.plan.m, raised_at=self.plan.raised_at)
        return replace(self, plan=plan, arrivals=None, short_at=-math.inf, needed_at=())

    def figures(self) -> dict[str, float]:
        """Return how far plans are off (a logarithm), when that last grew (epoch seconds), and a start's seconds."""
        found = {"m": self.plan.m, "raised_at": self.plan.raised_at, "start_s": self.start_s}
        return {name: value for name, value in found.items() if value != NEW[name]}

    @classmethod
    def with_figures(cls, figures: Mapping[str, float], now_s: float) -> Self:
        """Build a state from such figures; a future time counts as now, since a clock was set. Raises ValueError as in
        `Learns`."""
        if unknown := figures.keys() - NEW.keys():
            raise ValueError(f"there is no figure {min(unknown)!r}")
        if not all(map(math.isfinite, figures.values())):
            raise ValueError("a figure is not finite")
        known = {**NEW, **figures}
        if abs(known["m"]) > MOST_M or not 0 <= known["start_s"] <= MAX_START_S:
            raise ValueError("a figure is out of bounds")
        plan = union_plan.PlanState(m=known["m"], raised_at=min(known["raised_at"], now_s))
        return cls(plan=plan, start_s=known["start_s"])


@learning(UnionState)
def scale(
    view: ScalingView, state: UnionState | None = None, params: UnionParams = UnionParams()
) -> tuple[ScaleDecision, UnionState]:
    """Decide how many instances `model` should have now, and how many of them one start may supply."""
    state = state or UnionState()
    plan, scaler = union_plan.plan_for(view, state.plan, params.plan)
    is_planned = not plan.is_cold and plan.num_wanted > 0  # 0: no tokens are expected at all
    if not (plan.is_cold or view.demand) and plan.num_wanted == 1:
        plan = replace(plan, num_wanted=0)
    arrivals = hydraserve.watch(view, state.arrivals, params.arrivals)
    short_at = view.now_s if view.short_elsewhere else state.short_at
    options = [(view.needed, why_now(view))]
    start_s = _start_s(view, state)
    if asked(Asking(idle_s=view.now_s - short_at), _window_s(view)) <= EVEN:
        options.append((plan.num_wanted, plan.reason))  # with cold data: instances added by the look-ahead
    if view.is_prewarmed and is_short(view):  # instances for the rest of a burst cost little then
        options.append(hydraserve.target(view, arrivals, params.arrivals))
    wanted, reason = max(options, key=lambda option: option[0])
    needed_at = _needed(view, state, wanted)
    kept = needed = wanted
    if not view.short_elsewhere:
        most = view.num_running - _num_idle(view, arrivals.idle_since, params)
        # A plan contains the need of later windows, so the time since that need was last seen adds nothing.
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
    """Seconds of the newest start from nothing among running instances; of any kind while none is known."""
    took = {i.start_kind in NOTHING: i.ready_at - i.created_at for i in view.ready if i.ready_at > i.created_at}
    start_s = took.get(True) or (max(state.start_s, took[False]) if took else state.start_s)
    return min(start_s, MAX_START_S)  # a longer one means that a clock was set


def _window_s(view: ScalingView) -> float:
    """Seconds for which a plan's instances are meant."""
    return view.forecast.window_s if view.forecast is not None and view.forecast.window_s > 0 else WINDOW_S


def _num_idle(view: ScalingView, idle_since: Mapping[str, float], params: UnionParams) -> int:
    """Number of instances that have run nothing for the model's keep-alive; a pipeline counts for all it can become."""
    alive_s = view.model.keep_alive_s if view.model.keep_alive_s >= 0 else params.spare_s
    idle = [i.instance_id for i in view.ready if view.now_s - idle_since.get(i.instance_id, view.now_s) >= alive_s]
    if not idle:
        return 0
    can_become = worths(view.running)
    return sum(can_become[instance_id] for instance_id in idle)


def _needed(view: ScalingView, state: UnionState, wanted: int) -> tuple[float, ...]:
    """Times at which at least one, two, ... instances were last wanted, for as many as run or are wanted."""
    before, num = state.needed_at, max(wanted, view.num_running)
    return tuple(view.now_s if at < wanted else before[at] if at < len(before) else view.now_s for at in range(num))


def _worth_keeping(view: ScalingView, wanted: int, idle_s: Sequence[float], start_s: float, params: UnionParams) -> int:
    """Number of running instances that are worth their GPUs, at least `wanted`; a single last one goes by its
    keep-alive. `idle_s`: seconds since more than none, one, ... were wanted."""
    number = max(1, wanted)
    while number < view.num_running:
        asking = level(view.forecast, number, view.per_instance, idle_s[number])
        if idle_worth(asking, start_s) < params.price * view.model.num_gpus:
            break
        number += 1
    return number if number > 1 else wanted


def _stands_until(view: ScalingView, state: UnionState, params: UnionParams) -> float:
    """The next moment at which the decision may change, while no request or start is under way; 0 if that is
    unknown."""
    if view.short_elsewhere or view.draining or view.num_coming or view.num_running > max(1, view.floor):
        return 0.0
    moments = [state.short_at + _window_s(view)]
    for instance in view.running:
        last_used_at = max(view.load.last_active_at, instance.ready_at)
        moments += [instance.created_at + params.protect_s, last_used_at + view.model.keep_alive_s]
    return min((at - ROUNDING_S for at in moments if at > view.now_s), default=math.inf)


def is_growing(view: ScalingView, params: UnionParams) -> bool:
    """Return whether requests wait, or an instance is starting or in its first seconds."""
    if view.load.num_waiting:
        return True
    return any(i.state is not InstanceState.READY or view.now_s - i.created_at < params.protect_s for i in view.running)


def is_short(view: ScalingView) -> bool:
    """Return whether requests wait because no instance has a slot. Where the model has a TPOT objective the union's
    routing holds some requests although slots are free; those do not count."""
    if not view.model.slo.tpot_s:
        return view.load.num_waiting > 0
    return view.load.num_waiting > 0 and view.demand > sum(i.max_concurrency for i in view.ready)
