"""Messages between the agent's controller and its shell, and its memory over a restart.

Times are epoch seconds, sizes bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.controllers.agent.params import AgentParams as AgentParams
from glowplug.controllers.agent.params import EngineKind as EngineKind
from glowplug.controllers.agent.record import Holding
from glowplug.domain.hardware import CachedWeights, Devices, Link
from glowplug.domain.instance import EngineFigures, Instance, Phase, Spell, StageAddress
from glowplug.domain.model import Model
from glowplug.events.commands import StartInstance
from glowplug.fleet.start_times import StartKind

# Stimuli


@dataclass(frozen=True, slots=True)
class Outcome:
    """An outcome of an effect, or another event of one instance."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class Recalled:
    """First stimulus after a restart: remembered instances with a living process."""

    living: frozenset[str]


@dataclass(frozen=True, slots=True)
class EngineLaunched(Outcome):
    """The process is up, without weights."""


@dataclass(frozen=True, slots=True)
class WeightsArriving(Outcome):
    """Files at `path` have their names and sizes: a streaming engine may load them. The load counts after
    WeightsComplete."""

    path: str


@dataclass(frozen=True, slots=True)
class WeightsReplaced(Outcome):
    """Arrived weights, perhaps read, were dropped and are fetched again. WeightsArriving or WeightsComplete follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class WeightsComplete(Outcome):
    """The weights are at `path`. `found` CACHED: in host memory at the first look; DISK: on the node's disk."""

    path: str
    found: StartKind = StartKind.COLD


@dataclass(frozen=True, slots=True)
class WeightsFailed(Outcome):
    """`code`: of domain/errors.py."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineReady(Outcome):
    """The engine serves at `url`; `phases`: its own (LAUNCH, LOAD, WARMUP). A pipeline's first stage reports twice:
    with its own part loaded, and as it answers for all (after ServeStages)."""

    url: str
    phases: tuple[Phase, ...] = ()
    key_id: str = ""
    figures: EngineFigures = field(default_factory=EngineFigures)


@dataclass(frozen=True, slots=True)
class EngineStartFailed(Outcome):
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class EngineExited(Outcome):
    """Ended unasked."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineOverLimit(Outcome):
    """Too much host memory: the engine must end at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineGone(Outcome):
    """A stop is over. `clean` False: some of the process survives, so its bytes are not free."""

    clean: bool = True


@dataclass(frozen=True, slots=True)
class HealthSeen(Outcome):
    ok: bool
    alive: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class InFlight(Outcome):
    """Running and waiting requests, and their KV cache bytes (-1: unknown)."""

    num_in_flight: int
    kv_bytes_used: int = -1


@dataclass(frozen=True, slots=True)
class EnginePrewarmed(Outcome):
    """A replica's weights are on its GPUs."""

    figures: EngineFigures = field(default_factory=EngineFigures)


@dataclass(frozen=True, slots=True)
class EngineAsleep(Outcome):
    """The engine has left its GPUs, except for a replica's weights. `num_bytes`: still held; -1: unknown."""

    num_bytes: int = -1


@dataclass(frozen=True, slots=True)
class EngineBusy(Outcome):
    """Asked to sleep if idle, the engine serves on."""

    num_in_flight: int


@dataclass(frozen=True, slots=True)
class SleepFailed(Outcome):
    """The engine lives, with unknown bytes on its GPUs."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineConsolidated(Outcome):
    """A stage's engine serves all of the model, alone."""

    kv_tokens: int = 0  # 0: unknown
    url: str = ""  # new address; "": as before
    key_id: str = ""  # of that url
    phases: tuple[Phase, ...] = ()  # FETCH of the remaining weights, LOAD with the other stages' KV cache


@dataclass(frozen=True, slots=True)
class StagesFinished(Outcome):
    """A consolidated engine's stages are idle. `cut`: requests were ended at the deadline."""

    cut: bool = False


@dataclass(frozen=True, slots=True)
class ConsolidationFailed(Outcome):
    """The engine stays a stage, with its former GPU bytes. `code` weights_corrupt: the rest of its weights is wrong,
    perhaps the served part too."""

    reason: str
    code: str = ""


@dataclass(frozen=True, slots=True)
class StopAsked(Outcome):
    """An operator asks the agent to stop an instance."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class NodeStopping:
    """Drain and stop every engine, and start none."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The prefetcher's weights and link loads, as last reported, and the load of the cores (Node)."""

    cached: tuple[CachedWeights, ...] = ()
    host_cache_bytes: int = 0
    links: tuple[Link, ...] = ()
    prefetcher_url: str = ""
    on_disk: tuple[CachedWeights, ...] = ()
    disk_bytes_per_s: float = 0.0
    num_cores: float = 0.0
    num_runnable: float = 0.0


# Stimuli made by the controller for its other records


@dataclass(frozen=True, slots=True)
class GivesWay:
    reason: str


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Engine and start continue as `instance_id`."""

    instance_id: str


@dataclass(frozen=True, slots=True)
class HostLeaves:
    """An adapter's host is no longer READY; its engine, if any, runs for `grace_s`."""

    reason: str
    grace_s: float
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class RunsElsewhere:
    """The store's row gives the instance to another node, later."""


# Effects


@dataclass(frozen=True, slots=True)
class ForEngine:
    instance_id: str


@dataclass(frozen=True, slots=True)
class ForStart:
    command: StartInstance

    @property
    def instance_id(self) -> str:
        return self.command.instance_id


@dataclass(frozen=True, slots=True)
class LaunchEngine(ForStart):
    """Start the process; weights may follow. Outcome: EngineLaunched or EngineStartFailed."""

    devices: Devices
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class AwaitWeights(ForStart):
    """Watch the weights (of a stage, its part) in host memory. Outcome: WeightsComplete or WeightsFailed, after
    WeightsArriving and WeightsReplaced where the engine `streams`; none past the deadline."""

    deadline_at: float
    streams: bool = False


@dataclass(frozen=True, slots=True)
class LoadEngine(ForEngine):
    """Load weights that may still arrive. Outcome: EngineReady (of a replica EnginePrewarmed) or EngineStartFailed."""

    path: str


@dataclass(frozen=True, slots=True)
class LoadAdapter(ForStart):
    """Load a LoRA adapter into its host's engine. Outcome: EngineReady, with that engine's figures, or
    EngineStartFailed."""

    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter(ForStart):
    """Give up the instance's work, and drop its adapter from its host's engine, if any. Outcome: EngineGone."""


@dataclass(frozen=True, slots=True)
class ActivateEngine(ForStart):
    """Let the engine of the command's `source` continue as the instance; a loading one loads on. Outcome: EngineReady
    or EngineStartFailed."""


@dataclass(frozen=True, slots=True)
class SleepEngine(ForEngine):
    """Give up the KV cache and, for "swapped_out", the weights on the GPU; running requests end. Outcome: EngineAsleep
    or SleepFailed; EngineExited if the process ends. With `if_idle`, only for engines that refuse requests meanwhile
    (EngineKind), a busy engine does nothing; outcome EngineBusy."""

    becomes: str  # prewarmed | swapped_out
    if_idle: bool = False


@dataclass(frozen=True, slots=True)
class LimitKv(ForEngine):
    """Limit a draining engine's KV cache (WarmServe section 4.1). No outcome."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class ConsolidateEngine(ForEngine):
    """Load the remaining model in the background, take over the other stages' KV cache, and serve alone. Outcome:
    EngineConsolidated or ConsolidationFailed; none if the engine ends before."""

    model: Model


@dataclass(frozen=True, slots=True)
class AbandonConsolidation(ForEngine):
    """Stop a slow ConsolidateEngine, dropping its bytes. Repeated until an outcome: ConsolidationFailed or
    EngineConsolidated."""


@dataclass(frozen=True, slots=True)
class FinishStages(ForEngine):
    """Wait until the stages left by an engine whole in another process have ended the requests that routers cannot
    move, at most until `deadline_at` (0: while their pipeline lives); then end the instance's own stage. Outcome:
    StagesFinished."""

    deadline_at: float


@dataclass(frozen=True, slots=True)
class ServeStages(ForEngine):
    """Let the first stage answer for all, reaching the `later` ones. Outcome: EngineReady."""

    later: tuple[StageAddress, ...] = ()


@dataclass(frozen=True, slots=True)
class StopEngine(ForEngine):
    """Give up the instance's work and end its process. Outcome: EngineGone."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class CheckHealth(ForEngine):
    """Outcome: HealthSeen."""


@dataclass(frozen=True, slots=True)
class CountInFlight(ForEngine):
    """Count requests; an adapter's in its host's engine, all there if it cannot tell them apart. Outcome: InFlight, or
    none without an answer."""

    adapter: StartInstance | None = None


@dataclass(frozen=True, slots=True)
class ReportStart:
    instance: Instance
    is_cached: bool = False  # in host memory when it began


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDrain:
    """Measure a drain, and its engine's falling asleep if it did."""

    model_key: str
    spells: tuple[Spell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConsolidation:
    model_key: str
    spell: Spell


@dataclass(frozen=True, slots=True)
class ForgetEngine(ForEngine):
    """Delete its log and run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMemory:
    """State to survive a kill -9."""

    holdings: tuple[Holding, ...] = ()
    fence: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remember:
    """Store `memory` before any other effect."""

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
