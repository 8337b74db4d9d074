"""What an agent is told (stimuli), what it asks of its shell (effects), and what it remembers over a restart.

Times are epoch seconds, sizes bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from glowplug.domain.bounds import check_bounds
from glowplug.domain.hardware import CachedWeights, GrantOwner, Link
from glowplug.domain.instance import Instance, Phase, Worker
from glowplug.domain.model import Model, WeightsRef
from glowplug.events.envelope import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine this node knows. `unavailable` is why it cannot start here, or ""."""

    name: str
    emulated: bool = False
    unavailable: str = ""
    abilities: frozenset[str] = frozenset()  # of "prewarm", "swap", "stages": see Node.can


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParams:
    """Bounds of the agent's waits, seconds, and how many misses make a hang."""

    beat_s: float = 1.0
    start_deadline_s: float = 180.0  # command -> READY
    drain_quiet_s: float = 0.3  # routers hear of the drain before the first count
    stop_grace_s: float = 5.0  # SIGTERM -> SIGKILL
    stop_retry_s: float = 5.0  # a process that would not die is killed again
    health_every_s: float = 1.0
    health_misses: int = 3
    keep_gone_s: float = 180.0  # longer than a command lives on the bus
    max_tick_gap_s: float = 5.0  # a longer time between two ticks is a jump of the clock, or a machine that slept
    consolidate_deadline_s: float = 600.0  # told to become whole -> whole, or given up
    consolidate_retry_s: float = 10.0  # a stage that failed to become whole tries no sooner; twice as long each time
    consolidate_retry_max_s: float = 300.0
    reservation: Literal["", "paper", "literal_code"] = ""  # how a draining KV cache shrinks (WarmServe Eq. 1)
    reservation_step_bytes: int = 64 << 20  # less than this is not worth a beat
    swap_host_bytes: int = 0  # host memory for engines that sleep outside the GPUs; 0: unlimited
    snapshot_ratio: float = 1.4  # host bytes of a sleeping engine per byte of its weights (papers.md section 7)

    def __post_init__(self) -> None:
        check_bounds(self, health_misses=1)


# Stimuli


@dataclass(frozen=True, slots=True)
class Recalled:
    """First stimulus after a restart: which of the remembered instances have a living engine process."""

    living: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineLaunched:
    """The process is up and imports; it has no weights yet."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class WeightsComplete:
    """`path` is the file or directory to load. `cached`: they were there at the first look."""

    instance_id: str
    path: str
    cached: bool = False


@dataclass(frozen=True, slots=True)
class WeightsFailed:
    """`code` is an error code of domain/errors.py."""

    instance_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine serves at `url`; `phases` are its own (LAUNCH, LOAD, WARMUP). Of a pipeline's first stage it comes
    twice: once its own part is loaded, and once it answers for all (after ServeStages)."""

    instance_id: str
    url: str
    phases: tuple[Phase, ...] = ()
    kv_tokens: int = 0  # that its KV cache holds; 0: not known
    key_id: str = ""  # as in Instance
    num_slots: int = 0  # requests it runs at once; 0: what was planned for it
    lacks: tuple[str, ...] = ()  # as in Instance


@dataclass(frozen=True, slots=True)
class EngineStartFailed:
    instance_id: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineExited:
    """The process ended and nobody had asked it to."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineOverLimit:
    """The engine takes more host memory than it may: it must end at once, before the machine has none left."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineGone:
    """A stop is over. `clean` False: something of it still lives, so its bytes are not free."""

    instance_id: str
    clean: bool = True


@dataclass(frozen=True, slots=True)
class HealthSeen:
    instance_id: str
    ok: bool
    alive: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Requests inside the engine, running and waiting, and the bytes of its KV cache that they fill (-1: not known)."""

    instance_id: str
    num_in_flight: int
    kv_bytes_used: int = -1


@dataclass(frozen=True, slots=True)
class EnginePrewarmed:
    """A replica's weights are on its GPUs."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class EngineAsleep:
    """An engine that was asked to has left its GPUs (but for its weights, where they stay)."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class EngineConsolidated:
    """What was a stage serves all of the model, alone."""

    instance_id: str
    kv_tokens: int = 0  # that its KV cache holds now; 0: not known


@dataclass(frozen=True, slots=True)
class ConsolidationFailed:
    """It is the stage that it was, and holds no more of its GPU than then."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """An operator asks this agent itself to drain and stop an instance."""

    instance_id: str
    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class NodeStopping:
    """The agent is asked to end: drain and stop every engine, start none."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the node's prefetcher keeps and what its links carry, as last seen."""

    cached: tuple[CachedWeights, ...] = ()
    host_cache_bytes: int = 0
    links: tuple[Link, ...] = ()
    prefetcher_url: str = ""


# Effects


@dataclass(frozen=True, slots=True)
class LaunchEngine:
    """Start the process now; weights may still be on their way. Outcome: EngineLaunched or EngineStartFailed."""

    instance_id: str
    model: Model
    worker: Worker
    gpu_kind: str
    gpu_index: int
    traceparent: str = ""
    workers: tuple[Worker, ...] = ()  # all of this node: one, or a tensor group
    replica: bool = False  # weights only: outcome of its load is EnginePrewarmed
    stage: int = 0
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class AwaitWeights:
    """Watch the region in host memory; of a pipeline's stage, its part of it. Outcome: WeightsComplete or
    WeightsFailed; none at all past the deadline."""

    instance_id: str
    weights: WeightsRef
    deadline_at: float
    stage: int = 0
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class LoadEngine:
    """Outcome: EngineReady (of a replica EnginePrewarmed) or EngineStartFailed."""

    instance_id: str
    path: str


@dataclass(frozen=True, slots=True)
class ActivateEngine:
    """What lies dormant as `source` goes on as `instance_id` and serves. A replica that is still loading is streamed to
    its end meanwhile. Outcome: EngineReady or EngineStartFailed, of `instance_id`."""

    instance_id: str
    source: str
    model: Model
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class SleepEngine:
    """Give up the KV cache and, for "swapped_out", the weights on the GPU too; what still runs ends, as its grace did.
    Outcome: EngineAsleep, or EngineGone when it could not."""

    instance_id: str
    becomes: str  # prewarmed | swapped_out


@dataclass(frozen=True, slots=True)
class LimitKv:
    """The engine drains: from now on its KV cache is `num_bytes` at most (WarmServe section 4.1). No outcome."""

    instance_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ConsolidateEngine:
    """Load the other stages' part of the model in the background, take over their KV, serve alone. Outcome:
    EngineConsolidated or ConsolidationFailed, or nothing when the engine goes before."""

    instance_id: str
    model: Model


@dataclass(frozen=True, slots=True)
class AbandonConsolidation:
    """A ConsolidateEngine has taken too long: stop it and drop what has come. Asked again until its outcome comes:
    ConsolidationFailed, or EngineConsolidated where that was sooner."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class ServeStages:
    """Every stage is there: the first one answers for all. Outcome: EngineReady."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class StopEngine:
    """Give up whatever is under way for the instance and end its process. Outcome: EngineGone."""

    instance_id: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Outcome: HealthSeen."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class CountInFlight:
    """Outcome: InFlight, or nothing when the engine does not answer."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class ReportStart:
    """A start is over, well (READY) or badly (FAILED): spans and metrics of its phases."""

    instance: Instance
    traceparent: str
    is_cached: bool = False  # its weights were in host memory when it began


@dataclass(frozen=True, slots=True)
class ForgetEngine:
    """Nothing is kept of the instance any more: its log and run directory may go."""

    instance_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One instance as the agent keeps it. `deadline_at` bounds the start, then the drain."""

    instance: Instance
    model: Model
    cause: Event  # the command that asked for it, without its payload
    deadline_at: float
    is_granted: bool = False
    is_launched: bool = False
    weights_path: str | None = None
    fetch: Phase | None = None
    is_cached: bool = False
    quiet_until: float = 0.0
    is_stopping: bool = False  # a StopEngine is out
    stop_asked_at: float = 0.0
    is_lost: bool = False  # another node was given this instance later: it is theirs
    is_restarting: bool = False  # its engine goes, then the same start begins again
    num_misses: int = 0
    health_asked_at: float = 0.0
    shares: Mapping[str, Mapping[GrantOwner, int]] = field(default_factory=dict)  # gpu_id -> owner -> bytes it holds
    stage: int = 0
    engine_id: str = ""  # by which the shell knows its process, while that is not its own id (see agent_starts.py)
    past_ids: tuple[str, ...] = ()  # instances whose engine it has taken over, oldest first
    warmth: str = ""  # state of the dormant instance that it grew from
    becomes: str = ""  # at the end of its drain: prewarmed | swapped_out, else ""
    is_sleeping: bool = False  # a SleepEngine is out
    snapshot_bytes: int = 0  # of host memory, promised or taken, that it sleeps in
    is_joined: bool = False  # of a pipeline's first stage: the later ones are READY
    is_loaded: bool = False  # of a pipeline's first stage: its own part is in
    is_serving: bool = False  # of a pipeline's first stage: a ServeStages is out
    is_consolidating: bool = False  # a ConsolidateEngine is out
    num_unconsolidated: int = 0  # times that it failed
    consolidates_at: float = 0.0  # not before, after a failure
    consolidate_by: float = 0.0  # when a ConsolidateEngine that is out has taken too long
    predicted: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds, as its command expects
    has_restarted: bool = False  # its start was broken off and begun again: its seconds are no measure
    is_abandoning: bool = False  # an AbandonConsolidation is out: it may hold the bytes of the whole until it answers

    @property
    def engine(self) -> str:
        """The id its engine effects carry."""
        return self.engine_id or self.instance.instance_id


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMemory:
    """All that the agent must know again after a kill -9."""

    holdings: tuple[Holding, ...] = ()
    fence: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remember:
    """Write `memory` down before anything else is done."""

    memory: AgentMemory


EFFECTS: tuple[type, ...] = (
    LaunchEngine,
    AwaitWeights,
    LoadEngine,
    ActivateEngine,
    SleepEngine,
    LimitKv,
    ConsolidateEngine,
    AbandonConsolidation,
    ServeStages,
    StopEngine,
    CheckHealth,
    CountInFlight,
    ReportStart,
    ForgetEngine,
    Remember,
)
