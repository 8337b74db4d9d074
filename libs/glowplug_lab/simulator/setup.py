"""The setup of a simulation: servers, models, policies, and the constants of the machines. Seconds and bytes.

Defaults are those of section 7 of the calibration on which the figures rest: PCIe 32 GB/s, a network card of 16 Gbit/s,
and the start-up stages of an engine as `StartSeconds` lists them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from glowplug.controllers.agent.messages import AgentParams
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.placer.controller import PlacerParams
from glowplug.controllers.predictor.params import PredictorParams
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.access import Tenant
from glowplug.domain.bounds import OutOfBounds, check_bounds
from glowplug.domain.model import Model
from glowplug.policies.prediction.port import WindowTotals
from glowplug_lab.simulator.costs import StepCosts

GB = 10**9
GIB = 2**30
MAX_GPUS: Final = 100_000
FAULTS: Final = ("death", "consolidation", "hang")
ABILITIES: Final = frozenset({"adapters", "prewarm", "share", "stages", "swap"})
SHARE_WHEN_ASKED: Final = frozenset({"vllm"})  # engines with "share" that share only weights_shared models
QUIET_AGENT: Final = AgentParams(beat_s=4.0, health_every_s=math.inf, max_tick_gap_s=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSeconds:
    """The times of an engine's start, sleep and growth besides moving weights over links. `launch_s` is the process
    with its context (container and CUDA context in HydraServe), `warmup_s` what follows the load (graphs, first token).

    `overlap` (HydraServe section 5): weights are fetched while the process comes up, and are loaded to the GPU as they
    come, so that only the last chunk is left to load after the fetch (Eq. 5); without it every stage waits for the one
    before, the fetch included. Swap-ins of SwapServeLLM: 5.3 s and 13.5 GB/s for vLLM, 0.23 s and 7 GB/s of all
    resident bytes for Ollama.
    """

    launch_s: float = 0.5
    library_s: float = 0.0  # imports; during the load with `overlap`, before it without
    warmup_s: float = 0.1
    first_s: float = 0.0  # extra time of the first prefill, with cold pages and caches
    stop_s: float = 0.1
    overlap: bool = True
    chunk_bytes: int = 16_000_000
    load_bytes_per_s: float = math.inf  # an engine's own load rate over all of its GPUs; inf: only lanes bound it
    replica_s: float = 0.0  # placing a replica in a process of a pool (WarmServe section 6)
    activate_s: float = 0.0  # turning a replica into an engine
    page_map_s: float = 0.0  # mapping one page of KV cache: 1.5e-6, or 193e-6 when pages are created
    page_bytes: int = 2_097_152
    stream_layers: bool = True  # the first prefill begins before the last layers are loaded (WarmServe section 4)
    num_layers: int = 32
    sleep_s: float = 0.1
    swap_base_s: float = 5.3
    swap_bytes_per_s: float = 13.5e9
    swap_resident: bool = False  # a swap-in moves all resident bytes, not just the weights
    hop_s: float = 0.001  # one pipeline stage to the next (t_n)

    def __post_init__(self) -> None:
        check_bounds(self, above_0=("chunk_bytes", "page_bytes", "num_layers", "swap_bytes_per_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """One kind of server, of which there are `num_servers`."""

    name: str = "server"
    num_servers: int = 1
    num_gpus: int = 8
    gpu_bytes: int = 80 * GB
    gpu_kind: str = "h800"  # the key of `StepCosts`
    network_bytes_per_s: float = 2e9
    pcie_bytes_per_s: float = 32e9
    host_cache_bytes: int = 1024 * GB
    disk_cache_bytes: int = 0  # of local disk behind host memory, for copies of weights; 0: none
    disk_bytes_per_s: float = 2e9  # of that disk, shared by reads and writes
    weights_in_host: bool = False  # every model's weights are in host memory from the start
    abilities: frozenset[str] = frozenset()  # from ABILITIES, for every engine; "vllm:swap": for that engine
    start_cores: float = 0.0  # starts at once that do not slow each other; 0: starts never slow each other

    def __post_init__(self) -> None:
        rates = ("network_bytes_per_s", "pcie_bytes_per_s", "disk_bytes_per_s")
        check_bounds(self, above_0=("num_servers", "num_gpus", "gpu_bytes", *rates))
        if self.num_servers * self.num_gpus > MAX_GPUS:
            raise OutOfBounds("num_gpus", f"{self.num_servers} x {self.num_gpus} GPUs are more than {MAX_GPUS}")
        if unknown := {one for one in self.abilities if one.rpartition(":")[2] not in ABILITIES}:
            raise OutOfBounds("abilities", f"no {min(unknown)!r} (there are: {', '.join(sorted(ABILITIES))})")

    def abilities_of(self, engine: str) -> frozenset[str]:
        """The abilities of one kind of engine on this server."""
        named = {one.removeprefix(f"{engine}:") for one in self.abilities}
        return frozenset(named & ABILITIES)

    def shares(self, model: Model) -> bool:
        """Return whether instances of a model read their weights in pages that they share (Gpu.shared)."""
        return "share" in self.abilities_of(model.engine) and (
            model.weights_shared or model.engine not in SHARE_WHEN_ASKED
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """One served model and its engine's costs by kind of GPU, which are those of the whole tensor group if it has one.

    Starts differ. Where they were measured, the n-th start of the model takes the n-th of `starts`, the n-th swap the
    n-th of `wakes`, and the n-th `pace` has the factors on the times of the n-th request's prompt and later tokens;
    each list repeats from its beginning. Without these lists all starts take `start`, and requests as long as `costs`
    say.
    """

    model: Model
    costs: dict[str, StepCosts]
    kv_bytes_per_token: int
    start: StartSeconds = StartSeconds()
    starts: tuple[StartSeconds, ...] = ()
    wakes: tuple[StartSeconds, ...] = ()
    pace: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNames:
    """The name of one policy per kind, as in `GLOWPLUG_POLICY_<KIND>`."""

    routing: str = "least_loaded"
    fairness: str = "fifo"
    prediction: str = "none"
    placement: str = "first_fit"
    scaling: str = "reactive"
    prewarming: str = "none"
    eviction: str = "lru"
    caching: str = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The controllers' parameters, and the periods of the shells. By default agents check no health and report only
    changes; a setup in which nodes break needs `watchful`."""

    router: RouterParams = field(default_factory=RouterParams)
    autoscaler: AutoscalerParams = field(default_factory=lambda: AutoscalerParams(rest_s=30.0))
    placer: PlacerParams = field(default_factory=lambda: PlacerParams(settle_s=0.0, node_lease_s=math.inf))
    predictor: PredictorParams = field(default_factory=PredictorParams)
    agent: AgentParams = field(default_factory=lambda: QUIET_AGENT)
    router_tick_s: float = 0.25
    load_every_s: float = 0.5  # longest time between two load reports of the router
    load_soonest_s: float = 0.2  # shortest time between two load reports
    tick_s: float = 0.5
    agent_tick_s: float = 0.5
    idle_tick_s: float = 30.0  # of a node where nothing starts, drains or moves
    resync_s: float = math.inf  # between two readings of the tables; calm delivery needs none
    heal_s: float = math.inf  # after which a prefetcher helps an instance whose command was lost
    bus_s: float = 0.001  # publish to handler
    network_s: float = 0.0005  # router to engine, one way
    load_slowdown: float = 1.02  # factor on steps on a GPU during a background load
    share_compute: bool = True  # engines that are busy on one GPU share its time evenly
    reserve_compute: bool = True  # a low-memory stage has 1/s of its GPU (HydraServe Eq. 2); else it shares
    exact_lengths: bool = False  # routers know the length of each response
    chunk_tokens: int = 0  # of prompts that engines read in one step, in which they decode too; 0: whole prompts
    long_prefill_tokens: int = 0  # ... of one prompt, while other requests are there; 0: no limit
    block_tokens: int = 0  # of prompts, in a block that engines keep in their cache; 0: they keep none
    stepping: bool = False  # engines visit every step (slow; the same results)

    def __post_init__(self) -> None:
        periods = ("router_tick_s", "load_every_s", "load_soonest_s", "tick_s", "agent_tick_s", "idle_tick_s")
        check_bounds(self, above_0=periods, load_slowdown=1)


def watchful() -> Params:
    """Params for runs in which a node may fall silent: nodes send heartbeats and are given up when their lease ends."""
    return Params(
        placer=PlacerParams(settle_s=0.0),
        agent=replace(QUIET_AGENT, beat_s=AgentParams().beat_s),
        idle_tick_s=AgentParams().beat_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault, `at_s` into the traffic. It breaks a node, or one engine on it (the oldest that serves `model`), or
    makes the node's next consolidation of a stage fail, or hang until it is abandoned. Raises ValueError for any other
    `kind`."""

    at_s: float
    node_id: str
    model: str = ""  # "": the whole node; of a consolidation: any model's
    kind: str = "death"  # or "consolidation", "hang"

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.kind not in FAULTS:
            raise OutOfBounds("kind", f"{self.kind!r} is none of {', '.join(FAULTS)}")

    @property
    def breaks_node(self) -> bool:
        """Return whether the fault breaks a whole node."""
        return self.kind == "death" and not self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A whole fleet. Raises ValueError when two models share a key, or when it has no model, no server or no costs."""

    servers: tuple[ServerSetup, ...]
    models: tuple[ModelSetup, ...]
    policies: PolicyNames = PolicyNames()
    params: Params = field(default_factory=Params)
    faults: tuple[Fault, ...] = ()
    tenants: tuple[Tenant, ...] = ()  # those that its arrivals name
    history: Mapping[str, Sequence[WindowTotals]] = field(default_factory=dict)  # model_key -> windows before the run
    began_at: float = 1_700_006_400.0  # epoch seconds of the trace's 0: a midnight, at which windows and days begin

    def __post_init__(self) -> None:
        keys = [m.model.key for m in self.models]
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"models: {len(keys)} of them with {len(set(keys))} keys")
        if not self.servers:
            raise ValueError("servers: there is none")
        for one in self.models:
            missing = sorted({s.gpu_kind for s in self.servers} - one.costs.keys())
            if missing:
                raise ValueError(f"models: {one.model.key} has no costs on {missing[0]}")
