"""The agent's record of one instance: its state, the parts bound to that state, and its bytes.

`State` is finer than the public InstanceState; `RULES` gives its meaning and parts, checked by `Holding.faults`. Times
are epoch seconds, sizes bytes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import (
    MAX_SPELLS,
    EngineFigures,
    Instance,
    InstanceState,
    Phase,
    Spell,
    StageAddress,
    Worker,
)
from glowplug.domain.model import Model
from glowplug.domain.moment import Moment
from glowplug.events.commands import StartInstance
from glowplug.events.envelope import Event
from glowplug.fleet.start_times import StartKind
from glowplug.policies.placement.shape import bytes_per_gpu, weights_per_gpu

Shares = Mapping[str, Mapping[GrantOwner, int]]  # gpu_id -> owner -> bytes


class State(StrEnum):
    STARTING = "starting"
    STREAMING = "streaming"
    UNCHECKED = "unchecked"
    RESTARTING = "restarting"
    LOADING = "loading"
    STAGE_LOADED = "stage_loaded"
    JOINING = "joining"
    ACTIVATING = "activating"
    READY = "ready"
    DRAINING = "draining"
    FALLING_ASLEEP = "falling_asleep"
    PREWARMED = "prewarmed"
    SWAPPED_OUT = "swapped_out"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"


class ConsolidationState(StrEnum):
    """A stage becoming whole, beside READY or DRAINING."""

    RUNNING = "running"
    ABANDONED = "abandoned"  # the engine may hold all bytes
    FINISHING = "finishing"  # whole; its stages finish their requests


@dataclass(frozen=True, slots=True, kw_only=True)
class StartProgress:
    deadline_at: Moment
    is_launched: bool = False
    arriving_path: str | None = None  # of an engine that streams
    weights_path: str | None = None  # once in host memory
    fetch: Phase | None = None
    figures: EngineFigures = field(default_factory=EngineFigures)  # before its weights were checked
    grew_from: InstanceState | None = None  # state of its source
    has_restarted: bool = False  # its seconds measure nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """`deadline_at` bounds the drain, then the engine's falling asleep."""

    deadline_at: Moment
    quiet_until: Moment  # when routers know of the drain
    busy_until: Moment = 0.0  # the drain's own deadline, while asked to sleep if idle
    becomes: str = ""  # prewarmed | swapped_out | "" (stop)
    reason: str = ""
    traceparent: str = ""
    predicted_s: float = 0.0  # from idle to asleep
    began_at: Moment = 0.0
    drained_at: Moment = 0.0  # falling asleep since


@dataclass(frozen=True, slots=True)
class Stop:
    """Repeated `stop_retry_s` after `asked_at`."""

    asked_at: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Consolidation:
    state: ConsolidationState = ConsolidationState.RUNNING
    deadline_at: Moment  # 0: none, for a later stage, which ends with the first one
    began_at: Moment = 0.0  # 0: earlier agent version
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    is_joined: bool = False  # first stage: the later ones are READY
    later: tuple[StageAddress, ...] = ()  # their addresses
    num_failed: int = 0
    retry_at: Moment = 0.0  # of the next consolidation


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One instance on its node. `enter` changes its state and drops the parts that end with the old one."""

    state: State
    instance: Instance
    command: StartInstance
    cause: Event  # of the command, without payload
    start: StartProgress | None = None
    drain: Drain | None = None
    stop: Stop | None = None
    consolidation: Consolidation | None = None
    pipeline: Pipeline | None = None
    shares: Shares = field(default_factory=dict)  # granted bytes; empty: none
    snapshot_bytes: int = 0  # host memory of its sleeping engine
    engine_id: str = ""  # if not its own id (see starts.py)
    past_ids: tuple[str, ...] = ()  # the first owner of its engine, if another, whose name the engine's files have
    found: StartKind = StartKind.COLD  # tier of its weights at its start
    health_asked_at: Moment = 0.0
    num_misses: int = 0

    @property
    def model(self) -> Model:
        return self.command.model

    @property
    def engine(self) -> str:
        """The id in its engine effects."""
        return self.engine_id or self.instance.instance_id

    @property
    def shared(self) -> tuple[str, int] | None:
        return (self.model.share_key, self.instance.shared_bytes) if self.instance.shared_bytes else None

    @property
    def is_over(self) -> bool:
        return self.state in ENDED and self.stop is None

    @property
    def is_quiet(self) -> bool:
        """Whether no step can be overdue: it serves alone, is dormant or is over."""
        is_settled = self.state is State.READY or self.state in DORMANT or self.is_over
        return is_settled and self.consolidation is None and self.pipeline is None

    @property
    def is_first_stage(self) -> bool:
        return not self.instance.is_whole and not self.instance.part_of

    @property
    def is_later_stage(self) -> bool:
        return bool(self.instance.part_of)

    @property
    def own_workers(self) -> tuple[Worker, ...]:
        """A pipeline's first stage lists one worker (or tensor group) of each stage, its own first; other rows only
        their own."""
        workers = self.instance.workers
        return workers[: max(1, len(workers) // self.instance.num_stages)] if self.is_first_stage else workers

    def workers_on(self, node_id: str) -> tuple[Worker, ...]:
        return tuple(w for w in self.own_workers if w.node_id == node_id)

    def shares_on(self, node_id: str) -> dict[str, dict[GrantOwner, int]]:
        """Return the bytes due on a node's GPUs. Workers without bytes get an even part of the model's memory; a
        replica has weights alone, as prewarmed; an adapter none."""
        shares: dict[str, dict[GrantOwner, int]] = {}
        model, num_stages = self.model, self.instance.num_stages
        weights = weights_per_gpu(model, num_stages)
        for worker in self.workers_on(node_id):
            of_gpu = shares.setdefault(worker.gpu_id, {})
            if self.instance.host_id:
                parts = {GrantOwner.WEIGHTS: 0}
            elif self.instance.replica:
                parts = {GrantOwner.PREWARM: worker.num_bytes or weights}
            else:
                num_bytes = worker.num_bytes or bytes_per_gpu(model, num_stages)
                parts = {GrantOwner.WEIGHTS: min(weights, num_bytes), GrantOwner.KV: max(0, num_bytes - weights)}
            for owner, part in parts.items():
                of_gpu[owner] = of_gpu.get(owner, 0) + part
        return shares

    def lived(self, *spells: Spell) -> "Holding":
        kept = (*self.instance.spells, *spells)[-MAX_SPELLS:]
        return replace(self, instance=replace(self.instance, spells=kept))

    def enter(self, state: State, **changes: Any) -> "Holding":
        """Return the record in `state`, without parts that may not exist there."""
        rule = RULES[state]
        dropped = {part: None for part in _ENDING_WITH_STATE if part not in rule.needs | rule.may}
        return replace(self, state=state, **(dropped | changes))

    def faults(self) -> Iterator[str]:
        rule, instance = RULES[self.state], self.instance
        name = instance.instance_id
        allowed = frozenset() if self.is_over else rule.needs | rule.may
        for part in PARTS:
            is_there = bool(getattr(self, part))
            if part in rule.needs and not is_there:
                yield f"{name} is {self.state} without {part}"
            elif is_there and part not in allowed:
                yield f"{name} is {self.state} and has {part}"
        if instance.state is not rule.public:
            yield f"{name} is {self.state} and the fleet sees it {instance.state}"
        if (self.pipeline is None) is not instance.is_whole:
            yield f"{name} has {instance.num_stages} stages and pipeline={self.pipeline}"
        under_way = self.consolidation.state if self.consolidation is not None else None
        is_finishing = under_way is ConsolidationState.FINISHING
        if under_way is not None and instance.is_whole is not is_finishing:
            yield f"{name} (whole: {instance.is_whole}) consolidates: {under_way}"
        is_running = under_way is ConsolidationState.RUNNING
        if self.state is not State.STOPPING and instance.consolidating is not is_running:
            yield f"{name} consolidates: {is_running}, and the fleet sees {instance.consolidating}"
        if self.state in (State.READY, State.DRAINING) and instance.stages_busy is not is_finishing:
            yield f"{name} has busy stages: {is_finishing}, and the fleet sees {instance.stages_busy}"
        start = self.start
        if self.state is State.STARTING and start is not None and start.is_launched and start.weights_path is not None:
            yield f"{name} has its process and its weights, and does not load"
        if self.state in (State.STREAMING, State.UNCHECKED) and start is not None and start.weights_path is not None:
            yield f"{name} is {self.state} and its weights are whole"
        if self.state is State.FALLING_ASLEEP and self.drain is not None and not self.drain.becomes:
            yield f"{name} falls asleep to become nothing"
        for gpu_id, of_gpu in self.shares.items():
            if any((owner is GrantOwner.PREWARM) is not instance.replica for owner, n in of_gpu.items() if n):
                yield f"{name} (replica: {instance.replica}) holds {dict(of_gpu)} of {gpu_id}"
            if any(num_bytes < 0 for num_bytes in of_gpu.values()):
                yield f"{name} holds less than nothing of {gpu_id}"


@dataclass(frozen=True, slots=True)
class Rule:
    public: InstanceState
    means: str
    needs: frozenset[str]
    may: frozenset[str]


PARTS = ("start", "drain", "stop", "consolidation", "shares", "snapshot_bytes", "engine_id")
_ENDING_WITH_STATE = ("start", "drain", "stop", "consolidation")


S, P = State, InstanceState
# state, public state, parts needed, parts allowed, meaning
_RULES = (
    (S.STARTING, P.STARTING, "start shares", "engine_id", "its process starts, and its weights are on their way"),
    (S.STREAMING, P.STARTING, "start shares", "engine_id", "its engine takes the weights while they arrive"),
    (S.UNCHECKED, P.STARTING, "start shares", "engine_id", "its engine is loaded, and its weights are not checked yet"),
    (S.RESTARTING, P.STARTING, "start stop shares", "engine_id", "its process ends, and its start begins again then"),
    (S.LOADING, P.LOADING, "start shares", "", "its engine takes the weights"),
    (S.STAGE_LOADED, P.LOADING, "start shares", "", "a pipeline's first stage is loaded and waits for the others"),
    (S.JOINING, P.LOADING, "start shares", "", "a pipeline's first stage connects to the others"),
    (S.ACTIVATING, P.LOADING, "start shares", "", "the engine of a replica or of a sleeping instance becomes its own"),
    (S.READY, P.READY, "shares", "consolidation", "its engine serves"),
    (S.DRAINING, P.DRAINING, "drain shares", "consolidation snapshot_bytes", "its engine finishes what it has"),
    (S.FALLING_ASLEEP, P.DRAINING, "drain shares", "snapshot_bytes", "its engine leaves its GPUs, or all but weights"),
    (S.PREWARMED, P.PREWARMED, "shares", "", "its weights are on its GPUs, without a KV cache"),
    (S.SWAPPED_OUT, P.SWAPPED_OUT, "", "shares snapshot_bytes", "its engine sleeps in host memory"),
    (S.STOPPING, P.DRAINING, "stop shares", "snapshot_bytes engine_id", "it has drained, and its process ends"),
    (S.STOPPED, P.STOPPED, "", "stop snapshot_bytes engine_id", "it has stopped, and its bytes are free"),
    (S.FAILED, P.FAILED, "", "stop shares snapshot_bytes engine_id", "it has failed"),
    (S.LOST, P.STOPPED, "", "stop shares snapshot_bytes engine_id", "another node runs the instance by now"),
)
RULES: Mapping[State, Rule] = {
    state: Rule(public, means, frozenset(needs.split()), frozenset(may.split()))
    for state, public, needs, may, means in _RULES
}

FETCHING = frozenset({State.STARTING, State.STREAMING, State.UNCHECKED})  # weights may be arriving
COMING = FETCHING | {State.LOADING, State.STAGE_LOADED, State.JOINING, State.ACTIVATING}
DORMANT = frozenset({State.PREWARMED, State.SWAPPED_OUT})
ENDED = frozenset({State.STOPPED, State.FAILED, State.LOST})  # with a `stop` while a process is left
