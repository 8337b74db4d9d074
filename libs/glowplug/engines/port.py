"""The engine port: what an agent asks of an engine, whichever engine it is.

A start has two halves so that they overlap with the fetch of the weights: `launch` brings the process up (imports,
library, device context) and `load` gives it the weights once they are complete in host memory. Engines outlive the
agent: a handle is plain data, written to disk, and `adopt` takes the process back after a restart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import msgspec

from glowplug.domain.errors import EngineUnable
from glowplug.domain.instance import Phase
from glowplug.domain.model import Model
from glowplug.engines.declaration import EngineArguments, EngineWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine is like, on every device. The agent asks this, never the engine's name. What it can do besides
    serving depends on the device: see `EngineDriver.abilities`."""

    emulated: bool = False  # its output and its timings are modelled, not real
    parked: bool = False  # starts from a process that has its libraries imported
    metrics: bool = False  # vLLM's metric names on /metrics
    cancels_unstreamed: bool = True  # False: at once only for streams; the others when the engine is quiet
    overhead_bytes: int = 4 << 30  # host memory of its own that it may take beside its grant, where no setting says
    asleep_bytes: int = 0  # GPU memory that a sleeping engine may keep; 0: that is not looked at
    groups: bool = False  # one instance may spread over several GPUs of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """One instance to bring up. `run_dir` exists, belongs to this instance alone and outlives the agent."""

    instance_id: str
    model: Model
    num_bytes: int  # granted on the GPU: weights + KV cache
    run_dir: Path
    log_path: Path
    gpu_id: str = ""
    gpu_kind: str = "host"  # host | cuda | emulated
    gpu_index: int = 0  # device ordinal on this node, for gpu_kind "cuda"
    traceparent: str = ""
    host: str = "127.0.0.1"  # address the engine listens on
    port: int = 0  # 0: the kernel chooses, and the engine reports it
    api_key: str = ""  # that the engine asks for; "": none
    stage: int = 0  # of a pipeline of `num_stages`, in the order of the layers
    num_stages: int = 1
    first_bytes: int = 0  # of its weights, that a replica of the first layers loads before it is woken; 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHandle:
    """All that is needed to find one engine process again. `pid` leads its own process group and session."""

    engine: str
    instance_id: str
    pid: int
    pid_started_at: float  # process.started_at(pid): with the pid it names one process for ever
    run_dir: str
    log_path: str
    url: str = ""  # where its agent reaches it; empty until the engine has reported its port (see LoadReport.handle)
    host: str = "127.0.0.1"  # address it listens on
    port: int = 0  # the port it was asked to listen on; 0: its own choice
    data: Mapping[str, str] = field(default_factory=dict)  # the driver's own
    api_key: str = ""  # that it asks for; "": none

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> "EngineHandle":
        """Raises msgspec.ValidationError for anything that is not a handle."""
        return msgspec.json.decode(raw, type=cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A READY engine: its handle with the url, its phases (LAUNCH, LOAD, WARMUP) in epoch seconds, what it holds."""

    handle: EngineHandle
    phases: tuple[Phase, ...]
    num_slots: int = 0  # requests it runs at once; 0: as many as its model's max_concurrency
    kv_tokens: int = 0  # tokens that its KV cache holds, of all requests together; 0: the engine does not say
    lacks: tuple[str, ...] = ()  # of its kind's features, those that these weights do not have: see Instance.lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`ok` is False for a dead, a hung and a broken engine alike; `reason` says which. `alive`: the process exists."""

    ok: bool
    reason: str = ""
    alive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How a node starts its engines. Filled by the agent's settings; times in seconds."""

    python: str = ""  # interpreter of our own engine processes; empty: the one that runs this
    vllm_python: str = ""  # interpreter of the environment that holds vLLM; empty: no vLLM here
    llamacpp_parked: bool = True  # engines are forks of a process that has imported all they need
    vllm_parked: bool = True
    launch_timeout_s: float = 120.0
    load_timeout_s: float = 600.0
    health_timeout_s: float = 2.0
    servers_file: str = ""  # of servers by command; empty: none
    emulated_time_scale: float = 1.0  # emulated seconds per second: 10 runs ten times as fast
    extra: Mapping[str, Any] = field(default_factory=dict)  # options of one driver alone


class Ability(StrEnum):
    """What engines of one kind can do besides serving, on one kind of GPU. The names are those of Node.can."""

    PREWARM = "prewarm"  # hold their weights without a KV cache, and serve at once when they are to
    SWAP = "swap"  # give all of their GPU memory back while their process lives, and take it again
    STAGES = "stages"  # serve as the stages of a pipeline
    FIRST_LAYERS = "first_layers"  # hold the first layers alone while they are prewarmed
    SHARE = "share"  # read their weights where the node keeps them (Model.weights_shared)


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
        """What its engines can do on GPUs of that kind (host | cuda | emulated)."""
        ...

    def unavailable(self) -> str:
        """'' when engines of this kind can start on this node, else the reason, for a person."""
        ...

    async def warm(self) -> None:
        """Get ready to launch (a parked process, a page cache). Called at the agent's start; may do nothing."""
        ...

    async def launch(self, request: LaunchRequest) -> EngineHandle:
        """Start the process and return while it imports; no weights needed yet.

        Raises EngineMisconfigured for engine_args that are wrong, EngineFailed for everything else.
        """
        ...

    async def load(self, handle: EngineHandle, weights_path: Path) -> LoadReport:
        """Give it the complete weights and return when it is READY to serve.

        Raises EngineFailed with the last lines of its log; the process is gone by then. Cancelled, the process
        goes on loading: call it again (a second call with the same handle just waits) or `stop`.
        """
        ...

    async def health(self, handle: EngineHandle) -> Health:
        """Ask the engine itself, within `health_timeout_s`. Never raises."""
        ...

    async def num_in_flight(self, handle: EngineHandle) -> int:
        """Requests running or waiting inside the engine. Raises EngineFailed when it does not answer."""
        ...

    async def stop(self, handle: EngineHandle, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to its process group after `grace_s`. Returns when it is gone; idempotent."""
        ...

    def adopt(self, handle: EngineHandle) -> bool:
        """True when that very process (same pid, same start time) still lives. Health is asked separately."""
        ...

    async def close(self) -> None:
        """Release what this driver holds for itself (a parked process, sockets). Engines live on."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """What drivers of engines with the ability "prewarm" or "swap" can do besides."""

    async def sleep(self, handle: EngineHandle, becomes: str) -> None:
        """End what runs and give up the KV cache ("prewarmed"), or all of the GPU ("swapped_out"). Raises
        EngineFailed; the process may still live then."""
        ...

    async def wake(self, handle: EngineHandle) -> None:
        """Return when it serves again, however it slept. Raises EngineFailed."""
        ...

    async def kv_bytes_used(self, handle: EngineHandle) -> int:
        """Bytes of its KV cache that requests fill now, -1 where the engine does not say. Raises EngineFailed."""
        ...

    async def limit_kv(self, handle: EngineHandle, num_bytes: int) -> None:
        """From now on its KV cache is `num_bytes`, or what one whole context needs. Raises EngineFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEndpoint:
    """Where the engine of a later stage answers, on whichever node, and the key that it asks for."""

    url: str
    api_key: str = ""


@runtime_checkable
class Stager(Protocol):
    """What drivers of engines that run as the stages of a pipeline can do besides (HydraServe sections 4 and 6). One
    that derives from it and leaves a method out raises EngineUnable there."""

    async def serve_stages(self, handle: EngineHandle, later: Sequence[StageEndpoint] = ()) -> LoadReport:
        """Connect the first stage to the later ones, given in the order of their layers, and return when it answers for
        all. Raises EngineFailed."""
        raise EngineUnable(f"{handle.engine} does not run in stages")

    async def consolidate(self, handle: EngineHandle, model: Model, weights_path: Path) -> int:
        """Load the rest of the model, which is complete in host memory at `weights_path`, while the pipeline serves on,
        take over the other stages' KV cache, and serve alone. Returns the tokens that its KV cache holds then, 0 when
        it does not say. Raises EngineFailed; it is the stage that it was then. Cancelled, the engine goes on: call it
        again, or `abandon_consolidation`."""
        raise EngineUnable(f"{handle.engine} does not become whole")

    async def abandon_consolidation(self, handle: EngineHandle) -> int | None:
        """Give up a `consolidate` under way and drop what has come: None; or, where the engine was whole sooner, the
        tokens that its KV cache holds. Raises EngineFailed when it does not answer: what it holds is not known then."""
        raise EngineUnable(f"{handle.engine} does not become whole")
