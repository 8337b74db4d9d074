"""The setup of a simulation: servers, models, policies, machine constants. Seconds and bytes.

Defaults are those of section 7 of the calibration on which the figures rest: PCIe 32 GB/s, a network card of 16 Gbit/s,
and the engine start stages of `StartSeconds`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from glowplug.controllers.agent.messages import AgentParams
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.predictor.params import PredictorParams
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.access import Tenant
from glowplug.domain.bounds import Bounded, Bounds, Count, OutOfBounds, Positive, check_bounds
from glowplug.domain.model import Model
from glowplug.policies.prediction.port import WindowTotals
from glowplug_lab.simulator.costs import StepCosts

GB = 10**9
GIB = 2**30
MAX_GPUS: Final = 100_000
FAULTS: Final = ("death", "consolidation", "hang")
ABILITIES: Final = frozenset({"adapters", "prewarm", "share", "stages", "swap"})
SHARE_WHEN_ASKED: Final = frozenset({"vllm"})  # "share" only for weights_shared models
QUIET_AGENT: Final = AgentParams(beat_s=4.0, health_every_s=math.inf, drain_quiet_s=0.3, stop_grace_s=5.0)
PLACER: Final = PlacerParams(settle_s=0.0, sleeper_patience=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSeconds(Bounded):
    """Times of an engine's start, sleep and growth besides moving weights. `launch_s`: process and context (container
    and CUDA context in HydraServe); `warmup_s`: graphs and first token.

    `overlap` (HydraServe section 5): weights are fetched during launch and loaded as they arrive, so only the last
    chunk remains after the fetch (Eq. 5); otherwise stages are sequential, fetch included. Swap-ins of SwapServeLLM:
    5.3 s and 13.5 GB/s for vLLM, 0.23 s and 7 GB/s of all resident bytes for Ollama.
    """

    launch_s: float = 0.5
    library_s: float = 0.0  # imports; with `overlap` during the load, else before it
    warmup_s: float = 0.1
    first_s: float = 0.0  # of the first prefill, with cold caches
    stop_s: float = 0.1
    overlap: bool = True
    chunk_bytes: Count = 16_000_000
    tail_s: float = 0.0  # of the load after the last chunk, with `overlap`
    load_bytes_per_s: float = math.inf  # over all GPUs; inf: bounded by lanes
    replica_s: float = 0.0  # placed in a pooled process (WarmServe section 6)
    activate_s: float = 0.0  # replica to engine
    page_map_s: float = 0.0  # per KV page: 1.5e-6, or 193e-6 when created
    page_bytes: Count = 2_097_152
    stream_layers: bool = True  # first prefill before the last layers (WarmServe section 4)
    num_layers: Count = 32
    sleep_s: float = 0.1
    swap_base_s: float = 5.3
    swap_bytes_per_s: Positive = 13.5e9
    swap_resident: bool = False  # swap in all resident bytes
    hop_s: float = 0.001  # between pipeline stages (t_n)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    name: str = "server"
    num_servers: Count = 1
    num_gpus: Count = 8
    gpu_bytes: Count = 80 * GB
    gpu_kind: str = "h800"  # key of `StepCosts`
    network_bytes_per_s: Positive = 2e9
    pcie_bytes_per_s: Positive = 32e9
    host_cache_bytes: int = 1024 * GB
    disk_cache_bytes: int = 0  # for copies of weights; 0: none
    disk_bytes_per_s: Positive = 2e9  # shared by reads and writes
    weights_in_host: bool = False  # from the start
    abilities: frozenset[str] = frozenset()  # from ABILITIES; "vllm:swap": for that engine
    start_cores: float = 0.0  # concurrent starts without slowdown; 0: unlimited

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.num_servers * self.num_gpus > MAX_GPUS:
            raise OutOfBounds("num_gpus", f"{self.num_servers} x {self.num_gpus} GPUs are more than {MAX_GPUS}")
        if unknown := {one for one in self.abilities if one.rpartition(":")[2] not in ABILITIES}:
            raise OutOfBounds("abilities", f"no {min(unknown)!r} (there are: {', '.join(sorted(ABILITIES))})")

    def abilities_of(self, engine: str) -> frozenset[str]:
        named = {one.removeprefix(f"{engine}:") for one in self.abilities}
        return frozenset(named & ABILITIES)

    def shares(self, model: Model) -> bool:
        """Whether instances share weight pages (Gpu.shared)."""
        return "share" in self.abilities_of(model.engine) and (
            model.weights_shared or model.engine not in SHARE_WHEN_ASKED
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """Costs are by kind of GPU, for a whole tensor group.

    Where measured, the n-th start takes the n-th of `starts`, the n-th swap the n-th of `wakes`, and the n-th request
    the n-th factors of `pace` on prompt and later tokens; lists repeat.
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
    """As in `GLOWPLUG_POLICY_<KIND>`."""

    routing: str = "least_loaded"
    fairness: str = "fifo"
    prediction: str = "none"
    placement: str = "first_fit"
    scaling: str = "reactive"
    prewarming: str = "none"
    eviction: str = "lru"
    caching: str = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(Bounded):
    """Agents check no health and report only changes by default; breaking nodes need `watchful`."""

    router: RouterParams = field(default_factory=lambda: RouterParams(move_within_s=0.0))
    autoscaler: AutoscalerParams = field(default_factory=lambda: AutoscalerParams(rest_s=30.0))
    placer: PlacerParams = field(default_factory=lambda: replace(PLACER, node_lease_s=math.inf))
    predictor: PredictorParams = field(default_factory=PredictorParams)
    agent: AgentParams = field(default_factory=lambda: QUIET_AGENT)
    router_tick_s: Positive = 0.25
    load_every_s: Positive = 0.5  # longest gap between load reports
    load_soonest_s: Positive = 0.2  # shortest gap
    tick_s: Positive = 0.5
    agent_tick_s: Positive = 0.5
    idle_tick_s: Positive = 30.0  # of an idle node
    resync_s: float = math.inf  # rereading tables; calm delivery needs none
    heal_s: float = math.inf  # before a prefetcher helps after a lost command
    bus_s: float = 0.001  # publish to handler
    network_s: float = 0.0005  # router to engine, one way
    load_slowdown: Annotated[float, Bounds(least=1)] = 1.02  # during a background load
    share_compute: bool = True  # busy engines share a GPU's time evenly
    reserve_compute: bool = True  # a low-memory stage has 1/s of its GPU (HydraServe Eq. 2), or shares it
    exact_lengths: bool = False  # known to routers
    chunk_tokens: int = 0  # prompt tokens per step with decoding; 0: whole prompts
    long_prefill_tokens: int = 0  # per prompt, beside others; 0: no limit
    block_tokens: int = 0  # per block of the prefix cache; 0: none
    stepping: bool = False  # visit every step (slow; same results)


def watchful() -> Params:
    """Nodes send heartbeats and are given up when their lease ends."""
    return Params(
        placer=PLACER,
        agent=replace(QUIET_AGENT, beat_s=AgentParams().beat_s),
        idle_tick_s=AgentParams().beat_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """At `at_s` into the traffic, break a node or one engine (the oldest of `model`), or make the node's next
    consolidation fail, or hang until abandoned. Raises ValueError for any other `kind`."""

    at_s: float
    node_id: str
    model: str = ""  # "": whole node; of a consolidation: any
    kind: str = "death"

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.kind not in FAULTS:
            raise OutOfBounds("kind", f"{self.kind!r} is not one of {', '.join(FAULTS)}")

    @property
    def breaks_node(self) -> bool:
        return self.kind == "death" and not self.model


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A fleet. Raises ValueError for duplicate keys, or without models, servers or costs."""

    servers: tuple[ServerSetup, ...]
    models: tuple[ModelSetup, ...]
    policies: PolicyNames = PolicyNames()
    params: Params = field(default_factory=Params)
    faults: tuple[Fault, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    history: Mapping[str, Sequence[WindowTotals]] = field(default_factory=dict)  # by model_key, before the run
    began_at: float = 1_700_006_400.0  # epoch seconds of the trace's 0: a midnight

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
