"""What an agent receives (stimuli), what it asks of its shell (effects), and what it remembers over a restart.

Times are epoch seconds, sizes bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.controllers.agent.params import AgentParams as AgentParams
from glowplug.controllers.agent.params import EngineKind as EngineKind
from glowplug.controllers.agent.record import Holding
from glowplug.domain.hardware import CachedWeights, Link
from glowplug.domain.instance import Instance, Phase, StageAddress, Worker
from glowplug.domain.model import Model, WeightsRef
from glowplug.policies.start_times import StartKind

# Stimuli


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of something that was asked for, or what has happened to one instance."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Recalled:
    """First stimulus after a restart: which of the remembered instances have a living engine process."""

    living: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineLaunched(Outcome):
    """The process is up and imports; it has no weights yet."""


@dataclass(frozen=True, slots=True)
class WeightsArriving(Outcome):
    """The files at `path` have their names and their sizes, and bytes land in them: an engine that streams may load
    them now. What it has loaded counts only after WeightsComplete."""

    path: str


@dataclass(frozen=True, slots=True)
class WeightsReplaced(Outcome):
    """What has arrived was dropped and is fetched again from the start: what an engine has read of it may be wrong.
    WeightsArriving or WeightsComplete follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class WeightsComplete(Outcome):
    """`path` is the file or directory to load. `found`: where they were: CACHED, there at the first look; DISK, brought
    from the node's own copy; COLD, from elsewhere."""

    path: str
    found: StartKind = StartKind.COLD


@dataclass(frozen=True, slots=True)
class WeightsFailed(Outcome):
    """`code` is an error code of domain/errors.py."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineReady(Outcome):
    """The engine serves at `url`; `phases` are its own (LAUNCH, LOAD, WARMUP). Of a pipeline's first stage it comes
    twice: once its own part is loaded, and once it answers for all (after ServeStages)."""

    url: str
    phases: tuple[Phase, ...] = ()
    kv_tokens: int = 0  # that its KV cache holds; 0: not known
    key_id: str = ""  # as in Instance
    num_slots: int = 0  # requests it runs at once; 0: what was planned for it
    lacks: tuple[str, ...] = ()  # as in Instance
    shared_bytes: int = 0  # of its weights, seen to be pages of host memory that its fellows read too
    step_s: float = 0.0  # as in Instance


@dataclass(frozen=True, slots=True)
class EngineStartFailed(Outcome):
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineExited(Outcome):
    """The process has ended, and nobody had asked it to."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineOverLimit(Outcome):
    """The engine takes more host memory than it may: it must end at once, before the machine has none left."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineGone(Outcome):
    """A stop is over. `clean` False: something of it still lives, so its bytes are not free."""

    clean: bool = True


@dataclass(frozen=True, slots=True)
class HealthSeen(Outcome):
    ok: bool
    alive: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InFlight(Outcome):
    """Requests inside the engine, running and waiting, and the bytes of its KV cache that they fill (-1: not known)."""

    num_in_flight: int
    kv_bytes_used: int = -1


@dataclass(frozen=True, slots=True)
class EnginePrewarmed(Outcome):
    """A replica's weights are on its GPUs. `shared_bytes` as in EngineReady."""

    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineAsleep(Outcome):
    """An engine that was asked to has left its GPUs (but for its weights, where they stay). `num_bytes` of them it was
    seen to hold all the same; -1: nobody can see that here."""

    num_bytes: int = -1


@dataclass(frozen=True, slots=True)
class EngineBusy(Outcome):
    """An engine that was to sleep unless it was busy has requests, and serves on."""

    num_in_flight: int


@dataclass(frozen=True, slots=True)
class SleepFailed(Outcome):
    """An engine that was asked to sleep could not, and lives: what it holds of its GPUs is not known."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineConsolidated(Outcome):
    """What was a stage serves all of the model, alone."""

    kv_tokens: int = 0  # that its KV cache holds now; 0: not known
    url: str = ""  # where it serves from now on; "": where it did
    key_id: str = ""  # as in Instance, of that url
    phases: tuple[Phase, ...] = ()  # FETCH of the rest of the weights, LOAD with the other stages' KV cache


@dataclass(frozen=True, slots=True)
class StagesFinished(Outcome):
    """Nothing runs any more in the stages that a whole engine came up beside. `cut`: what still ran was ended, since
    its time was over."""

    cut: bool = False


@dataclass(frozen=True, slots=True)
class ConsolidationFailed(Outcome):
    """It is the stage that it was, and holds no more of its GPU than then. `code`: of domain/errors.py; with
    weights_corrupt the rest of its weights is wrong, and so may be what it serves from."""

    reason: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class StopAsked(Outcome):
    """An operator asks this agent itself to drain and stop an instance."""

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
    on_disk: tuple[CachedWeights, ...] = ()
    disk_bytes_per_s: float = 0.0


# Stimuli that the controller itself makes for one record, when it handles what concerns another


@dataclass(frozen=True, slots=True)
class GivesWay:
    """Another instance needs the bytes of a replica, or what a sleeper keeps."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Its engine, and what it has of a start, go on as `instance_id`."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class RunsElsewhere:
    """The store's row says that another node was given the instance later."""


# Effects


@dataclass(frozen=True, slots=True)
class ForEngine:
    """What the shell is to do for the engine of one instance."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class LaunchEngine(ForEngine):
    """Start the process now; weights may still be on their way. Outcome: EngineLaunched or EngineStartFailed."""

    model: Model
    workers: tuple[Worker, ...]  # of this node: one, or a tensor group
    gpu_kind: str  # of the first worker's
    gpu_index: int
    traceparent: str = ""
    replica: bool = False  # weights only: outcome of its load is EnginePrewarmed
    stage: int = 0
    num_stages: int = 1
    gpu_indices: tuple[int, ...] = ()  # of all its workers
    rendezvous: str = ""  # of a pipeline's stages: see StartInstance


@dataclass(frozen=True, slots=True)
class AwaitWeights(ForEngine):
    """Watch the region in host memory; of a pipeline's stage, its part of it. Outcome: WeightsComplete or
    WeightsFailed, before them WeightsArriving and WeightsReplaced where it `streams`; none at all past the
    deadline."""

    weights: WeightsRef
    deadline_at: float
    stage: int = 0
    num_stages: int = 1
    streams: bool = False  # its engine loads them while they arrive


@dataclass(frozen=True, slots=True)
class LoadEngine(ForEngine):
    """The weights at `path` may still arrive. Outcome: EngineReady (of a replica EnginePrewarmed) or
    EngineStartFailed."""

    path: str


@dataclass(frozen=True, slots=True)
class ActivateEngine(ForEngine):
    """What lies dormant as `source` goes on as `instance_id` and serves. A replica that is still loading is streamed to
    its end meanwhile. Outcome: EngineReady or EngineStartFailed, of `instance_id`."""

    source: str
    model: Model
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class SleepEngine(ForEngine):
    """Give up the KV cache and, for "swapped_out", the weights on the GPU too; what still runs ends, as its grace did.
    Outcome: EngineAsleep or SleepFailed; EngineExited where its process ends over it. With `if_idle` it does nothing
    where something runs, and the outcome is EngineBusy; only engines that refuse (EngineKind) are asked so."""

    becomes: str  # prewarmed | swapped_out
    if_idle: bool = False


@dataclass(frozen=True, slots=True)
class LimitKv(ForEngine):
    """The engine drains: from now on its KV cache is `num_bytes` at most (WarmServe section 4.1). No outcome."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class ConsolidateEngine(ForEngine):
    """Load the other stages' part of the model in the background, take over their KV, serve alone. Outcome:
    EngineConsolidated or ConsolidationFailed, or nothing when the engine goes before."""

    model: Model


@dataclass(frozen=True, slots=True)
class AbandonConsolidation(ForEngine):
    """A ConsolidateEngine has taken too long: stop it and drop what has come. It is asked again until there is an
    outcome: ConsolidationFailed, or EngineConsolidated where that was sooner."""


@dataclass(frozen=True, slots=True)
class FinishStages(ForEngine):
    """It has become whole in another process: wait until its stages have ended what routers cannot take away from them,
    at most until `deadline_at` (0: for as long as their pipeline lives), then end its own stage. Outcome:
    StagesFinished."""

    deadline_at: float


@dataclass(frozen=True, slots=True)
class ServeStages(ForEngine):
    """Every stage is there: the first one answers for all, and reaches the `later` ones where they say. Outcome:
    EngineReady."""

    later: tuple[StageAddress, ...] = ()


@dataclass(frozen=True, slots=True)
class StopEngine(ForEngine):
    """Give up whatever is under way for the instance and end its process. Outcome: EngineGone."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class CheckHealth(ForEngine):
    """Outcome: HealthSeen."""


@dataclass(frozen=True, slots=True)
class CountInFlight(ForEngine):
    """Outcome: InFlight, or nothing when the engine does not answer."""


@dataclass(frozen=True, slots=True)
class ReportStart:
    """A start is over, well (READY) or badly (FAILED): spans and metrics of its phases."""

    instance: Instance
    traceparent: str
    is_cached: bool = False  # its weights were in host memory when it began


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDrain:
    """A drain is over, and its engine is to stop or has fallen asleep: spans and metrics of both. Epoch seconds."""

    instance: Instance
    traceparent: str  # of what asked for the drain
    began_at: float
    drained_at: float  # nothing ran any more, or its grace was over
    asleep_at: float = 0.0  # 0: its engine stops
    predicted_s: float = 0.0  # of the sleep; 0: nothing is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConsolidation:
    """A stage has become whole, or has given that up (`error`): spans and metrics of it. Epoch seconds."""

    instance: Instance
    traceparent: str  # of what asked for it
    began_at: float
    phases: tuple[Phase, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class ForgetEngine(ForEngine):
    """Nothing is kept of the instance any more: its log and run directory may go."""


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
    ServeStages,
    ConsolidateEngine,
    AbandonConsolidation,
    FinishStages,
    SleepEngine,
    LimitKv,
    StopEngine,
    CheckHealth,
    CountInFlight,
    ReportStart,
    ReportDrain,
    ReportConsolidation,
    ForgetEngine,
    Remember,
)
