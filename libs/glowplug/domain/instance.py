"""A running engine, its GPU processes, and the phases of its start."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from glowplug.domain.bounds import OutOfBounds
from glowplug.domain.model import Model
from glowplug.domain.moment import Moment
from glowplug.domain.phrasing import STATE_WORDS

MAX_STAGES = 256
SLOT_ENGINES: Final = frozenset({"llamacpp"})  # their cache keeps the last sequence of each slot, not blocks
Becomes = Literal["stopped", "swapped_out", "prewarmed"]  # after a drain, if able


class InstanceState(StrEnum):
    """STARTING -> LOADING -> READY -> DRAINING -> STOPPED; FAILED aside. PREWARMED and SWAPPED_OUT are dormant: another
    instance grows from them (`StartInstance.source`)."""

    STARTING = "starting"  # accepted by the agent: memory granted, engine process starting
    LOADING = "loading"  # engine process up, weights loading
    READY = "ready"
    DRAINING = "draining"  # finishes its requests, accepts none
    STOPPED = "stopped"
    SWAPPED_OUT = "swapped_out"
    FAILED = "failed"
    PREWARMED = "prewarmed"  # a replica: weights (or the first of them) on GPUs, no KV, no requests

    def __init__(self, value: str) -> None:
        # read for every row in every pass over the fleet
        self.is_gone = value in ("stopped", "failed")
        self.is_dormant = value in ("prewarmed", "swapped_out")
        self.is_coming = value in ("starting", "loading")
        self.word = STATE_WORDS.get(value, value)  # shown to people


class PhaseName(StrEnum):
    """Stages of a cold start, in usual order of ending (HydraServe section 3, SwapServeLLM Table 1)."""

    DECIDE = "decide"  # request waiting -> decision, or first refusal for GPU memory
    ROOM = "room"  # that refusal -> enough memory given back; absent if it was free
    FETCH = "fetch"  # weights -> host memory
    LAUNCH = "launch"  # engine process up (container, library, context)
    LOAD = "load"  # host memory -> GPU
    WARMUP = "warmup"  # graphs, first token, readiness


BEFORE_START = frozenset({PhaseName.DECIDE, PhaseName.ROOM})  # before the agent receives it


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One stage of a cold start. Epoch seconds; phases may overlap. `predicted_s` 0: unknown."""

    name: PhaseName
    started_at: Moment
    ended_at: Moment
    predicted_s: float = 0.0

    @property
    def actual_s(self) -> float:
        return self.ended_at - self.started_at


MAX_SPELLS = 8


class SpellName(StrEnum):
    DRAIN = "drain"
    SLEEP = "sleep"  # from the end of a drain until its engine is asleep
    CONSOLIDATE = "consolidate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """A time in an instance's life after its start. Epoch seconds."""

    name: SpellName
    started_at: Moment
    ended_at: Moment
    predicted_s: float = 0.0
    phases: tuple[Phase, ...] = ()  # of a consolidation
    reason: str = ""
    error: str = ""  # of a failed consolidation
    traceparent: str = ""  # of its command


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    worker_id: str
    node_id: str
    gpu_id: str
    num_bytes: int
    rank: int = 0
    gpu_bytes: int = 0  # of its whole GPU; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAddress:
    """Address and engine key id (engine_key.py) of a later pipeline stage."""

    instance_id: str
    url: str  # http://host:port
    key_id: str = ""


def check_num_stages(num_stages: int) -> None:
    """Raise OutOfBounds if not in 1..MAX_STAGES."""
    if not 1 <= num_stages <= MAX_STAGES:
        raise OutOfBounds("num_stages", f"{num_stages} is not in 1-{MAX_STAGES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """An engine's report of itself, once loaded; see Instance. 0: unknown."""

    num_slots: int = 0  # max_concurrency
    kv_tokens: int = 0
    lacks: tuple[str, ...] = ()
    shared_bytes: int = 0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An engine serving one model, as a set of workers. Its first worker's agent alone writes its row. Raises
    OutOfBounds for an impossible number of stages."""

    instance_id: str
    model_key: str
    engine: str
    state: InstanceState
    workers: tuple[Worker, ...]
    url: str = ""  # http://host:port
    max_concurrency: int = 8  # the model's, or fewer if memory is short
    model_revision: int = 0
    created_at: Moment = 0.0
    ready_at: Moment = 0.0
    changed_at: Moment = 0.0
    phases: tuple[Phase, ...] = ()
    reason: str = ""
    emulated: bool = False
    cause_id: str = ""
    decision_id: str = ""
    revision: int = 0  # grows with each write
    replica: bool = False  # prewarmed (WarmServe section 5), not serving
    part_of: str = ""  # pipeline (instance id) of a later stage; else ""
    num_stages: int = 1  # pipeline stages, each a worker or tensor group
    kv_tokens: int = 0  # KV cache capacity; 0: unknown
    source: str = ""  # dormant instance it grew from
    consolidating: bool = False  # a stage that loads the rest of the model to run it whole
    key_id: str = ""  # of its engine's key (engine_key.py); "": none
    lacks: tuple[str, ...] = ()  # abilities missing with these weights, e.g. "tool_choice"
    start_kind: str = ""  # a StartKind, once READY: cold, disk, cached, wake, growth or join
    gpu_kind: str = ""
    predicted_s: float = 0.0  # command to READY; 0: unknown
    slowdown: float = 1.0  # of its start, by the load of its node's cores at the command (Node)
    shared_bytes: int = 0  # host-memory weights shared with others (Gpu.shared)
    drain_ends_at: Moment = 0.0  # end of its last request; 0: unknown
    stages_busy: bool = False  # former stages still finish requests beside the new whole process
    step_s: float = 0.0  # decode step of a single sequence, measured by its engine; 0: unknown
    tries_left: int = 0  # other nodes to try after FAILED for lack of weights
    host_id: str = ""  # host of an adapter (Model.base)
    adapter_slots: int = 0  # of a base: adapters held at once, fixed at its start; 0: none
    adapter_rank: int = 0  # of a base: largest rank
    spells: tuple[Spell, ...] = ()  # the latest MAX_SPELLS, newest last
    engine_digest: str = ""  # Model.engine_digest at its start
    host_bytes: int = 0  # of host memory that its engine takes asleep; 0: it has not slept

    def __post_init__(self) -> None:
        check_num_stages(self.num_stages)

    @property
    def engine_id(self) -> str:
        """The instance whose engine answers: an adapter's host, else itself."""
        return self.host_id or self.instance_id

    @property
    def num_cached_sequences(self) -> int:
        """Sequences kept in the KV cache, one per slot; 0: it keeps blocks."""
        return self.max_concurrency if self.engine in SLOT_ENGINES else 0

    def is_outdated(self, model: Model) -> bool:
        """Return whether its model's engines are declared otherwise than at its start. A declaration may come back."""
        since = model.declared_at or model.revision
        return 0 < self.model_revision < since and self.engine_digest != model.engine_digest

    @property
    def serves(self) -> bool:
        """Return whether it may ever take requests: it is not a replica, later stage or sleeper."""
        return not (self.replica or self.part_of or self.state.is_dormant)

    @property
    def is_whole(self) -> bool:
        return self.num_stages == 1

    @property
    def stage(self) -> int:
        """Number of its stage in its pipeline, from its id; 0: the first, or none."""
        number = self.instance_id.rpartition(".")[2]
        return int(number) if self.part_of and number.isdecimal() else 0

    @property
    def gpu_share(self) -> float:
        """GPUs filled by its memory, as a sum of shares; NaN if a figure is unknown."""
        if not self.workers or not all(worker.gpu_bytes and worker.num_bytes for worker in self.workers):
            return math.nan
        return sum(worker.num_bytes / worker.gpu_bytes for worker in self.workers)

    @property
    def slots_per_stage(self) -> int:
        """Requests per stage when alone (HydraServe section 6.1), at least one."""
        return max(1, self.max_concurrency // self.num_stages)

    @property
    def node_id(self) -> str:
        return self.workers[0].node_id if self.workers else ""

    @property
    def gpu_id(self) -> str:
        return self.workers[0].gpu_id if self.workers else ""


def slots_per_instance(instances: Iterable[Instance], declared: int = 0) -> int:
    """Fewest concurrent requests of the READY instances, as any may be chosen; `declared` without one."""
    ready = (i.slots_per_stage for i in instances if i.state is InstanceState.READY)
    return min(ready, default=declared)
