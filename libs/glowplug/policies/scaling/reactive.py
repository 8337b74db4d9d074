"""Reactive scaling: enough instances for what waits and runs now, none for what has been idle for its keep-alive.

The baseline of WarmServe section 6.1 and PreServe section 5.1 ("Reactive"); HydraServe's keep-alive (section 7) decides
when the last instance goes. num_wanted = ceil((waiting + in flight) / B), clamped to [min, max].
Departure: capacity is only taken away from a model with spare instances after `shrink_after_s` without need for them,
so that a gap between two requests drains nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.snapshot import FleetSnapshot, ModelLoad
from glowplug.policies.decisions import ScaleDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class ReactiveParams:
    shrink_after_s: float = 10.0  # spare instances of a busy model live this long


@dataclass(frozen=True, slots=True)
class ReactiveState:
    """When each model began to have more instances than it needs (epoch seconds)."""

    spare_since: Mapping[str, float] = field(default_factory=dict)


def scale(
    snapshot: FleetSnapshot, model: Model, state: ReactiveState, params: ReactiveParams = ReactiveParams()
) -> tuple[ScaleDecision, ReactiveState]:
    """The number of instances `model` should have now, and which of its instances to drain or to take back."""
    load = snapshot.loads.get(model.key, ModelLoad())
    instances = snapshot.instances_of(model.key)
    running = [i for i in instances if i.state is not InstanceState.DRAINING]
    demand = load.num_waiting + load.num_in_flight
    needed = math.ceil(demand / max(1, model.max_concurrency))
    floor = max(model.min_instances, 1 if model.pinned else 0)
    if model.suspended:
        needed, floor, why = 0, 0, "suspended by its operator"
    elif demand:
        why = f"{load.num_waiting} waiting + {load.num_in_flight} in flight over {model.max_concurrency} per instance"
    else:
        why = "no demand"
    ceiling = max(model.max_instances, floor)
    wanted = min(max(needed, floor), ceiling)
    inputs: dict[str, float | int | str] = {
        "waiting": load.num_waiting,
        "in_flight": load.num_in_flight,
        "per_instance": model.max_concurrency,
        "running": len(running),
        "min": floor,
        "max": ceiling,
    }
    if wanted >= len(running):
        back = [i for i in instances if i.state is InstanceState.DRAINING][: wanted - len(running)]
        decision = ScaleDecision(
            model_key=model.key,
            num_wanted=wanted,
            resume=tuple(i.instance_id for i in back),
            reason=why,
            inputs=inputs,
        )
        return decision, _forget(state, model.key)
    return _shrink(snapshot.now_s, model, load, running, wanted, ceiling, inputs, why, state, params)


def _shrink(
    now_s: float,
    model: Model,
    load: ModelLoad,
    running: list[Instance],
    wanted: int,
    ceiling: int,
    inputs: dict[str, float | int | str],
    why: str,
    state: ReactiveState,
    params: ReactiveParams,
) -> tuple[ScaleDecision, ReactiveState]:
    since = state.spare_since.get(model.key, now_s)
    state = ReactiveState({**state.spare_since, model.key: since})
    surplus = sorted(
        (i for i in running if i.state is InstanceState.READY),
        key=lambda i: (load.in_flight_by_instance.get(i.instance_id, 0), -i.created_at, i.instance_id),
    )[: len(running) - wanted]
    if model.suspended or len(running) > ceiling:
        surplus = surplus[: len(running) - (0 if model.suspended else ceiling)]
    elif wanted > 0:
        if now_s - since < params.shrink_after_s:
            surplus = []
    else:
        idle = [i for i in surplus if _is_idle(i, load, model.keep_alive_s, now_s)]
        why = f"idle for its keep-alive of {model.keep_alive_s:g} s" if idle else "within its keep-alive"
        surplus = idle
    inputs["idle_s"] = round(max(0.0, now_s - load.last_active_at), 3) if load.last_active_at else -1
    decision = ScaleDecision(
        model_key=model.key,
        num_wanted=len(running) - len(surplus),
        drain=tuple(i.instance_id for i in surplus),
        reason=why,
        inputs=inputs,
    )
    return decision, state


def _is_idle(instance: Instance, load: ModelLoad, keep_alive_s: float, now_s: float) -> bool:
    if keep_alive_s < 0 or load.in_flight_by_instance.get(instance.instance_id, 0):
        return False
    return now_s - max(load.last_active_at, instance.ready_at) >= keep_alive_s


def _forget(state: ReactiveState, model_key: str) -> ReactiveState:
    if model_key not in state.spare_since:
        return state
    return ReactiveState({k: v for k, v in state.spare_since.items() if k != model_key})
