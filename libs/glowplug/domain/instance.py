"""A running engine, the GPU processes it is made of, and the phases of its start."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from glowplug.domain.bounds import OutOfBounds

MAX_STAGES = 256  # more than a model has layers to share out
Becomes = Literal["stopped", "swapped_out", "prewarmed"]  # what an engine is after its drain, where it can


class InstanceState(StrEnum):
    """Where an instance is: STARTING -> LOADING -> READY -> DRAINING -> STOPPED; FAILED aside. PREWARMED and
    SWAPPED_OUT are dormant: another instance grows from them (`StartInstance.source`)."""

    STARTING = "starting"  # accepted by the agent: memory granted, engine process on its way
    LOADING = "loading"  # engine process up, weights going in
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, accepts nothing
    STOPPED = "stopped"
    SWAPPED_OUT = "swapped_out"
    FAILED = "failed"
    PREWARMED = "prewarmed"  # a replica: weights (or the first of them) lie on its GPUs, no KV, nothing is served

    def __init__(self, value: str) -> None:
        # asked of every row in every pass over the fleet: kept with each state, not worked out anew
        self.is_gone = value in ("stopped", "failed")
        self.is_dormant = value in ("prewarmed", "swapped_out")
        self.is_coming = value in ("starting", "loading")


class PhaseName(StrEnum):
    """Stages of a cold start, in the order they usually end (HydraServe section 3, SwapServeLLM Table 1)."""

    DECIDE = "decide"  # request waiting -> decision written, or first answer that no GPU has the memory
    ROOM = "room"  # that answer -> others have given back enough GPU memory; absent where memory was free at once
    FETCH = "fetch"  # weights -> host memory
    LAUNCH = "launch"  # engine process up (container, library, context)
    LOAD = "load"  # host memory -> GPU
    WARMUP = "warmup"  # graphs, first token, readiness


BEFORE_START = frozenset({PhaseName.DECIDE, PhaseName.ROOM})  # over before the agent receives the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One stage of one cold start. Times are epoch seconds; phases may overlap. `predicted_s` is 0 when unknown."""

    name: PhaseName
    started_at: float
    ended_at: float
    predicted_s: float = 0.0

    @property
    def actual_s(self) -> float:
        return self.ended_at - self.started_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One GPU process of an instance."""

    worker_id: str
    node_id: str
    gpu_id: str
    num_bytes: int
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAddress:
    """Where a later stage of a pipeline answers, and the id of the key that its engine asks for (engine_key.py)."""

    instance_id: str
    url: str  # http://host:port
    key_id: str = ""


def check_num_stages(num_stages: int) -> None:
    """Raises OutOfBounds for what no pipeline has: a model is divided by it, and each stage is made by itself."""
    if not 1 <= num_stages <= MAX_STAGES:
        raise OutOfBounds("num_stages", f"{num_stages} is not in 1-{MAX_STAGES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One running engine serving one model: a set of workers. Written by the agent of its first worker alone. Raises
    OutOfBounds for a number of stages that cannot be."""

    instance_id: str
    model_key: str
    engine: str
    state: InstanceState
    workers: tuple[Worker, ...]
    url: str = ""  # http://host:port once known
    max_concurrency: int = 8  # requests its engine runs at once: the model's, or the fewer that its memory allows
    model_revision: int = 0
    created_at: float = 0.0
    ready_at: float = 0.0
    changed_at: float = 0.0
    phases: tuple[Phase, ...] = ()
    reason: str = ""  # why it is in this state
    emulated: bool = False
    cause_id: str = ""  # event that asked for it
    decision_id: str = ""
    revision: int = 0  # grows with each write
    replica: bool = False  # made to be prewarmed (WarmServe section 5), not to serve
    part_of: str = ""  # of a pipeline: the instance whose later stage this is; "" for one that clients reach
    num_stages: int = 1  # pipeline stages that serve together; `workers` has one worker (or tensor group) of each
    kv_tokens: int = 0  # tokens its KV cache holds; 0: not known
    source: str = ""  # the dormant instance it grew from
    consolidating: bool = False  # a stage into which the rest of the model comes: it will run all of it
    key_id: str = ""  # of the key its engine asks for (engine_key.py); "": it asks for none
    lacks: tuple[str, ...] = ()  # what its engine could do with other weights and cannot with these, e.g. "tool_choice"
    start_kind: str = ""  # what its start found, once READY: cold, disk, cached, wake, growth or join (start_times.py)
    gpu_kind: str = ""  # of its GPUs, as in Gpu
    predicted_s: float = 0.0  # what its start was expected to take, from the command to READY; 0: not known
    shared_bytes: int = 0  # of its weights, those that it reads in host memory in the same pages as others (Gpu.shared)
    drain_ends_at: float = 0.0  # while it drains: when what still runs there ends; 0: not known
    stages_busy: bool = False  # it has become whole in another process, and the stages that it was end what they began
    step_s: float = 0.0  # seconds of a decode step of one sequence alone, as its engine measured them; 0: not known
    tries_left: int = 0  # FAILED for weights that could not be had on its node: others on which its start may be tried

    def __post_init__(self) -> None:
        check_num_stages(self.num_stages)

    @property
    def serves(self) -> bool:
        """Whether routers may ever send it a request: no replica, no later stage, not asleep."""
        return not (self.replica or self.part_of or self.state.is_dormant)

    @property
    def is_whole(self) -> bool:
        """Whether one process (or tensor group) runs all of the model."""
        return self.num_stages == 1

    @property
    def stage(self) -> int:
        """Which stage of its pipeline it is, by the name that its placement gave it; 0: the first one, or no stage."""
        number = self.instance_id.rpartition(".")[2]
        return int(number) if self.part_of and number.isdecimal() else 0

    @property
    def slots_per_stage(self) -> int:
        """Requests that each of its stages would run at once alone (HydraServe section 6.1), one at least."""
        return max(1, self.max_concurrency // self.num_stages)

    @property
    def node_id(self) -> str:
        return self.workers[0].node_id if self.workers else ""

    @property
    def gpu_id(self) -> str:
        return self.workers[0].gpu_id if self.workers else ""


def slots_per_instance(instances: Iterable[Instance], declared: int = 0) -> int:
    """Requests that each of these instances of one model runs at once, as their engines say; as `declared` when none is
    READY. The smallest counts: which instance a request finds is not known beforehand."""
    ready = (i.slots_per_stage for i in instances if i.state is InstanceState.READY)
    return min(ready, default=declared)
