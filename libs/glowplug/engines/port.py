"""The engine port: what an agent asks of an engine, whichever engine it is.

A start has two halves so that they overlap with the fetch of the weights: `launch` brings the process up (imports,
library, device context) and `load` gives it the weights once they are complete in host memory, or while they still
arrive there (ability "stream"). Engines outlive the agent: a handle is plain data, written to disk, and `adopt` takes
the process back after a restart.
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
    groups_lack: frozenset[str] = frozenset()  # abilities on host memory that such an instance does not have
    shares_when_asked: bool = False  # of the ability "share": for models with weights_shared alone


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
    gpu_indices: tuple[int, ...] = ()  # ... of each GPU of a tensor group, in the order of its ranks; (): of one GPU
    traceparent: str = ""
    host: str = "127.0.0.1"  # address the engine listens on
    port: int = 0  # 0: the kernel chooses, and the engine reports it
    api_key: str = ""  # that the engine asks for; "": none
    first_bytes: int = 0  # of its weights, that a replica of the first layers loads before it is woken; 0: all
    stage: int = 0  # of a pipeline, from 0: its part of the layers
    num_stages: int = 1
    rendezvous: str = ""  # "host:port" where the stages find one another; the first one listens there
    address: str = ""  # by which the other stages reach this one; "": `host`
    adapter_slots: int = 0  # LoRA adapters that it holds at once; 0: none
    adapter_rank: int = 0  # the largest rank of those adapters

    @property
    def num_gpus(self) -> int:
        """GPUs of this node that it runs on, one worker on each."""
        return max(1, len(self.gpu_indices))


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
    shared_bytes: int = 0  # of its weights, seen to be read in the pages of their file, as others of them read them
    step_s: float = 0.0  # seconds of a decode step of one sequence alone, measured; 0: the engine does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`ok` is False for a dead, a hung and a broken engine alike; `reason` says which. `alive`: the process exists."""

    ok: bool
    reason: str = ""
    alive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How a node starts its engines. Filled by the agent's settings; times in seconds."""

    vllm_python: str = ""  # interpreter of the environment that holds vLLM; empty: no vLLM here
    llamacpp_parked: bool = True  # engines are forks of a process that has imported all they need
    vllm_parked: bool = True
    launch_timeout_s: float = 120.0
    load_timeout_s: float = 600.0
    health_timeout_s: float = 2.0
    servers_file: str = ""  # of servers by command; empty: none
    emulated_time_scale: float = 1.0  # emulated seconds per second: 10 runs ten times as fast
    emulated_streams: bool = False  # emulated engines load their weights while these arrive
    extra: Mapping[str, Any] = field(default_factory=dict)  # options of one driver alone


class Ability(StrEnum):
    """What engines of one kind can do besides serving, on one kind of GPU. The names are those of Node.can."""

    PREWARM = "prewarm"  # hold their weights without a KV cache, and serve at once when they are to
    SWAP = "swap"  # give all of their GPU memory back while their process lives, and take it again
    STAGES = "stages"  # serve as the stages of a pipeline
    FIRST_LAYERS = "first_layers"  # hold the first layers alone while they are prewarmed
    STREAM = "stream"  # load their weights while these arrive
    ADAPTERS = "adapters"  # take and give up LoRA adapters while they serve
    SHARE = "share"  # read their weights in the pages where the node keeps them (EngineCapabilities.shares_when_asked)


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
        """Give it the weights and return when it is READY to serve. Where it has the ability "stream" they may still
        arrive (weights/pieces.py): it reads nothing that has not landed, and what it has read counts once its caller
        has seen them complete.

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


@runtime_checkable
class AdapterHost(Protocol):
    """What drivers of engines with the ability "adapters" can do besides."""

    async def load_adapter(self, handle: EngineHandle, adapter: Model, weights_path: Path) -> None:
        """Take the LoRA adapter at `weights_path`, complete in host memory: requests that name `adapter.name` as their
        model are answered with it from now on. Idempotent. Raises EngineFailed with the engine's reason where the
        adapter does not fit its base; the engine serves on."""
        ...

    async def unload_adapter(self, handle: EngineHandle, adapter: Model) -> None:
        """Give the adapter up; nothing asks for it any more. Idempotent. Raises EngineFailed."""
        ...

    async def num_of_adapter(self, handle: EngineHandle, adapter: Model) -> int:
        """Requests of the adapter running inside the engine, with those that wait there and may be its. Raises
        EngineFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEndpoint:
    """Where the engine of a later stage answers, on whichever node, and the key that it asks for."""

    url: str
    api_key: str = ""


@runtime_checkable
class RefusingSleeper(Sleeper, Protocol):
    """What drivers can do besides whose engines refuse what comes while they sleep or fall asleep: 503, with the header
    telemetry/semconv.py: HEADER_REFUSED, on which a router sends the request elsewhere. Nothing has to wait until
    routers have learned of a drain then."""

    async def sleep_if_idle(self, handle: EngineHandle, becomes: str) -> int:
        """Sleep, and return 0; or, where requests run or wait inside, go on and return how many. Raises EngineFailed;
        the process may still live then."""
        ...


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Requests that have left a pipeline's stages. `num_pulled` of them go on from their KV cache, the others are
    computed anew. Seconds: of the pause until nothing ran, and of writing the KV cache."""

    num_requests: int = 0
    num_pulled: int = 0
    num_tokens: int = 0  # of the KV cache
    num_bytes: int = 0
    pause_s: float = 0.0
    export_s: float = 0.0


@runtime_checkable
class Mover(Protocol):
    """What drivers of engines can do besides that become whole in a process beside the stage's own."""

    async def consolidate_at(self, handle: EngineHandle, model: Model, weights_path: Path, port: int) -> int:
        """As `Stager.consolidate`; what becomes whole listens on `port`, 0: the kernel's choice."""
        ...

    def whole(self, handle: EngineHandle) -> LoadReport | None:
        """What serves alone since `consolidate`, of a stage's handle or its own: its handle stands for both processes.
        None where a consolidation is not over, or there was none."""
        ...

    def processes(self, handle: EngineHandle) -> tuple[int, ...]:
        """The living processes that belong to a handle besides its own, by their leaders: of a whole engine the stage
        that it was, of a stage what becomes whole beside it."""
        ...

    async def move_requests(self, handle: EngineHandle) -> Moved:
        """Of the handle of a whole engine: bring it the KV cache of what runs in the stages, which pause for it and go
        on. Whoever owns a stream continues it at the whole engine's url, with the prompt and the tokens so far as its
        prompt, and no token is computed twice that has come over. Raises EngineFailed where the stages answer
        nothing."""
        ...

    async def is_stage_over(self, handle: EngineHandle) -> bool:
        """Of the handle of a whole engine: whether the stage that it was has nothing left to do. A first one has not
        while it answers a request, a later one while its process lives, which ends with the first one's. Raises
        EngineFailed where it does not answer."""
        ...

    async def end_stage(self, handle: EngineHandle) -> None:
        """Of the handle of a whole engine: end the process of the stage that it was; what streams there breaks off."""
        ...

    def forget_moved(self, handle: EngineHandle) -> None:
        """Of the handle of a whole engine: nothing that was moved is asked for any more."""
        ...
