"""The settings of the local fleet, and the settings of every service, checked before the first process starts.

Precedence: command line, then environment `GLOWPLUG_*`, then default. What keeps a fleet from starting is a
FleetError: one line that names what to change."""

import importlib
import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from glowplug.runtime.settings import ServiceSettings, advanced, explain
from glowplug.runtime.supervisor.errors import WrongSetting

LOG_MAX_BYTES = 10 << 20  # of one process; one older file is kept
RESTART_MAX_S = 10.0  # longest wait between two restarts of one process
SHM_NEEDED_BYTES = 1 << 30  # where less of /dev/shm is free, weights go to the state directory
SERVICES = ("router", "autoscaler", "placer", "predictor", "prefetcher", "agent", "console")
# What each process is given by the plan, so that the environment of `glowplug up` has no say in it.
_GIVEN = {"port": 0, "data_port": 0, "service_id": "", "node_id": "node-1", "advertise_host": "", "engine_ports": ""}


class FleetSettings(BaseSettings):
    """Settings of `glowplug up`. Ports are `port_base` + a fixed offset, see plan.py; 0 looks for a free block."""

    model_config = SettingsConfigDict(env_prefix="GLOWPLUG_", extra="ignore", allow_inf_nan=False)

    state_dir: Path = Path(".glowplug")
    engine: str = "llamacpp"  # of the sample models: llamacpp, vllm or emulated
    nodes: int = Field(3, ge=1, le=64)  # with vllm: 1
    port_base: int = Field(8000, ge=0, le=65000)  # first port of the fleet; 0: a free block
    host: str = "127.0.0.1"
    nats_url: str = ""  # empty: an embedded NATS server
    redis_url: str = ""  # empty: an embedded Valkey server
    api_key: str = ""  # empty: generated, asked only where `host` is not loopback
    console_key: str = ""  # empty: the API key where that is asked
    admin_token: str = ""  # empty: generated
    engine_secret: str = ""  # empty: generated
    models_dir: Path | None = None  # empty: <state_dir>/models/<engine>, with the samples
    shm_dir: Path | None = None  # empty: /dev/shm when it has enough free, else <state_dir>/shm
    gpu_kind: Literal["host", "cuda", "auto", "emulated"] = "host"
    ready_timeout_s: float = advanced(60.0, gt=0)
    stop_grace_s: float = advanced(12.0, ge=0)  # SIGTERM to SIGKILL, per tier
    start_timeout_s: float = advanced(60.0, ge=0)  # until a silent first start is killed; 0: never
    hang_misses: int = advanced(8, ge=0)  # probes missed before a kill, 2 s apart; 0: never
    min_free_bytes: int = advanced(200 * 1024 * 1024, ge=0)  # needed in the state directory

    @field_validator("state_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @model_validator(mode="after")
    def _nodes_of_engine(self) -> "FleetSettings":
        if self.engine == "vllm" and "nodes" not in self.model_fields_set:
            self.nodes = 1
        return self

    @model_validator(mode="after")
    def _one_owner_per_device(self) -> "FleetSettings":
        if self.gpu_kind in ("cuda", "auto") and self.nodes > 1:
            raise ValueError(
                f"GLOWPLUG_GPU_KIND={self.gpu_kind}: this machine's GPUs belong to one node, use --nodes 1"
            )
        return self

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the fleet."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def check_services() -> None:
    """Raises WrongSetting naming the variable, what is wrong with it and what there is."""
    for service in SERVICES:
        # By name: the supervisor starts services and imports none of them.
        module = importlib.import_module(f"glowplug.services.{service}.settings")
        made = getattr(module, f"{service.capitalize()}Settings")
        assert issubclass(made, ServiceSettings)
        try:
            made(**{name: value for name, value in _GIVEN.items() if name in made.model_fields})
        except ValidationError as error:
            raise WrongSetting(explain(error)) from error
