"""Reactive scaling: enough instances for what waits and runs now, none for what has been idle for its keep-alive.

The baseline "Reactive" of PreServe section 5.3; HydraServe's keep-alive (section 8.1) decides when the last instance
goes. num_wanted = ceil((waiting + in flight) / B), clamped to [min, max].
Departures: PreServe's looks at the KV memory in use, of which it gives no rule; here requests count, against the batch.
Capacity is only taken away from a model with spare instances after `shrink_after_s` without need for them, so that a
gap between two requests drains nothing.
"""

from dataclasses import dataclass

from glowplug.domain.model import Model
from glowplug.domain.phrasing import doing
from glowplug.domain.snapshot import FleetSnapshot
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.standing import Standing, settle, standing


@dataclass(frozen=True, slots=True, kw_only=True)
class ReactiveParams:
    shrink_after_s: float = 10.0  # spare instances of a busy model live this long


@dataclass(frozen=True, slots=True)
class ReactiveState:
    """Since when one model has had more instances than it needs (epoch seconds); None: it has not."""

    spare_since: float | None = None


def scale(
    snapshot: FleetSnapshot, model: Model, state: ReactiveState | None = None, params: ReactiveParams = ReactiveParams()
) -> tuple[ScaleDecision, ReactiveState]:
    """The number of instances `model` should have now, and which of its instances to drain or to take back."""
    st = standing(snapshot, model)
    wanted = 0 if model.suspended else min(max(st.needed, st.floor), st.ceiling)
    since = state.spare_since if state is not None else None
    state = ReactiveState() if wanted >= st.num_running else ReactiveState(st.now_s if since is None else since)
    spare_s = 0.0 if state.spare_since is None else st.now_s - state.spare_since
    if wanted > 0:
        return settle(st, st.needed, why(st), may_go=lambda _: spare_s >= params.shrink_after_s), state
    return settle(st, st.needed, why(st), may_go=lambda i: st.is_idle(i, model.keep_alive_s)), state


def why(st: Standing) -> str:
    """The demand of now as a sentence."""
    if not st.demand:
        return "nobody asks for it"
    waiting, running = (
        doing(st.load.num_waiting, "request", "waits"),
        f"{st.load.num_in_flight or 'none'} {'are' if st.load.num_in_flight > 1 else 'is'} in flight",
    )
    return f"{waiting}, {running}, and one instance runs {st.per_instance} at once"
