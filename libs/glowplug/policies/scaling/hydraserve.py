"""Scaling by the requests of a sliding window, in groups that one cold start supplies.

Paper: HydraServe section 6.1. The previous window's requests predict the most of the next; with the waiting ones they
give the number of workers, and a cold start creates a pipeline group no smaller than the new ones, or several groups.
Section 8.1: an instance idle for 30 s stops. In the authors' code the window is 1 s, a batch 8, a group at most 4.

    new = ceil((waiting + expected - free) / B),   expected = most arrivals of the last windows

Departures:
- The code computes the expectation and never uses it (erratum E22); nor does `literal_code=True`.
- Requests that fit free slots of running or coming instances need no new worker (`free`); the paper leaves that open.
- Without routers' arrival counts, the growth in waiting and running requests is used, which misses short ones.
- The keep-alive is the model's own, 30 s by default.

Consolidation (`consolidate`, section 6.1 too): a serving pipeline scales down: its first worker loads the rest and
serves alone; or, when as many workers are needed as the group has, up: every worker becomes an instance. Groups that
serve at once are decided on together, oldest first.

Departure: the paper lets each worker decide, so a group may become fewer instances than workers; here it is one or all.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from glowplug.domain.bounds import Count, Positive
from glowplug.domain.instance import Instance
from glowplug.domain.phrasing import counted, doing
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.port import ScalingView, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraserveParams:
    window_s: Positive = 1.0
    num_windows: Count = 1  # past windows whose busiest predicts the next
    group_size: Count = 4  # stages of one group at most
    literal_code: bool = False  # count waiting requests alone


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraserveState:
    """Arrivals per closed window, newest last, and the time since which each instance is idle."""

    opened_at: float = float("-inf")
    arrived_before: int = 0
    arrivals: tuple[int, ...] = ()
    demand_before: int = 0
    idle_since: Mapping[str, float] = field(default_factory=dict)


def scale(
    view: ScalingView, state: HydraserveState | None = None, params: HydraserveParams = HydraserveParams()
) -> tuple[ScaleDecision, HydraserveState]:
    state = watch(view, state, params)
    wanted, reason = target(view, state, params)

    def may_go(instance: Instance) -> bool:
        since = state.idle_since.get(instance.instance_id)
        return view.model.keep_alive_s >= 0 and since is not None and view.now_s - since >= view.model.keep_alive_s

    decision = settle(
        view,
        wanted,
        reason,
        may_go=may_go,
        group_size=params.group_size,
        inputs={"arrived": max(state.arrivals, default=0)},
    )
    return decision, state


def watch(view: ScalingView, state: HydraserveState | None, params: HydraserveParams) -> HydraserveState:
    counted = view.load.num_urgent_arrived  # without batch, as in forecasts
    if state is None:
        state = HydraserveState(opened_at=view.now_s, arrived_before=counted, demand_before=view.demand)
    if (num_passed := int((view.unchanged_until - state.opened_at) / params.window_s)) > 0:
        state = replace(state, opened_at=state.opened_at + num_passed * params.window_s)  # skipped: nothing changed
    since, busy = state.idle_since, view.load.in_flight_by_instance
    free = [i for i in view.running if not busy.get(i.instance_id)]
    idle = {i.instance_id: since.get(i.instance_id, max(view.now_s, i.ready_at)) for i in free}
    if view.now_s - state.opened_at < params.window_s:
        return state if idle == state.idle_since else replace(state, idle_since=idle)
    came = counted - state.arrived_before if view.load.num_arrived else max(0, view.demand - state.demand_before)
    num_empty = int((view.now_s - state.opened_at) / params.window_s) - 1
    closed = (max(0, came), *([0] * min(num_empty, params.num_windows)))
    return HydraserveState(
        opened_at=view.now_s,
        arrived_before=counted,
        arrivals=(*state.arrivals, *closed)[-params.num_windows :],
        demand_before=view.demand,
        idle_since=idle,
    )


def is_quiet(view: ScalingView, state: HydraserveState) -> bool:
    """Return whether, without a change, all later windows are empty."""
    return state.opened_at == view.now_s and not (view.demand or not state.arrivals or any(state.arrivals))


def target(view: ScalingView, state: HydraserveState, params: HydraserveParams) -> tuple[int, str]:
    expected = 0 if params.literal_code else max(state.arrivals, default=0)
    there = view.num_coming_or_there
    slots = sum(i.max_concurrency for i in view.running) + view.num_pending * view.per_instance
    num_free = max(0, slots - view.load.num_in_flight)
    new = math.ceil(max(0, view.load.num_waiting + expected - num_free) / view.per_instance)
    if new:
        waiting, free = doing(view.load.num_waiting, "request", "waits"), counted(num_free, "slot")
        came = f"{waiting} and {expected or 'none'} may come in {params.window_s:g} s"
        return there + new, f"{came}, but only {free} of its instances {'is' if num_free <= 1 else 'are'} free"
    least = max(view.needed, math.ceil((view.demand + expected) / view.per_instance))
    requests = f"{counted(view.demand, 'request')} and {expected or 'none'} that may come"
    return min(there, least), f"{requests} fit {counted(there, 'instance')}"


class ConsolidationKind(StrEnum):
    DOWN = "consolidate_down"
    UP = "consolidate_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationDecision:
    instance_id: str
    becomes: ConsolidationKind
    reason: str


def consolidate(pipelines: Sequence[Instance], num_whole: int, num_required: int) -> tuple[ConsolidationDecision, ...]:
    """Decide for each pipeline, oldest first; `num_required` instances are needed in all, `num_whole` exist or are
    coming."""
    decisions, left = [], num_required - num_whole
    for instance in pipelines:
        is_up = left >= max(2, instance.num_stages)
        becomes = ConsolidationKind.UP if is_up else ConsolidationKind.DOWN
        need = f"{max(0, left) or 'none'} of {num_required} wanted instances {'are' if left > 1 else 'is'} missing"
        all_stages = f"so each of its {instance.num_stages} stages becomes an instance"
        reason = f"{need}, {all_stages if is_up else 'so one instance is made of its stages'}"
        decisions.append(ConsolidationDecision(instance_id=instance.instance_id, becomes=becomes, reason=reason))
        left -= instance.num_stages if is_up else 1
    return tuple(decisions)
