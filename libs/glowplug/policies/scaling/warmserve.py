"""Scaling by the load of the last seconds against what the instances take.

Paper: WarmServe section 3 (the autoscaler checks load and instances periodically and stops instances of a model that is
used too little; they finish what they have in a grace period) with the constants of its authors' code: every 0.5 s,
with L the number of requests held or running averaged over 5 s, n instances and B requests each,

    L > 0.8 n B:  n = ceil(L / 0.8 / B)        L < 0.5 n B:  n = ceil(L / 0.5 / B)

An instance is protected for its first 5 s; the least loaded goes first.

Departures:
- A request that finds no slot starts an instance at once, unless one is coming (the paper's router does so, section 6):
  averaged over 5 s a burst would otherwise wait for the mean to rise.
- An instance that drains is taken back when the load returns. The paper's "no longer receive additional requests"
  (section 4.1) and go: `take_back=False`, which `one_way` is.
- The last instance goes when the model's own keep-alive says so; the paper's rule has L = 0 end it. `keep_alive_s: 0`
  in the model is the paper's.
- While one instance is that young none goes: a busy old one is not stopped for a new one that is protected.
- Capacity is what the instances say they take, so that a pipeline counts for its stages.
"""

import math
from dataclasses import dataclass, field

from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model
from glowplug.domain.phrasing import counted, doing
from glowplug.domain.snapshot import FleetSnapshot
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.average import Level
from glowplug.policies.scaling.standing import Standing, settle, standing


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmserveParams:
    up_ratio: float = 0.8
    down_ratio: float = 0.5
    average_s: float = 5.0
    every_s: float = 0.5
    protect_s: float = 5.0  # a new instance is not stopped before
    start_when_full: bool = True  # the router's own rule; False leaves it to the average alone
    take_back: bool = True  # from a drain; False: what drains goes, as in the paper


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmserveState:
    """The load of late, and what was wanted when last looked at."""

    load: Level = field(default_factory=Level)
    looked_at: float = float("-inf")
    num_wanted: int = 0
    reason: str = ""


def scale(
    snapshot: FleetSnapshot,
    model: Model,
    state: WarmserveState | None = None,
    params: WarmserveParams = WarmserveParams(),
) -> tuple[ScaleDecision, WarmserveState]:
    """The number of instances `model` should have now, and which of its instances to drain or to take back."""
    st = standing(snapshot, model)
    state, average = watch(st, state, params)
    decision = settle(
        st,
        state.num_wanted,
        state.reason,
        may_go=lambda _: not is_growing(st, params),
        inputs={"load_average": round(average, 3)},
        take_back=params.take_back,
    )
    return decision, state


def one_way(
    snapshot: FleetSnapshot, model: Model, state: WarmserveState | None = None
) -> tuple[ScaleDecision, WarmserveState]:
    """The same, and what drains is never taken back (section 4.1, to the letter)."""
    return scale(snapshot, model, state, WarmserveParams(take_back=False))


def watch(
    st: Standing, state: WarmserveState | None, params: WarmserveParams, load: float | None = None
) -> tuple[WarmserveState, float]:
    """One look at the load (None: the requests that wait or run): the state after it, with what is wanted, and the
    load's average."""
    state = state or WarmserveState()
    seen = state.load.seen(st.now_s, st.demand if load is None else load, params.average_s, params.every_s / 2)
    average = seen.mean(st.now_s, params.average_s)
    wanted, reason, looked_at = state.num_wanted, state.reason, state.looked_at
    if st.now_s - looked_at >= params.every_s - 1e-9:
        wanted, reason = target(st, average, params)
        looked_at = st.now_s
    if params.start_when_full and is_full(st) and wanted <= st.num_running:
        wanted, reason = (
            st.num_running + 1,
            f"{doing(st.load.num_waiting, 'request', 'waits')}, and no instance has a slot",
        )
    return WarmserveState(load=seen, looked_at=looked_at, num_wanted=wanted, reason=reason), average


def target(st: Standing, average: float, params: WarmserveParams) -> tuple[int, str]:
    """The rule itself."""
    capacity = sum(i.max_concurrency for i in st.running) + st.num_pending * st.per_instance
    there = st.num_coming_or_there
    instances = counted(there, "instance")
    said = f"it has had {average:.2f} requests at once on average over {params.average_s:g} s"
    if average > params.up_ratio * capacity:
        wanted = math.ceil(average / params.up_ratio / st.per_instance - 1e-9)
        return max(wanted, there), f"{said}, more than {params.up_ratio:.0%} of what {instances} may run"
    if average < params.down_ratio * capacity:
        wanted = math.ceil(average / params.down_ratio / st.per_instance - 1e-9)
        return min(wanted, there), f"{said}, less than {params.down_ratio:.0%} of what {instances} may run"
    return there, f"{said}, {params.down_ratio:.0%} to {params.up_ratio:.0%} of what {instances} may run"


def is_growing(st: Standing, params: WarmserveParams) -> bool:
    """Whether an instance is in its first seconds."""
    return any(st.now_s - i.created_at < params.protect_s for i in st.running)


def is_full(st: Standing) -> bool:
    """Whether requests wait while nothing is coming that they wait for and nothing that runs has room."""
    if not st.load.num_waiting or st.num_pending:
        return False
    if any(i.state is not InstanceState.READY for i in st.running):
        return False
    return all(st.in_flight(i) >= i.max_concurrency for i in st.running)
