"""What an agent receives (stimuli), what it asks of its shell (effects), and what it keeps over a restart.

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
from glowplug.fleet.start_times import StartKind

# Stimuli


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an effect, or another event of one instance."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Recalled:
    """First stimulus after a restart: which of the remembered instances have a living engine process."""

    living: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineLaunched(Outcome):
    """The process is up and imports its libraries; it has no weights yet."""


@dataclass(frozen=True, slots=True)
class WeightsArriving(Outcome):
    """The files at `path` have their names and sizes, and their bytes are arriving: an engine that streams may load
    them now. What the engine has loaded counts only after WeightsComplete."""

    path: str


@dataclass(frozen=True, slots=True)
class WeightsReplaced(Outcome):
    """The arrived weights were dropped and are fetched again from the start: those that an engine has read may be
    wrong. WeightsArriving or WeightsComplete follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class WeightsComplete(Outcome):
    """The weights to load are at `path`, a file or directory. `found`: where they were. CACHED: in host memory at the
    first look; DISK: on the node's own disk; COLD: elsewhere."""

    path: str
    found: StartKind = StartKind.COLD


@dataclass(frozen=True, slots=True)
class WeightsFailed(Outcome):
    """The weights could not be had. `code` is an error code of domain/errors.py."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineReady(Outcome):
    """The engine serves at `url`; `phases` are its own (LAUNCH, LOAD, WARMUP). The first stage of a pipeline reports
    twice: once its own part is loaded, and once it answers for all (after ServeStages)."""

    url: str
    phases: tuple[Phase, ...] = ()
    kv_tokens: int = 0  # that its KV cache holds; 0: not known
    key_id: str = ""  # as in Instance
    num_slots: int = 0  # requests it runs at once; 0: as planned
    lacks: tuple[str, ...] = ()  # as in Instance
    shared_bytes: int = 0  # of its weights, seen in pages of host memory that other engines read too
    step_s: float = 0.0  # as in Instance


@dataclass(frozen=True, slots=True)
class EngineStartFailed(Outcome):
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineExited(Outcome):
    """The process has ended without being asked to."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineOverLimit(Outcome):
    """The engine takes more host memory than it may: it must end at once, before the machine runs out of memory."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineGone(Outcome):
    """A stop is over. `clean` False: some of the process still lives, so its bytes are not free."""

    clean: bool = True


@dataclass(frozen=True, slots=True)
class HealthSeen(Outcome):
    ok: bool
    alive: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InFlight(Outcome):
    """Requests running and waiting in the engine, and the bytes of its KV cache that they fill (-1: not known)."""

    num_in_flight: int
    kv_bytes_used: int = -1


@dataclass(frozen=True, slots=True)
class EnginePrewarmed(Outcome):
    """A replica's weights are on its GPUs. `shared_bytes` as in EngineReady."""

    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineAsleep(Outcome):
    """The engine has left its GPUs as asked, except for weights that are to stay. `num_bytes`: what it was seen to hold
    on them all the same; -1: not measurable on this node."""

    num_bytes: int = -1


@dataclass(frozen=True, slots=True)
class EngineBusy(Outcome):
    """The engine was to sleep only if idle, has requests, and serves on."""

    num_in_flight: int


@dataclass(frozen=True, slots=True)
class SleepFailed(Outcome):
    """The engine was asked to sleep and could not, and lives: what it holds of its GPUs is not known."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineConsolidated(Outcome):
    """The engine of a stage has become whole: it serves all of the model, alone."""

    kv_tokens: int = 0  # that its KV cache holds now; 0: not known
    url: str = ""  # where it serves from now on; "": as before
    key_id: str = ""  # as in Instance, of that url
    phases: tuple[Phase, ...] = ()  # FETCH of the rest of the weights, LOAD with the other stages' KV cache


@dataclass(frozen=True, slots=True)
class StagesFinished(Outcome):
    """Nothing runs any more in the stages of a consolidated engine. `cut`: requests were ended at the deadline."""

    cut: bool = False


@dataclass(frozen=True, slots=True)
class ConsolidationFailed(Outcome):
    """The engine stays a stage, and holds no more of its GPU than before. `code`: of domain/errors.py; with
    weights_corrupt the rest of its weights is wrong, and the part that it serves from may be wrong too."""

    reason: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class StopAsked(Outcome):
    """An operator asks the agent itself to drain and stop an instance."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class NodeStopping:
    """The agent is asked to end: drain and stop every engine, and start none."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The weights that the node's prefetcher keeps and the loads of its links, as last reported."""

    cached: tuple[CachedWeights, ...] = ()
    host_cache_bytes: int = 0
    links: tuple[Link, ...] = ()
    prefetcher_url: str = ""
    on_disk: tuple[CachedWeights, ...] = ()
    disk_bytes_per_s: float = 0.0


# Stimuli that the controller makes for one record while it handles a stimulus of another


@dataclass(frozen=True, slots=True)
class GivesWay:
    """Another instance needs the bytes of a replica or of a sleeper."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakenOver:
    """The engine of the instance, and what it has of a start, continue as `instance_id`."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class HostLeaves:
    """The instance of its base whose engine serves an adapter is no longer READY. It goes on for `grace_s`, where its
    engine still runs at all."""

    reason: str
    grace_s: float
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class RunsElsewhere:
    """The store's row says that another node was given the instance later."""


# Effects


@dataclass(frozen=True, slots=True)
class ForEngine:
    """An effect on the engine of one instance."""

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
    adapter_slots: int = 0  # as in StartInstance
    adapter_rank: int = 0


@dataclass(frozen=True, slots=True)
class AwaitWeights(ForEngine):
    """Watch the weights in host memory; of a stage, its part of them. Outcome: WeightsComplete or WeightsFailed, after
    any WeightsArriving and WeightsReplaced where the engine `streams`; none past the deadline."""

    weights: WeightsRef
    deadline_at: float
    stage: int = 0
    num_stages: int = 1
    streams: bool = False  # its engine loads them while they arrive


@dataclass(frozen=True, slots=True)
class LoadEngine(ForEngine):
    """Load the weights at `path`, which may still arrive. Outcome: EngineReady (of a replica EnginePrewarmed) or
    EngineStartFailed."""

    path: str


@dataclass(frozen=True, slots=True)
class LoadAdapter(ForEngine):
    """Let the engine of `host_id` take the LoRA adapter at `path`. Outcome: EngineReady, with what the host's engine
    has, or EngineStartFailed."""

    host_id: str
    model: Model
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter(ForEngine):
    """Give up what is under way for the instance, and let the engine of `host_id` drop its adapter. Outcome:
    EngineGone, also where that engine is gone."""

    host_id: str
    model: Model


@dataclass(frozen=True, slots=True)
class ActivateEngine(ForEngine):
    """Let the dormant engine of `source` continue as `instance_id` and serve. A replica that is still loading goes on
    loading meanwhile. Outcome: EngineReady or EngineStartFailed, of `instance_id`."""

    source: str
    model: Model
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class SleepEngine(ForEngine):
    """Give up the KV cache and, for "swapped_out", the weights on the GPU too; requests that still run end. Outcome:
    EngineAsleep or SleepFailed; EngineExited where its process ends over it. With `if_idle` a busy engine does nothing,
    and the outcome is EngineBusy; only engines that refuse requests meanwhile (EngineKind) are asked so."""

    becomes: str  # prewarmed | swapped_out
    if_idle: bool = False


@dataclass(frozen=True, slots=True)
class LimitKv(ForEngine):
    """Limit the KV cache of a draining engine to `num_bytes` (WarmServe section 4.1). No outcome."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class ConsolidateEngine(ForEngine):
    """Load the other stages' part of the model in the background, take over their KV cache, and serve alone. Outcome:
    EngineConsolidated or ConsolidationFailed, or none where the engine ends before."""

    model: Model


@dataclass(frozen=True, slots=True)
class AbandonConsolidation(ForEngine):
    """Stop a ConsolidateEngine that takes too long, and drop what has been loaded. Repeated until there is an outcome:
    ConsolidationFailed, or EngineConsolidated where that was sooner."""


@dataclass(frozen=True, slots=True)
class FinishStages(ForEngine):
    """End a stage whose engine became whole in another process: wait until its stages have ended the requests that
    routers cannot move, at most until `deadline_at` (0: as long as their pipeline lives), then end the instance's own
    stage. Outcome: StagesFinished."""

    deadline_at: float


@dataclass(frozen=True, slots=True)
class ServeStages(ForEngine):
    """Let the first stage answer for all, now that every stage is there; it reaches the `later` ones at their
    addresses. Outcome: EngineReady."""

    later: tuple[StageAddress, ...] = ()


@dataclass(frozen=True, slots=True)
class StopEngine(ForEngine):
    """Give up what is under way for the instance and end its process. Outcome: EngineGone."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class CheckHealth(ForEngine):
    """Ask the engine for its health. Outcome: HealthSeen."""


@dataclass(frozen=True, slots=True)
class CountInFlight(ForEngine):
    """Count the engine's requests. Outcome: InFlight, or none where the engine does not answer. Of an adapter those of
    its host's engine count, all of them where the engine does not tell whose they are."""

    host_id: str = ""
    model: Model | None = None  # the adapter


@dataclass(frozen=True, slots=True)
class ReportStart:
    """Report the spans and metrics of a start that ended READY or FAILED."""

    instance: Instance
    traceparent: str
    is_cached: bool = False  # its weights were in host memory when it began


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDrain:
    """Report the spans and metrics of a drain whose engine stops or fell asleep. Epoch seconds."""

    instance: Instance
    traceparent: str  # of the command for the drain
    began_at: float
    drained_at: float  # when nothing ran any more, or its grace was over
    asleep_at: float = 0.0  # 0: its engine stops
    predicted_s: float = 0.0  # of the sleep; 0: nothing is expected


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConsolidation:
    """Report the spans and metrics of a consolidation that ended well or badly (`error`). Epoch seconds."""

    instance: Instance
    traceparent: str  # of its command
    began_at: float
    phases: tuple[Phase, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class ForgetEngine(ForEngine):
    """Delete the log and run directory of an instance of which nothing is kept any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMemory:
    """The state that the agent needs again after a kill -9."""

    holdings: tuple[Holding, ...] = ()
    fence: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remember:
    """Write `memory` down before any other effect is carried out."""

    memory: AgentMemory


EFFECTS: tuple[type, ...] = (
    LaunchEngine,
    AwaitWeights,
    LoadEngine,
    LoadAdapter,
    UnloadAdapter,
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
