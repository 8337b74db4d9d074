"""The shape of every scaling policy: its view, one model's state, and the way from a number to a decision.

A policy is `scale(view, state, params) -> (ScaleDecision, state)`: the number of instances, and the spare ones that may
be drained. `settle` adds the common parts: the model's bounds, operators' orders, draining instances taken back, the
drain order (outdated, then least loaded, WarmServe section 3; newest among equals) and the last one's keep-alive
(HydraServe section 8.1).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self, TypeVar, runtime_checkable

from glowplug.domain.instance import Instance, InstanceState, slots_per_instance
from glowplug.domain.model import Model
from glowplug.domain.phrasing import doing
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.policies.decisions import ScaleDecision

Figures = Mapping[str, float | int | str]
_Scale = TypeVar("_Scale", bound=Callable[..., Any])
_LEARNING = "learning"


@dataclass(slots=True, kw_only=True)
class ScalingView:
    """One model's state, not changed by policies. A pipeline of s stages counts as the s instances that it can become,
    and runs s batches until then (HydraServe section 6.1)."""

    now_s: float
    model: Model
    instances: tuple[Instance, ...] = ()
    load: ModelLoad = field(default_factory=ModelLoad)
    forecast: Forecast | None = None
    next_forecast: Forecast | None = None
    windows: tuple[Forecast, ...] = ()  # from the current window on, unmerged
    start_s: float = 0.0  # expected duration of a start; 0: unknown
    num_pending: int = 0  # requested, without a row yet
    short_elsewhere: bool = False  # another model waits for a GPU
    unchanged_until: float = 0.0  # end of the last answer's validity

    serving: list[Instance] = field(init=False)  # starting to draining, oldest first; none gone or dormant
    running: list[Instance] = field(init=False)  # of `serving`, starting or READY
    ready: list[Instance] = field(init=False)
    draining: list[Instance] = field(init=False)
    num_running: int = field(init=False)
    num_coming: int = field(init=False)
    num_coming_or_there: int = field(init=False)
    per_instance: int = field(init=False)  # concurrent requests: by READY engines, else by the model
    floor: int = field(init=False)
    ceiling: int = field(init=False)
    demand: int = field(init=False)

    def __post_init__(self) -> None:
        self.serving = serving = [i for i in self.instances if i.serves and not i.state.is_gone]
        if len(serving) > 1:
            serving.sort(key=lambda i: (i.created_at, i.instance_id))
        self.ready = [i for i in serving if i.state is InstanceState.READY]
        if len(self.ready) == len(serving):
            self.running, self.draining = serving, []
        else:
            self.running = [i for i in serving if i.state is not InstanceState.DRAINING]
            self.draining = [i for i in serving if i.state is InstanceState.DRAINING]
        self.num_running = sum(worths(self.running).values())
        self.num_coming_or_there = self.num_running + self.num_pending
        self.num_coming = self.num_pending
        if len(self.ready) != len(self.running):
            self.num_coming += self.num_running - sum(worths(self.ready).values())
        self.per_instance = slots_per_instance(self.ready, self.model.max_concurrency)
        self.floor = max(self.model.min_instances, 1 if self.model.pinned else 0)
        self.ceiling = max(self.model.max_instances, self.floor)
        self.demand = self.load.num_waiting + self.load.num_in_flight

    @property
    def is_prewarmed(self) -> bool:
        """Whether replicas make a start short."""
        return any(i.state is InstanceState.PREWARMED for i in self.instances)

    @property
    def needed(self) -> int:
        return math.ceil(self.demand / self.per_instance)

    def in_flight(self, instance: Instance) -> int:
        return self.load.in_flight_by_instance.get(instance.instance_id, 0)

    def is_idle(self, instance: Instance, for_s: float) -> bool:
        """Return whether the instance, and its model, had no request for `for_s`; -1: never."""
        if for_s < 0 or self.in_flight(instance):
            return False
        return self.now_s - max(self.load.last_active_at, instance.ready_at) >= for_s


@runtime_checkable
class Learns(Protocol):
    """A policy's state of a model, part of it learned."""

    FORMAT: ClassVar[str]
    """Owner and version of the figures, as "union/1"; a change of meaning or unit is a new version."""

    def learned(self) -> Self:
        """Return the learned part alone."""

    def figures(self) -> dict[str, float]:
        """Return the learned part as finite numbers, without unchanged ones."""

    @classmethod
    def with_figures(cls, figures: Mapping[str, float], now_s: float) -> Self:
        """Build a state from learned figures. Raises ValueError for an unknown name or impossible number."""


def learning(state: type[Learns]) -> Callable[[_Scale], _Scale]:
    """Mark a policy whose learned state the next leading autoscaler inherits."""

    def mark(scale: _Scale) -> _Scale:
        setattr(scale, _LEARNING, state)
        return scale

    return mark


def learner(scale: Callable[..., Any]) -> type[Learns] | None:
    found: type[Learns] | None = getattr(scale, _LEARNING, None)
    return found


def without_load(state: Any) -> Any:
    return state.learned() if isinstance(state, Learns) else None


def worths(instances: Iterable[Instance]) -> dict[str, int]:
    """Return instances that each can still become: stages, less those ("<its id>.<stage>") serving as instances."""
    found = {i.instance_id: i.num_stages if i.num_stages > 1 else 1 for i in instances}
    if sum(found.values()) == len(found):
        return found
    for instance_id in list(found):
        whole = instance_id.rpartition(".")[0]
        if found.get(whole, 1) > 1:
            found[whole] -= 1
    return found


def needed_by_pipeline(instance_id: str, rows: Mapping[str, Instance]) -> str:
    """Return the pipeline that still runs layers on this former stage, else "". The instance must not stop before the
    pipeline is whole and its stages idle."""
    first = rows.get(instance_id.rpartition(".")[0])
    if first is None or first.state.is_gone or (first.is_whole and not first.stages_busy):
        return ""
    return first.instance_id


def settle(
    view: ScalingView,
    target: int,
    why: str,
    *,
    may_go: Callable[[Instance], bool] = lambda _: True,
    keep_alive_s: float | None = None,
    group_size: int = 1,
    inputs: Figures | None = None,
    take_back: bool = True,
) -> ScaleDecision:
    """Decide for `target` instances within the model's bounds.

    A spare instance is drained only if `may_go`, the last only once idle for `keep_alive_s` (None: the model's); those
    above the ceiling or of a suspended model at once. With `take_back` draining ones return before others start."""
    model = view.model
    if model.suspended:
        target, why = 0, "its operator has drained it"
    wanted = 0 if model.suspended else min(max(target, view.floor), view.ceiling)
    figures: dict[str, float | int | str] = {
        "waiting": view.load.num_waiting,
        "in_flight": view.load.num_in_flight,
        "per_instance": view.per_instance,
        "running": view.num_running,
        "min": view.floor,
        "max": view.ceiling,
        **(inputs or {}),
    }
    resume: list[str] = []
    drain: list[str] = []
    left = wanted
    if wanted < view.num_running:
        alive_s = model.keep_alive_s if keep_alive_s is None else keep_alive_s
        drain, left = _drain(view, wanted, may_go, alive_s)
        if not drain and wanted == 0 and not model.suspended and len(view.running) <= view.ceiling:
            why = "its keep-alive is not over"
        elif left == 0 and not model.suspended and len(view.running) <= view.ceiling:
            why = f"it has been idle for its keep-alive of {alive_s:g} s"
        active_at = view.load.last_active_at
        figures["idle_s"] = round(max(0.0, view.now_s - active_at), 3) if active_at else -1
    else:
        if wanted > target:
            why = f"at least {doing(view.floor, 'instance', 'stays')}{': it is pinned' if model.pinned else ''}"
        if take_back and view.draining:
            resume = _taken_back(view, wanted - view.num_running)
    return ScaleDecision(
        model_key=model.key,
        num_wanted=left,
        drain=tuple(drain),
        resume=tuple(resume),
        reason=why,
        inputs=figures,
        group_size=group_size,
        num_required=wanted,
    )


def _taken_back(view: ScalingView, missing: int) -> list[str]:
    back, worth = [], worths(view.draining)
    for instance in view.draining:
        if missing > 0:
            back.append(instance.instance_id)
            missing -= worth[instance.instance_id]
    return back


def _drain(
    view: ScalingView, wanted: int, may_go: Callable[[Instance], bool], keep_alive_s: float
) -> tuple[list[str], int]:
    """Return the instances to drain and the number left. A pipeline goes only when all its worth is spare (above the
    ceiling: when the others reach it), and before any stage that serves by itself. No READY instance goes if all
    requests would wait for a starting one."""
    drain, left, worth, model = [], view.num_running, worths(view.running), view.model
    serving = sum(worth[i.instance_id] for i in view.ready)
    rows = {i.instance_id: i for i in view.serving}
    for instance in sorted(
        view.ready, key=lambda i: (not i.is_outdated(model), view.in_flight(i), -i.created_at, i.instance_id)
    ):
        after = left - worth[instance.instance_id]
        if serving - worth[instance.instance_id] < wanted:
            continue
        must_go = model.suspended or after >= view.ceiling
        if needed_by_pipeline(instance.instance_id, rows):
            continue
        if not must_go and (not may_go(instance) or (after == 0 and not view.is_idle(instance, keep_alive_s))):
            continue
        drain.append(instance.instance_id)
        left = after
        serving -= worth[instance.instance_id]
    return drain, left
