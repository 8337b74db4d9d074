"""The engine port: all that an agent asks of an engine of any kind.

A start has two halves that overlap with the fetch of the weights: `launch` brings the process up, `load` gives it the
weights. Engines outlive the agent: a handle is plain data on disk, and `adopt` takes the process back after a restart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import msgspec

from glowplug.domain.bounds import Positive
from glowplug.domain.errors import EngineUnable
from glowplug.domain.hardware import Devices
from glowplug.domain.instance import EngineFigures, Phase
from glowplug.domain.model import Model
from glowplug.domain.reading import ADVANCED, SETTING
from glowplug.engines.declaration import EngineArguments, EngineWeights
from glowplug.events.commands import StartInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """Traits of an engine on every device; see `EngineDriver.abilities` for those that depend on it."""

    emulated: bool = False
    parked: bool = False
    metrics: bool = False  # vLLM's metric names on /metrics
    cancels_unstreamed: bool = True  # False: at once for streams only; others when the engine is quiet
    overhead_bytes: int = 4 << 30  # host memory beyond its grant, where no setting says
    asleep_bytes: int = 0  # GPU memory kept asleep; 0: not checked
    groups: bool = False  # one instance may spread over several GPUs of a node
    groups_lack: frozenset[str] = frozenset()  # host-memory abilities that such an instance lacks
    shares_when_asked: bool = False  # ability "share" only for models with weights_shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node starts the engine of a command. `run_dir` exists, is this engine's alone and outlives the agent."""

    run_dir: Path
    log_path: Path
    devices: Devices = field(default_factory=Devices)
    traceparent: str = ""
    host: str = "127.0.0.1"
    port: int = 0  # 0: the kernel chooses, and the engine reports it
    api_key: str = ""  # "": none
    address: str = ""  # where the other stages of a pipeline reach this one; "": `host`


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHandle:
    """Data to find an engine process again. `pid` leads its own process group and session."""

    engine: str
    instance_id: str
    pid: int
    pid_started_at: float  # process.started_at(pid)
    run_dir: str
    log_path: str
    url: str = ""  # empty until the engine has reported its port (see LoadReport.handle)
    host: str = "127.0.0.1"
    port: int = 0  # requested port; 0: its own choice
    devices: Devices = field(default_factory=Devices)
    figures: EngineFigures = field(default_factory=EngineFigures)  # of its last load
    data: Mapping[str, str] = field(default_factory=dict)  # the driver's own
    api_key: str = ""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> "EngineHandle":
        """Raises msgspec.ValidationError."""
        return msgspec.json.decode(raw, type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A READY engine, with its url and figures in the handle. Phases (LAUNCH, LOAD, WARMUP) in epoch seconds."""

    handle: EngineHandle
    phases: tuple[Phase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`ok` is False for a dead, hung or broken engine, as `reason` says. `alive`: the process exists."""

    ok: bool
    reason: str = ""
    alive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Times in seconds."""

    vllm_python: Annotated[str, SETTING] = ""  # interpreter with vLLM; empty: GLOWPLUG_VLLM_ENV's
    llamacpp_parked: bool = True  # engines are forks of one process (20 MB)
    vllm_parked: bool = True
    launch_timeout_s: Positive = 120.0
    load_timeout_s: Annotated[Positive, ADVANCED] = 600.0
    health_timeout_s: float = 2.0
    servers: Annotated[str, SETTING] = ""  # TOML file of the servers that `engine: command` may start
    emulated_time_scale: Annotated[Positive, ADVANCED] = 1.0  # emulated seconds per second
    emulated_streams: Annotated[bool, ADVANCED] = False  # load arriving weights
    extra: Mapping[str, Any] = field(default_factory=dict)


class Ability(StrEnum):
    """Abilities besides serving. The names are those of Node.can."""

    PREWARM = "prewarm"  # hold weights without a KV cache
    SWAP = "swap"  # give all GPU memory back while the process lives
    STAGES = "stages"  # serve as the stages of a pipeline
    FIRST_LAYERS = "first_layers"  # hold only the first layers while prewarmed
    STREAM = "stream"  # load weights while these arrive
    ADAPTERS = "adapters"  # load and unload LoRA adapters while serving
    SHARE = "share"  # read weights in the node's own pages (EngineCapabilities.shares_when_asked)


class EngineDriver(Protocol):
    """Brings engines of one kind up and down on this node. Keeps no state that a restart would lose."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def arguments(self) -> EngineArguments: ...

    @property
    def weights(self) -> EngineWeights: ...

    def abilities(self, gpu_kind: str) -> frozenset[Ability]:
        """`gpu_kind`: host | cuda | emulated."""
        ...

    def unavailable(self) -> str:
        """'' when such engines can start on this node, else the reason, for a person."""
        ...

    async def warm(self) -> None:
        """Prepare for launches (a parked process, a page cache); may do nothing."""
        ...

    async def launch(self, command: StartInstance, place: Place) -> EngineHandle:
        """Start the process and return while it imports; no weights needed yet. A replica (`command.replica`) loads
        the granted bytes of its weights before its wake.

        Raises EngineMisconfigured for wrong engine_args, EngineFailed for everything else.
        """
        ...

    async def load(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        """Hand over the weights and return when READY. With the ability "stream" they may still arrive
        (weights/pieces.py): the engine reads only landed bytes, and its reads count once the caller has seen the
        weights complete.

        Raises EngineFailed with the log's last lines; the process has ended by then. On cancellation the process lives
        on: call again (a second call just waits) or `stop`.
        """
        ...

    async def health(self, handle: EngineHandle) -> Health:
        """Ask the engine itself, within `health_timeout_s`. Never raises."""
        ...

    async def num_in_flight(self, handle: EngineHandle) -> int:
        """Requests running or waiting inside. Raises EngineFailed."""
        ...

    async def stop(self, handle: EngineHandle, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to the process group after `grace_s`. Idempotent."""
        ...

    def adopt(self, handle: EngineHandle) -> bool:
        """True while that process (same pid, same start time) lives."""
        ...

    async def close(self) -> None:
        """Release the driver's own resources. Engines live on."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        """End requests and give up the KV cache ("prewarmed") or all of the GPU ("swapped_out"). Raises
        EngineFailed; the process may still live."""
        ...

    async def wake(self, handle: EngineHandle) -> None:
        """Return when it serves again. Raises EngineFailed."""
        ...

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        """-1 where the engine does not say. Raises EngineFailed."""
        ...

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        """Limit the cache to `num_bytes`, or to one whole context if that is more. Raises EngineFailed."""
        ...


@runtime_checkable
class AdapterHost(Protocol):
    async def load_adapter(self, handle: EngineHandle, adapter: Model, weights_path: Path) -> None:
        """Load the adapter at `weights_path`; it answers requests whose model is `adapter.name`. Idempotent. Raises
        EngineFailed with the engine's reason where it does not fit its base; the engine serves on."""
        ...

    async def unload_adapter(self, handle: EngineHandle, adapter: Model) -> None:
        """Unload an adapter that no request uses any more. Idempotent. Raises EngineFailed."""
        ...

    async def num_of_adapter(self, handle: EngineHandle, adapter: Model) -> int:
        """Count the running requests, plus waiting ones that may be its. Raises EngineFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEndpoint:
    url: str
    api_key: str = ""


@runtime_checkable
class RefusingSleeper(Sleeper, Protocol):
    """Driver of engines that refuse requests while asleep or falling asleep: 503 with the header
    telemetry/semconv.py: HEADER_REFUSED, on which a router sends the request elsewhere."""

    async def sleep_if_idle(self, handle: EngineHandle, becomes: str) -> int:
        """Sleep and return 0, or serve on and return the number of requests inside. Raises EngineFailed; the process
        may still live."""
        ...


@runtime_checkable
class Stager(Protocol):
    """Driver of engines that run as the stages of a pipeline (HydraServe sections 4 and 6). A method not overridden
    raises EngineUnable."""

    async def serve_stages(self, handle: EngineHandle, later: Sequence[StageEndpoint] = ()) -> LoadReport:
        """Connect the first stage to the later ones, in the order of their layers. Raises EngineFailed."""
        raise EngineUnable(f"{handle.engine} does not run in stages")

    async def consolidate(self, handle: EngineHandle, model: Model, weights_path: Path) -> int:
        """Load the rest of the model from `weights_path` while the pipeline serves on, take over the other stages'
        KV cache, and serve alone. Returns the KV cache's tokens, 0 when unknown. Raises EngineFailed; it remains
        a stage. On cancellation the engine continues: call again, or `abandon_consolidation`."""
        raise EngineUnable(f"{handle.engine} does not become whole")

    async def abandon_consolidation(self, handle: EngineHandle) -> int | None:
        """Give up a `consolidate` and return None; or, if already whole, the KV cache's tokens. Raises EngineFailed
        when it does not answer: its state is unknown."""
        raise EngineUnable(f"{handle.engine} does not become whole")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Requests that have left a pipeline. `num_pulled` of them keep their KV cache, the rest are recomputed.
    Seconds: pause until nothing ran, and writing of the KV cache."""

    num_requests: int = 0
    num_pulled: int = 0
    num_tokens: int = 0  # of the KV cache
    num_bytes: int = 0
    pause_s: float = 0.0
    export_s: float = 0.0


@runtime_checkable
class Mover(Protocol):
    """Driver of engines that become whole in a process beside the stage's own."""

    async def consolidate_at(self, handle: EngineHandle, model: Model, weights_path: Path, port: int) -> int:
        """As `Stager.consolidate`; the whole engine listens on `port`, 0: the kernel's choice."""
        ...

    def whole(self, handle: EngineHandle) -> LoadReport | None:
        """The engine serving alone, from a stage's handle or its own; its handle covers both processes. None before
        a consolidation ends."""
        ...

    def processes(self, handle: EngineHandle) -> tuple[int, ...]:
        """Leaders of other living processes: a whole engine's former stage, or the engine becoming whole beside a
        stage."""
        ...

    async def move_requests(self, handle: EngineHandle) -> Moved:
        """Bring a whole engine the KV cache of the stages' requests, which pause for it and then continue. A stream's
        owner continues it at the whole engine's url, with prompt plus tokens so far as its prompt; no moved token is
        recomputed. Raises EngineFailed."""
        ...

    async def is_stage_over(self, handle: EngineHandle) -> bool:
        """Whether a whole engine's former stage is done: a first one when it answers no request, a later one when
        its process has ended. Raises EngineFailed."""
        ...

    async def end_stage(self, handle: EngineHandle) -> None:
        """End that process; its streams break off."""
        ...

    def forget_moved(self, handle: EngineHandle) -> None:
        """Drop a whole engine's moved requests."""
        ...
