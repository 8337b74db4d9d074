"""What is simulated: servers, models, the policies in force, and the constants of the machine. Seconds and bytes.

Defaults are those of section 7 of the calibration the figures rest on: PCIe 32 GB/s, a network card of 16 Gbit/s, and
the start-up stages of an engine as `StartSeconds` lists them.
"""

from dataclasses import dataclass, field

from glowplug.controllers.agent_words import AgentParams
from glowplug.controllers.autoscaler import AutoscalerParams
from glowplug.controllers.placer import PlacerParams
from glowplug.controllers.predictor import PredictorParams
from glowplug.controllers.router import RouterParams
from glowplug.domain.model import Model
from glowplug.simulator.costs import StepCosts

GB = 10**9
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSeconds:
    """Stages of an engine's start besides moving weights. `warmup_s` follows the load (graphs, first token)."""

    launch_s: float = 0.5
    warmup_s: float = 0.1
    stop_s: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetup:
    """One kind of server, `num_servers` of it."""

    name: str = "server"
    num_servers: int = 1
    num_gpus: int = 8
    gpu_bytes: int = 80 * GB
    gpu_kind: str = "h800"  # what `StepCosts` are looked up by
    network_bytes_per_s: float = 2e9
    pcie_bytes_per_s: float = 32e9
    host_cache_bytes: int = 1024 * GB
    weights_in_host: bool = False  # every model's weights lie in host memory from the start

    def __post_init__(self) -> None:
        for name in ("num_servers", "num_gpus", "gpu_bytes", "network_bytes_per_s", "pcie_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """One served model and what its engine costs on each kind of GPU."""

    model: Model
    costs: dict[str, StepCosts]
    kv_bytes_per_token: int
    start: StartSeconds = StartSeconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNames:
    """One name per room, as in `GLOWPLUG_POLICY_<ROOM>`."""

    routing: str = "least_loaded"
    placement: str = "first_fit"
    scaling: str = "reactive"
    residency: str = "lru"


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """The controllers' own bounds, and how often the shells let time pass."""

    router: RouterParams = field(default_factory=RouterParams)
    autoscaler: AutoscalerParams = field(default_factory=AutoscalerParams)
    placer: PlacerParams = field(default_factory=lambda: PlacerParams(settle_s=0.0))
    predictor: PredictorParams = field(default_factory=PredictorParams)
    agent: AgentParams = field(default_factory=lambda: AgentParams(beat_s=4.0))
    router_tick_s: float = 0.25
    load_every_s: float = 0.5
    tick_s: float = 0.5
    agent_tick_s: float = 1.0
    bus_s: float = 0.001  # publish to handler
    network_s: float = 0.0005  # router to engine, one way


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A whole fleet. Raises ValueError when two models share a key, or there is none."""

    servers: tuple[ServerSetup, ...]
    models: tuple[ModelSetup, ...]
    policies: PolicyNames = PolicyNames()
    params: Params = field(default_factory=Params)

    def __post_init__(self) -> None:
        keys = [m.model.key for m in self.models]
        if not keys or len(set(keys)) != len(keys):
            raise ValueError(f"models: {len(keys)} of them with {len(set(keys))} keys")
        if not self.servers:
            raise ValueError("servers: there is none")
