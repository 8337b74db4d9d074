"""Scaling by the requests of a sliding window, in groups that one cold start brings.

Paper: HydraServe section 6.1. The requests that came in the previous window predict the most that may come in the next;
with those that wait they say how many workers are needed, and a cold start creates a pipeline group no smaller than the
number of new ones, several groups when it is more than a group holds. Section 8.1: an instance that has run nothing for
30 s goes. The window is 1 s, a batch 8, a group at most 4 in the authors' code.

    new = ceil((waiting + expected - room) / B),   expected = most arrivals of the last windows

Departures:
- The code computes the expectation and never uses it (erratum E22); `literal_code=True` leaves it out as well.
- Requests that fit the free slots of what runs or comes need no new worker (`room`); the paper leaves that open.
- Where routers do not count arrivals the growth of what waits and runs stands for them; it misses those that came and
  went within a window.
- The keep-alive is the model's own, 30 s unless it says otherwise.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.model import Model
from glowplug.domain.phrasing import counted, doing
from glowplug.domain.snapshot import FleetSnapshot
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.standing import Standing, settle, standing


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraserveParams:
    window_s: float = 1.0
    num_windows: int = 1  # the busiest of so many past windows is what the next may bring
    group_size: int = 4  # stages of one group at most
    literal_code: bool = False  # nothing expected: what waits alone


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraserveState:
    """Arrivals as windows closed, newest last, and since when each instance runs nothing."""

    opened_at: float = float("-inf")
    arrived_before: int = 0  # the count when the open window began
    arrivals: tuple[int, ...] = ()  # of closed windows
    demand_before: int = 0
    idle_since: Mapping[str, float] = field(default_factory=dict)


def scale(
    snapshot: FleetSnapshot,
    model: Model,
    state: HydraserveState | None = None,
    params: HydraserveParams = HydraserveParams(),
) -> tuple[ScaleDecision, HydraserveState]:
    """The number of instances `model` should have now, and how many of them one start may bring."""
    st = standing(snapshot, model)
    state = watch(st, state, params)
    wanted, reason = target(st, state, params)

    def may_go(instance_id: str) -> bool:
        since = state.idle_since.get(instance_id)
        return model.keep_alive_s >= 0 and since is not None and st.now_s - since >= model.keep_alive_s

    decision = settle(
        st,
        wanted,
        reason,
        may_go=lambda i: may_go(i.instance_id),
        group_size=params.group_size,
        inputs={"arrived": max(state.arrivals, default=0)},
    )
    return decision, state


def watch(st: Standing, state: HydraserveState | None, params: HydraserveParams) -> HydraserveState:
    """Count arrivals into windows, and note who runs nothing."""
    counted = st.load.num_arrived
    if state is None:
        state = HydraserveState(opened_at=st.now_s, arrived_before=counted, demand_before=st.demand)
    idle = {
        i.instance_id: state.idle_since.get(i.instance_id, max(st.now_s, i.ready_at))
        for i in st.running
        if not st.in_flight(i)
    }
    opened_at, before, arrivals = state.opened_at, state.arrived_before, state.arrivals
    demand_before = state.demand_before
    if st.now_s - opened_at >= params.window_s:
        came = counted - before if counted else max(0, st.demand - demand_before)
        num_empty = int((st.now_s - opened_at) / params.window_s) - 1  # nobody looked: nothing was told either
        closed = (max(0, came), *([0] * min(num_empty, params.num_windows)))
        arrivals = (*arrivals, *closed)[-params.num_windows :]
        opened_at, before, demand_before = st.now_s, counted, st.demand
    return HydraserveState(
        opened_at=opened_at, arrived_before=before, arrivals=arrivals, demand_before=demand_before, idle_since=idle
    )


def target(st: Standing, state: HydraserveState, params: HydraserveParams) -> tuple[int, str]:
    """Instances there should be, and why."""
    expected = 0 if params.literal_code else max(state.arrivals, default=0)
    there = st.num_coming_or_there
    slots = sum(i.max_concurrency for i in st.running) + st.num_pending * st.per_instance
    room = max(0, slots - st.load.num_in_flight)
    new = math.ceil(max(0, st.load.num_waiting + expected - room) / st.per_instance)
    if new:
        waiting, free = doing(st.load.num_waiting, "request", "waits"), counted(room, "slot")
        came = f"{waiting} and {expected or 'none'} may come in {params.window_s:g} s"
        return there + new, f"{came}, but only {free} of its instances {'is' if room <= 1 else 'are'} free"
    least = max(st.needed, math.ceil((st.demand + expected) / st.per_instance))
    requests = f"{counted(st.demand, 'request')} and {expected or 'none'} that may come"
    return min(there, least), f"{requests} fit {counted(there, 'instance')}"
