"""Settings of an agent."""

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from glowplug.controllers.agent.params import AgentParams
from glowplug.domain.address import PortRange, host_and_port, reachable
from glowplug.domain.units import parse_bytes
from glowplug.engines.port import EngineSettings
from glowplug.runtime.settings import NodeId, ServiceSettings, advanced


class AgentSettings(ServiceSettings):
    """`gpu_budgets`: "1GiB,1GiB" gives the node two GPUs of host memory. Times are seconds."""

    node_id: NodeId = Field("", pattern=r"^[a-z0-9][a-z0-9-]*$|^$", max_length=64)  # a dot becomes a dash
    agent_url: str = advanced("")  # how others reach this agent; empty: its own address
    prefetcher_url: str = ""
    gpu_kind: Literal["host", "cuda", "auto", "emulated"] = "host"  # host: GPUs of host memory
    gpu_budgets: str = "1GiB"  # of each GPU, comma-separated
    host_cache_bytes: int = Field(8 << 30, ge=0)  # the same as the prefetcher's
    shm_dir: Path = Path(".glowplug/shm")
    engine_ports: str = ""  # first-last, ports that engines listen on; empty: any free one
    stage_ports: str = "29400-29999"  # first-last, ports by which the stages of a pipeline meet
    engines: str = ""  # comma-separated, may start here; empty: every one that can
    warm_engines: str = ""  # comma-separated, prepared at start (vLLM: 15 s of CPU, 630 MB); empty: all
    vllm_python: str = ""  # interpreter of the environment that has vLLM; empty: GLOWPLUG_VLLM_ENV's
    servers: str = ""  # TOML file of the servers that `engine: command` may start
    llamacpp_parked: bool = advanced(True)  # start engines as forks of a parked process (20 MB)
    emulated_time_scale: float = advanced(1.0, gt=0)
    emulated_streams: bool = advanced(False)  # emulated engines load weights while they arrive
    stream_weights: bool = advanced(True)  # engines that can load weights while they arrive
    engines_on_stop: Literal["stop", "leave"] = "stop"  # what a stopping agent does with its engines

    tick_s: float = advanced(0.05, gt=0)
    drain_s: float = advanced(5.0, ge=0)
    beat_s: float = advanced(1.0, gt=0)
    start_deadline_s: float = advanced(180.0, gt=0)
    sleep_deadline_s: float = advanced(30.0, gt=0)  # an engine that is not asleep by then is stopped
    wake_deadline_s: float = advanced(30.0, gt=0)  # a start from what lies dormant is given up by then, and begins anew
    consolidate_deadline_s: float = advanced(600.0, gt=0)  # a stage is whole by then; its answers have as long to end
    drain_quiet_s: float = advanced(0.05, ge=0)  # routers learn of a drain meanwhile; engines that refuse need none
    stop_grace_s: float = advanced(3.0, ge=0)
    health_every_s: float = advanced(1.0, gt=0)
    health_timeout_s: float = advanced(2.0, gt=0)
    health_misses: int = advanced(3, ge=1)
    kv_reservation: Literal["", "paper", "literal_code"] = advanced("")  # KV cache shrinks in a drain
    swap_host_bytes: int = Field(0, ge=0)  # host memory for sleeping engines; 0: unlimited
    inventory_s: float = advanced(1.0, gt=0)
    engine_secret: str = ""  # keys of engines are made from it; routers need the same; empty: no keys
    engine_overhead_bytes: int = Field(0, ge=0)  # host memory an engine may take beyond its grant; 0: its kind's
    engine_memory_s: float = advanced(0.25, gt=0)  # how often that is checked
    launch_timeout_s: float = advanced(120.0, gt=0)
    load_timeout_s: float = advanced(600.0, gt=0)

    @field_validator("gpu_budgets")
    @classmethod
    def _are_sizes(cls, given: str) -> str:
        for part in given.split(",") if given else ():
            parse_bytes(part.strip())
        return given

    @field_validator("engine_ports", "stage_ports")
    @classmethod
    def _is_range(cls, given: str) -> str:
        PortRange.parse(given)
        return given

    def own_names(self) -> tuple[str, ...]:
        """Hosts by which others reach this process."""
        return (*super().own_names(), urlsplit(self.agent_url).hostname or "")

    @property
    def port_range(self) -> PortRange | None:
        """Ports for engines; None leaves the choice to the kernel."""
        return PortRange.parse(self.engine_ports)

    @property
    def address(self) -> str:
        """By which engines of other nodes reach those of this one."""
        return self.advertise_host or reachable(self.host)

    @property
    def stages_at(self) -> str:
        """See Node.stages_at."""
        return host_and_port(self.address, self.stage_ports) if self.stage_ports else ""

    @property
    def node(self) -> str:
        """The node's id; one machine alone is node-1."""
        return self.node_id or "node-1"

    @property
    def node_dir(self) -> Path:
        """What this agent keeps: its memory, run directories and logs of engines."""
        return self.state_dir.absolute() / self.node

    def warms(self, engine: str) -> bool:
        """Whether that engine is prepared before its first model comes. Without the setting: whatever is there."""
        return not self.warm_engines or engine in {name.strip() for name in self.warm_engines.split(",")}

    def params(self) -> AgentParams:
        return self.filled(AgentParams, reservation=self.kv_reservation)

    def engine_settings(self) -> EngineSettings:
        return self.filled(EngineSettings, servers_file=self.servers)
