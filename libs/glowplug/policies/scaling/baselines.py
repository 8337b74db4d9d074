"""Scaling by demand, or not at all: the baselines without a forecast.

- Reactive (PreServe section 5.3): num_wanted = ceil((waiting + in flight) / B) clamped to [min, max]; HydraServe's
  keep-alive (section 8.1) ends the last instance.
- Static (the same): `min_instances` of each model all the time (the paper's "static 8").

Departures:
- PreServe's reactive scaler uses KV memory, for which the paper gives no rule; here requests count against the batch.
- Reactive drains spare instances only after `shrink_after_s` without need for them.
- Under `static` a model with no minimum gets one instance while requests wait or run, else it could never answer.
"""

from dataclasses import dataclass

from glowplug.domain.bounds import Positive
from glowplug.domain.instance import Instance
from glowplug.domain.phrasing import counted, doing
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.port import ScalingView, settle


@dataclass(frozen=True, slots=True, kw_only=True)
class ReactiveParams:
    shrink_after_s: Positive = 10.0  # spare time of a busy model's instances


@dataclass(frozen=True, slots=True)
class ReactiveState:
    """Epoch seconds since one model has had spare instances; None: it has none."""

    spare_since: float | None = None


def reactive(
    view: ScalingView, state: ReactiveState | None = None, params: ReactiveParams = ReactiveParams()
) -> tuple[ScaleDecision, ReactiveState]:
    wanted = 0 if view.model.suspended else min(max(view.needed, view.floor), view.ceiling)
    since = state.spare_since if state is not None else None
    since = None if wanted >= view.num_running else view.now_s if since is None else since

    def may_go(instance: Instance) -> bool:
        if wanted > 0:
            return since is not None and view.now_s - since >= params.shrink_after_s
        return view.is_idle(instance, view.model.keep_alive_s)

    return settle(view, view.needed, why_now(view), may_go=may_go), ReactiveState(since)


def why_now(view: ScalingView) -> str:
    if not view.demand:
        return "no request asks for it"
    waiting, num = doing(view.load.num_waiting, "request", "waits"), view.load.num_in_flight
    running = f"{num or 'none'} {'are' if num > 1 else 'is'} in flight"
    return f"{waiting}, {running}, and one instance runs {view.per_instance} at once"


def static(view: ScalingView, state: None = None) -> tuple[ScaleDecision, None]:
    least = view.floor or (1 if view.demand else 0)
    return settle(view, least, f"its minimum, {counted(view.floor, 'instance')}, is kept at all times"), None
