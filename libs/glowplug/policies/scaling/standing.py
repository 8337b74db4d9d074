"""What every scaling policy looks at, and how a number it wants becomes a decision.

A policy says how many instances there should be and which spare ones may go; the bounds of the model, an operator's
word, who is taken back from a drain, who goes first (the least loaded, WarmServe section 3; the newest among equals)
and the keep-alive of the last one (HydraServe section 8.1) are the same for all of them.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from glowplug.domain.instance import Instance, InstanceState, slots_per_instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import FleetSnapshot, Forecast, ModelLoad
from glowplug.policies.decisions import ScaleDecision

Figures = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One model as it stands. Counts are in instances that one GPU (or tensor group) each would make: a pipeline of s
    stages can become s of them, and runs s batches until then (HydraServe section 6.1)."""

    now_s: float
    model: Model
    load: ModelLoad
    running: tuple[Instance, ...]  # on their way up or READY, oldest first
    draining: tuple[Instance, ...]
    num_running: int
    num_pending: int  # asked for, without a row so far
    floor: int
    ceiling: int
    forecast: Forecast | None
    next_forecast: Forecast | None
    is_prewarmed: bool  # weights of it lie on GPUs: the way back is short

    @property
    def demand(self) -> int:
        return self.load.num_waiting + self.load.num_in_flight

    @property
    def num_coming_or_there(self) -> int:
        return self.num_running + self.num_pending

    @property
    def num_coming(self) -> int:
        """On their way up, rows or not."""
        return self.num_coming_or_there - sum(
            worths(i for i in self.running if i.state is InstanceState.READY).values()
        )

    @property
    def per_instance(self) -> int:
        """Requests that one instance runs at once: as the engines that are READY say, else as the model declares."""
        return slots_per_instance(self.running) or max(1, self.model.max_concurrency)

    @property
    def needed(self) -> int:
        """Instances that what waits and runs now takes."""
        return math.ceil(self.demand / self.per_instance)

    def in_flight(self, instance: Instance) -> int:
        return self.load.in_flight_by_instance.get(instance.instance_id, 0)

    def is_idle(self, instance: Instance, for_s: float) -> bool:
        """Whether it has run nothing, and its model had no request, for so long; -1: never."""
        if for_s < 0 or self.in_flight(instance):
            return False
        return self.now_s - max(self.load.last_active_at, instance.ready_at) >= for_s


def worths(instances: Iterable[Instance]) -> dict[str, int]:
    """instance_id -> how many instances it can still become: a pipeline's stages, less those ("<its id>.<stage>") that
    serve for themselves already."""
    found = {i.instance_id: i.num_stages if i.num_stages > 1 else 1 for i in instances}
    if sum(found.values()) == len(found):
        return found  # no pipelines, as nearly always
    for instance_id in list(found):
        whole = instance_id.rpartition(".")[0]
        if found.get(whole, 1) > 1:
            found[whole] -= 1
    return found


def standing(snapshot: FleetSnapshot, model: Model) -> Standing:
    """The model's part of the snapshot."""
    serving = snapshot.instances_of(model.key)
    running = tuple(i for i in serving if i.state is not InstanceState.DRAINING)
    floor = max(model.min_instances, 1 if model.pinned else 0)
    mine = (i for i in snapshot.instances.values() if i.model_key == model.key)
    return Standing(
        now_s=snapshot.now_s,
        model=model,
        load=snapshot.loads.get(model.key, ModelLoad()),
        running=running,
        draining=tuple(i for i in serving if i.state is InstanceState.DRAINING),
        num_running=sum(worths(running).values()),
        num_pending=snapshot.num_pending.get(model.key, 0),
        floor=floor,
        ceiling=max(model.max_instances, floor),
        forecast=snapshot.forecasts.get(model.key),
        next_forecast=snapshot.next_forecasts.get(model.key),
        is_prewarmed=any(i.state is InstanceState.PREWARMED for i in mine),
    )


def settle(
    st: Standing,
    target: int,
    why: str,
    *,
    may_go: Callable[[Instance], bool] = lambda _: True,
    keep_alive_s: float | None = None,
    group_size: int = 1,
    inputs: Figures | None = None,
    take_back: bool = True,
) -> ScaleDecision:
    """A decision for `target` instances within the model's bounds.

    A spare instance goes only if `may_go` says so, and the last one only once idle for `keep_alive_s` (None: the
    model's own); what is above the ceiling or suspended goes at once. With `take_back` an instance that drains comes
    back before another one starts.
    """
    model = st.model
    if model.suspended:
        target, why = 0, "its operator has drained it"
    wanted = 0 if model.suspended else min(max(target, st.floor), st.ceiling)
    figures = _figures(st) | dict(inputs or {})
    if wanted >= st.num_running:
        back, room, worth = [], wanted - st.num_running, worths(st.draining)
        for instance in st.draining if take_back else ():
            if room > 0:
                back.append(instance.instance_id)
                room -= worth[instance.instance_id]
        return ScaleDecision(
            model_key=model.key, num_wanted=wanted, resume=tuple(back), reason=why, inputs=figures,
            group_size=group_size,
            num_required=wanted,
        )  # fmt: skip
    alive_s = model.keep_alive_s if keep_alive_s is None else keep_alive_s
    drain, left = _drain(st, wanted, may_go, alive_s)
    if wanted == 0 and not model.suspended and st.num_running <= st.ceiling:
        why = f"it has been idle for its keep-alive of {alive_s:g} s" if drain else "its keep-alive is not over"
    if st.load.last_active_at:
        figures["idle_s"] = round(max(0.0, st.now_s - st.load.last_active_at), 3)
    else:
        figures["idle_s"] = -1
    return ScaleDecision(
        model_key=model.key,
        num_wanted=left,
        drain=tuple(drain),
        reason=why,
        inputs=figures,
        group_size=group_size,
        num_required=wanted,
    )


def _drain(st: Standing, wanted: int, may_go: Callable[[Instance], bool], keep_alive_s: float) -> tuple[list[str], int]:
    """Who goes, and how many are left. A pipeline goes only when all it is worth is spare, and nobody who is READY for
    one that is still on its way: it may be long in coming, and all that serve would wait for it."""
    ready = [i for i in st.running if i.state is InstanceState.READY]
    drain, left, worth = [], st.num_running, worths(st.running)
    serving = sum(worth[i.instance_id] for i in ready)
    for instance in sorted(ready, key=lambda i: (st.in_flight(i), -i.created_at, i.instance_id)):
        after = left - worth[instance.instance_id]
        if serving - worth[instance.instance_id] < wanted:
            continue
        if not st.model.suspended and left <= st.ceiling:
            is_last = after == 0
            if not may_go(instance) or (is_last and not st.is_idle(instance, keep_alive_s)):
                continue
        drain.append(instance.instance_id)
        left = after
        serving -= worth[instance.instance_id]
    return drain, left


def _figures(st: Standing) -> dict[str, float | int | str]:
    return {
        "waiting": st.load.num_waiting,
        "in_flight": st.load.num_in_flight,
        "per_instance": st.per_instance,
        "running": st.num_running,
        "min": st.floor,
        "max": st.ceiling,
    }
