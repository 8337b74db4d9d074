"""Derive the state of a model from its instances, alike for router, autoscaler, console and CLI.

Only instances that serve make a model hot: no replica, no later stage. A pipeline is ready when its first stage, which
takes the requests, is. A draining instance takes none: its model is "draining". A prewarmed replica or a sleeping
engine makes a model warm.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from glowplug.domain.errors import Conflict
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model, Rung, Temperature
from glowplug.fleet.start_times import FROM_NOTHING, StartKind, StartTimes


class ModelState(StrEnum):
    """State shown to users: that of the best serving instance, else of the best copy, else why there is none."""

    READY = "ready"
    LOADING = "loading"
    STARTING = "starting"
    DRAINING = "draining"
    PREWARMED = "prewarmed"  # weights on a GPU, without an engine that serves them
    ASLEEP = "asleep"  # outside the GPU
    WAITING = "waiting"  # requests are held, nothing starts
    FAILED = "failed"  # the latest start failed, nothing starts
    COLD = "cold"

    @property
    def summary(self) -> str:
        return _SUMMARIES.get(self, "cold")


_SUMMARIES: Final = {
    ModelState.READY: "hot",
    ModelState.LOADING: "starting",
    ModelState.STARTING: "starting",
    ModelState.DRAINING: "draining",
    ModelState.PREWARMED: "warm",
    ModelState.ASLEEP: "warm",
}
NEAR: Final = {Rung.HOST: 0, Rung.ASLEEP: 1, Rung.PREWARMED: 2, Rung.READY: 3}
_BEST_FIRST: Final = (InstanceState.READY, InstanceState.LOADING, InstanceState.STARTING, InstanceState.DRAINING)


def is_ready(instance: Instance) -> bool:
    return instance.state is InstanceState.READY and instance.serves


def is_target(instance: Instance) -> bool:
    """Return whether requests may be sent to the instance now."""
    return instance.state is InstanceState.READY and bool(instance.url) and instance.serves


def is_coming(instance: Instance) -> bool:
    return instance.state.is_coming and instance.serves


def rung_of(instance: Instance) -> Rung | None:
    """Return the rung, also during a start; None when gone."""
    if instance.state.is_gone:
        return None
    if instance.state is InstanceState.SWAPPED_OUT:
        return Rung.ASLEEP
    return Rung.PREWARMED if instance.replica or instance.state is InstanceState.PREWARMED else Rung.READY


def check_nowhere_else(to: Rung, node_id: str, instances: Iterable[Instance]) -> None:
    """Raise Conflict if copies as near as `to` are only on other nodes: a second copy needs demand. `node_id` "": any
    node."""
    near = [row for row in instances if is_as_near(row, to)] if node_id else []
    if near and all(row.node_id != node_id for row in near):
        row = near[0]
        raise Conflict(f"{row.instance_id} is {row.state.word} on {row.node_id}: unload it first", param="node")


def is_as_near(instance: Instance, to: Rung) -> bool:
    rung = rung_of(instance)
    is_there = is_ready(instance) or is_coming(instance) or instance.state.is_dormant
    return is_there and rung is not None and NEAR[rung] >= NEAR[to]


def lacks_one_asleep(model: Model, instances: Iterable[Instance]) -> bool:
    """Return whether a required sleeping copy is missing, so that the next instance to leave becomes one."""
    is_kept = model.pinned_at is Rung.ASLEEP and not model.suspended
    return is_kept and all(row.state is not InstanceState.SWAPPED_OUT for row in instances)


def temperature(instances: Iterable[Instance]) -> Temperature:
    """Hot: one is ready. Warm: one sleeps or is prewarmed. Cold: all else, even while starting."""
    is_warm = False
    for instance in instances:
        if is_ready(instance):
            return Temperature.HOT
        is_warm = is_warm or instance.state.is_dormant
    return Temperature.WARM if is_warm else Temperature.COLD


def model_state(instances: Iterable[Instance], *, num_waiting: int = 0, has_failed: bool = False) -> ModelState:
    """State of the model with these instances. `has_failed`: its latest start failed."""
    states, dormant = set[InstanceState](), set[InstanceState]()
    for instance in instances:
        if instance.serves:
            states.add(instance.state)
        if instance.state.is_dormant:
            dormant.add(instance.state)
    for state in _BEST_FIRST:
        if state in states:
            return ModelState(state.value)
    if dormant:
        return ModelState.PREWARMED if InstanceState.PREWARMED in dormant else ModelState.ASLEEP
    if num_waiting:
        return ModelState.WAITING
    return ModelState.FAILED if has_failed else ModelState.COLD


@dataclass(slots=True)
class StartEstimates:
    """Seconds until a model is ready, predicted as by the placer; `default_s` for unknown models."""

    default_s: float = 5.0
    times: StartTimes = field(default_factory=StartTimes)
    overdue_s: float = 0.5  # seconds left of an overdue start

    def left_s(self, model: Model | None, instances: Iterable[Instance], now_s: float) -> float:
        """Seconds until the first instance is ready: 0 if one is, a whole start if none is starting."""
        rows = list(instances)
        if any(map(is_ready, rows)):
            return 0.0
        coming = [row for row in rows if is_coming(row)]
        if not coming:
            return self.whole_s(model, rows)
        return min(
            max((row.predicted_s or self.whole_s(model, ())) - (now_s - row.created_at), self.overdue_s)
            for row in coming
        )

    def whole_s(self, model: Model | None, instances: Iterable[Instance]) -> float:
        """Seconds of a start: from the best dormant copy, else of the same kind as the last."""
        if model is None or not self.times.knows(model):
            return self.default_s
        return self.times.predict(model, self._kind(model, {row.state for row in instances})).whole_s

    def _kind(self, model: Model, states: set[InstanceState]) -> StartKind:
        if InstanceState.PREWARMED in states:
            return StartKind.GROWTH
        if InstanceState.SWAPPED_OUT in states:
            return StartKind.WAKE
        unseen = StartKind.COLD if model.weights.uri else StartKind.CACHED
        return self.times.latest(model, FROM_NOTHING) or unseen
