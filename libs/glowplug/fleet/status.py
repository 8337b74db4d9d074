"""The state of a model by its instances: the one answer that router, autoscaler, console and CLI give.

Only an instance that serves can make its model hot: no replica, no later stage of a pipeline. A pipeline is ready when
its first stage is, to which requests are sent. A draining instance takes no new request, so its model is not hot but
"draining". Weights on a GPU, or in host memory with their engine (a prewarmed replica, a sleeping engine), make a model
warm, whatever else it has.
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
    """The state of a model as users see it: the best state among its serving instances, else its best copy, else what
    it lacks."""

    READY = "ready"
    LOADING = "loading"
    STARTING = "starting"
    DRAINING = "draining"
    PREWARMED = "prewarmed"  # the weights lie on a GPU, without an engine that serves them
    ASLEEP = "asleep"  # an engine sleeps outside the GPU
    WAITING = "waiting"  # requests are held, and no instance is starting
    FAILED = "failed"  # no instance is starting, and the latest start failed
    COLD = "cold"

    @property
    def summary(self) -> str:
        """The state in the words of the autoscaler's REST: hot, starting, draining, warm or cold."""
        return _SUMMARIES.get(self, "cold")


_SUMMARIES: Final = {
    ModelState.READY: "hot",
    ModelState.LOADING: "starting",
    ModelState.STARTING: "starting",
    ModelState.DRAINING: "draining",
    ModelState.PREWARMED: "warm",
    ModelState.ASLEEP: "warm",
}
NEAR: Final = {Rung.HOST: 0, Rung.ASLEEP: 1, Rung.PREWARMED: 2, Rung.READY: 3}  # order of nearness to serving
_BEST_FIRST: Final = (InstanceState.READY, InstanceState.LOADING, InstanceState.STARTING, InstanceState.DRAINING)


def is_ready(instance: Instance) -> bool:
    """Return whether the instance serves now, as a whole or as the first stage of its pipeline."""
    return instance.state is InstanceState.READY and instance.serves


def is_target(instance: Instance) -> bool:
    """Return whether requests may be sent to the instance now."""
    return instance.state is InstanceState.READY and bool(instance.url) and instance.serves


def is_coming(instance: Instance) -> bool:
    """Return whether the instance is starting and will serve."""
    return instance.state.is_coming and instance.serves


def rung_of(instance: Instance) -> Rung | None:
    """The rung of an instance, also while it is still being started; None when it is gone."""
    if instance.state.is_gone:
        return None
    if instance.state is InstanceState.SWAPPED_OUT:
        return Rung.ASLEEP
    return Rung.PREWARMED if instance.replica or instance.state is InstanceState.PREWARMED else Rung.READY


def check_nowhere_else(to: Rung, node_id: str, instances: Iterable[Instance]) -> None:
    """Raise Conflict where a copy is as near as `to` on another node than the one named, and none on that node: only
    demand gives a model a second copy. `node_id` "" means any node."""
    near = [row for row in instances if is_as_near(row, to)] if node_id else []
    if near and all(row.node_id != node_id for row in near):
        row = near[0]
        raise Conflict(f"{row.instance_id} is {row.state.word} on {row.node_id}: unload it first", param="node")


def is_as_near(instance: Instance, to: Rung) -> bool:
    """Return whether the instance is on that rung or a nearer one, or is starting to serve."""
    rung = rung_of(instance)
    is_there = is_ready(instance) or is_coming(instance) or instance.state.is_dormant
    return is_there and rung is not None and NEAR[rung] >= NEAR[to]


def lacks_one_asleep(model: Model, instances: Iterable[Instance]) -> bool:
    """Return whether a model that must keep a copy asleep has none asleep, so that the next instance to leave should
    become one."""
    is_kept = model.pinned_at is Rung.ASLEEP and not model.suspended
    return is_kept and all(row.state is not InstanceState.SWAPPED_OUT for row in instances)


def temperature(instances: Iterable[Instance]) -> Temperature:
    """The temperature of the model with these instances. Hot: one is ready. Warm: one sleeps or is prewarmed. Cold:
    everything else, a start under way included."""
    is_warm = False
    for instance in instances:
        if is_ready(instance):
            return Temperature.HOT
        is_warm = is_warm or instance.state.is_dormant
    return Temperature.WARM if is_warm else Temperature.COLD


def model_state(instances: Iterable[Instance], *, num_waiting: int = 0, has_failed: bool = False) -> ModelState:
    """The state of the model with these instances. `has_failed`: its latest start failed, and none has succeeded
    since."""
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
    """Seconds until a model is ready, predicted as the placer predicts them (`times`). An unknown model has
    `default_s`."""

    default_s: float = 5.0
    times: StartTimes = field(default_factory=StartTimes)
    overdue_s: float = 0.5  # seconds left of a start that takes longer than expected

    def left_s(self, model: Model | None, instances: Iterable[Instance], now_s: float) -> float:
        """Seconds until the first of a model's instances is ready, by its placement's prediction: 0 when one is ready,
        a whole start when none is starting."""
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
        """Seconds of a whole start: from the dormant copy among `instances` that a placement would take, else as the
        last one went."""
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
