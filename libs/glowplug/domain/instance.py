"""A running engine, its GPU processes, and the phases of its start."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from glowplug.domain.bounds import OutOfBounds
from glowplug.domain.phrasing import STATE_WORDS

MAX_STAGES = 256  # more than any model has layers
SLOT_ENGINES: Final = frozenset({"llamacpp"})  # whose cache keeps the last sequence of each slot, and no blocks
Becomes = Literal["stopped", "swapped_out", "prewarmed"]  # state of an engine after its drain, if it is able


class InstanceState(StrEnum):
    """The state of an instance: STARTING -> LOADING -> READY -> DRAINING -> STOPPED; FAILED aside. PREWARMED and
    SWAPPED_OUT are dormant: another instance grows from them (`StartInstance.source`)."""

    STARTING = "starting"  # accepted by the agent: memory granted, engine process starting
    LOADING = "loading"  # engine process up, weights loading
    READY = "ready"
    DRAINING = "draining"  # finishes its requests, accepts none
    STOPPED = "stopped"
    SWAPPED_OUT = "swapped_out"
    FAILED = "failed"
    PREWARMED = "prewarmed"  # a replica: weights (or the first of them) on GPUs, no KV, no requests

    def __init__(self, value: str) -> None:
        # read for every row in every pass over the fleet, so stored rather than computed
        self.is_gone = value in ("stopped", "failed")
        self.is_dormant = value in ("prewarmed", "swapped_out")
        self.is_coming = value in ("starting", "loading")
        self.word = STATE_WORDS.get(value, value)  # as shown to people, in messages too


class PhaseName(StrEnum):
    """Stages of a cold start, in the order in which they usually end (HydraServe section 3, SwapServeLLM Table 1)."""

    DECIDE = "decide"  # request waiting -> decision written, or first refusal for lack of GPU memory
    ROOM = "room"  # that refusal -> enough GPU memory given back by others; absent where memory was free
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
    gpu_bytes: int = 0  # all memory of its GPU; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAddress:
    """The address at which a later stage of a pipeline answers, and the id of the key that its engine requires
    (engine_key.py)."""

    instance_id: str
    url: str  # http://host:port
    key_id: str = ""


def check_num_stages(num_stages: int) -> None:
    """Check the number of stages of a pipeline. Raises OutOfBounds if it is not in 1..MAX_STAGES."""
    if not 1 <= num_stages <= MAX_STAGES:
        raise OutOfBounds("num_stages", f"{num_stages} is not in 1-{MAX_STAGES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One running engine serving one model: a set of workers. Only the agent of its first worker writes its row. Raises
    OutOfBounds for an impossible number of stages."""

    instance_id: str
    model_key: str
    engine: str
    state: InstanceState
    workers: tuple[Worker, ...]
    url: str = ""  # http://host:port once known
    max_concurrency: int = 8  # requests its engine runs at once: the model's, or fewer if memory requires
    model_revision: int = 0
    created_at: float = 0.0
    ready_at: float = 0.0
    changed_at: float = 0.0
    phases: tuple[Phase, ...] = ()
    reason: str = ""  # why it is in this state
    emulated: bool = False
    cause_id: str = ""  # event that caused its start
    decision_id: str = ""
    revision: int = 0  # grows with each write
    replica: bool = False  # made to be prewarmed (WarmServe section 5), not to serve
    part_of: str = ""  # the pipeline (instance id) of which this is a later stage; "" for one that clients reach
    num_stages: int = 1  # pipeline stages that serve together, each a worker (or tensor group) in `workers`
    kv_tokens: int = 0  # capacity of its KV cache in tokens; 0: unknown
    source: str = ""  # the dormant instance it grew from
    consolidating: bool = False  # a stage that loads the rest of the model, to run all of it
    key_id: str = ""  # of the key its engine requires (engine_key.py); "": none
    lacks: tuple[str, ...] = ()  # abilities its engine lacks because of these weights, e.g. "tool_choice"
    start_kind: str = ""  # once READY: cold, disk, cached, wake, growth or join (start_times.py)
    gpu_kind: str = ""  # `kind` of its GPUs
    predicted_s: float = 0.0  # expected duration of its start, from the command to READY; 0: unknown
    shared_bytes: int = 0  # bytes of weights in host memory pages it shares with others (Gpu.shared)
    drain_ends_at: float = 0.0  # while it drains: when its last request ends; 0: unknown
    stages_busy: bool = False  # its former stages still finish requests, while a new process serves as a whole
    step_s: float = 0.0  # seconds of a decode step of a single sequence, measured by its engine; 0: unknown
    tries_left: int = 0  # if FAILED for lack of weights on its node: other nodes that may be tried
    host_id: str = ""  # of an adapter (Model.base): the instance of its base whose engine serves it
    adapter_slots: int = 0  # of a base: adapters that its engine holds at once, as it was started; 0: none
    adapter_rank: int = 0  # of a base: the largest rank of those adapters

    def __post_init__(self) -> None:
        check_num_stages(self.num_stages)

    @property
    def engine_id(self) -> str:
        """The instance whose engine answers its requests: its host where it is an adapter, else itself."""
        return self.host_id or self.instance_id

    @property
    def num_cached_sequences(self) -> int:
        """Sequences that its KV cache keeps, one in each slot; 0: it keeps blocks of any prompts, as it has room."""
        return self.max_concurrency if self.engine in SLOT_ENGINES else 0

    @property
    def serves(self) -> bool:
        """Whether routers may ever send it a request: it is no replica, no later stage, and not asleep."""
        return not (self.replica or self.part_of or self.state.is_dormant)

    @property
    def is_whole(self) -> bool:
        """Whether one process (or tensor group) runs all of the model."""
        return self.num_stages == 1

    @property
    def stage(self) -> int:
        """The number of its stage in its pipeline, from the name given by its placement; 0: the first stage, or
        none."""
        number = self.instance_id.rpartition(".")[2]
        return int(number) if self.part_of and number.isdecimal() else 0

    @property
    def gpu_share(self) -> float:
        """How many GPUs its memory fills: bytes held by bytes there are, summed up; NaN where a figure is unknown."""
        if not self.workers or not all(worker.gpu_bytes and worker.num_bytes for worker in self.workers):
            return math.nan
        return sum(worker.num_bytes / worker.gpu_bytes for worker in self.workers)

    @property
    def slots_per_stage(self) -> int:
        """Requests that each of its stages would run at once alone (HydraServe section 6.1), at least one."""
        return max(1, self.max_concurrency // self.num_stages)

    @property
    def node_id(self) -> str:
        return self.workers[0].node_id if self.workers else ""

    @property
    def gpu_id(self) -> str:
        return self.workers[0].gpu_id if self.workers else ""


def slots_per_instance(instances: Iterable[Instance], declared: int = 0) -> int:
    """Requests that each of these instances of one model runs at once, as their engines report; `declared` when none is
    READY. The smallest counts, because it is unknown which instance a request will reach."""
    ready = (i.slots_per_stage for i in instances if i.state is InstanceState.READY)
    return min(ready, default=declared)
