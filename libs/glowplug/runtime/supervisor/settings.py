"""The settings of the local fleet, and the settings of every service, checked before the first process starts.

Precedence: command line, then environment `GLOWPLUG_*`, then default. Any obstacle to the start of a fleet is a
CannotStart: one line that names what to change."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from glowplug.domain.bounds import Bounds, Positive
from glowplug.domain.reading import ADVANCED
from glowplug.runtime.settings import EngineSecret, GpuKind, ServiceSettings, SharedSettings

LOG_MAX_BYTES = 10 << 20  # of one process; one older file is kept
RESTART_MAX_S = 10.0  # longest wait between two restarts of one process
STOP_MARGIN_S = 7.0  # past `drain_s`, from SIGTERM to SIGKILL: an agent ends its engines then
SHM_NEEDED_BYTES = 1 << 30  # where less of /dev/shm is free, weights go to the state directory
SERVICES = ("router", "autoscaler", "placer", "predictor", "prefetcher", "agent", "console")
# Set by the plan for each process, whatever the environment of `glowplug up`.
_GIVEN = {"port": 0, "data_port": 0, "service_id": "", "node_id": "node-1", "advertise_host": "", "engine_ports": ""}


@dataclass(kw_only=True)
class FleetSettings(EngineSecret, SharedSettings):
    """Settings of `glowplug up`. Ports are `port_base` + a fixed offset, see plan.py; 0 looks for a free block."""

    engine: str = "llamacpp"  # of the sample models: llamacpp, vllm or emulated
    nodes: Annotated[int, Bounds(least=1, most=64)] = 3  # with vllm: 1
    port_base: Annotated[int, Bounds(most=65000)] = 8000  # first port of the fleet; 0: a free block
    console_key: str = ""  # empty: the API key where that is asked
    models_dir: Path | None = None  # empty: <state_dir>/models/<engine>, with the samples
    shm_dir: Path | None = None  # empty: /dev/shm when it has enough free, else <state_dir>/shm
    gpu_kind: GpuKind = "host"
    ready_timeout_s: Annotated[Positive, ADVANCED] = 60.0
    hang_misses: Annotated[int, ADVANCED] = 8  # probes missed before a kill, 2 s apart; 0: never
    min_free_bytes: Annotated[int, ADVANCED] = 200 * 1024 * 1024  # needed in the state directory

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state_dir = self.state_dir.expanduser().absolute()
        if self.gpu_kind in ("cuda", "auto") and self.nodes > 1:
            raise ValueError(
                f"GLOWPLUG_GPU_KIND={self.gpu_kind}: this machine's GPUs belong to one node, use --nodes 1"
            )

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Self:
        return super().of({"nodes": 1, **named} if named.get("engine") == "vllm" else named)


def check_services() -> None:
    """Raises WrongSetting naming the variable, its fault and the choices."""
    for service in SERVICES:
        # By name: the supervisor starts services and imports none of them.
        module = importlib.import_module(f"glowplug.services.{service}.settings")
        made = getattr(module, f"{service.capitalize()}Settings")
        assert issubclass(made, ServiceSettings)
        names = {one.name for one in made.variables()}
        made.read(**{name: value for name, value in _GIVEN.items() if name in names})
