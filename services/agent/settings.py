"""Settings of an agent."""

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from glowplug.controllers.agent.params import AgentParams
from glowplug.domain.address import PortRange, host_and_port, reachable
from glowplug.domain.units import parse_bytes
from glowplug.engines.port import EngineSettings
from glowplug.runtime.settings import NodeId, ServiceSettings


class AgentSettings(ServiceSettings):
    """`gpu_budgets`: "1GiB,1GiB" gives the node two GPUs of host memory. Times are seconds."""

    node_id: NodeId = Field("", pattern=r"^[a-z0-9][a-z0-9-]*$|^$", max_length=64)  # a dot becomes a dash
    agent_url: str = ""  # how others reach this agent; empty: its own address
    prefetcher_url: str = ""
    gpu_kind: Literal["host", "cuda", "auto", "emulated"] = "host"  # host is emulated where every engine is
    gpu_budgets: str = "1GiB"
    host_cache_bytes: int = Field(8 << 30, ge=0)  # what the node's prefetcher may keep (its setting of that name)
    shm_dir: Path = Path(".glowplug/shm")
    engine_ports: str = ""  # first-last, what this agent's engines listen on; empty: any that is free
    stage_ports: str = "29400-29999"  # first-last, where stages of a pipeline whose first one is here find one another
    engines: str = ""  # comma-separated; empty: every engine that can start here
    warm_engines: str = ""  # comma-separated: what is prepared at the start (parking vLLM takes 15 s of CPU and 630 MB)
    engine_python: str = ""
    vllm_python: str = ""
    servers: str = ""  # a TOML file of servers that may be started by a command line (engine: command)
    llamacpp_parked: bool = True  # engines are forks of a process that has imported all they need (20 MB)
    vllm_parked: bool = True
    emulated_time_scale: float = Field(1.0, gt=0)
    emulated_streams: bool = False  # emulated engines load their weights while these arrive
    stream_weights: bool = True  # engines that can do so load their weights while these arrive; else afterwards
    engines_on_stop: Literal["stop", "leave"] = "stop"

    tick_s: float = Field(0.05, gt=0)
    drain_s: float = Field(5.0, ge=0)
    beat_s: float = Field(1.0, gt=0)
    start_deadline_s: float = Field(180.0, gt=0)
    sleep_deadline_s: float = Field(30.0, gt=0)  # an engine that is not asleep by then is stopped
    wake_deadline_s: float = Field(30.0, gt=0)  # a start from what lies dormant is given up by then, and begins anew
    consolidate_deadline_s: float = Field(600.0, gt=0)  # a stage is whole by then; its answers have as long to end
    drain_quiet_s: float = Field(0.05, ge=0)  # routers learn of a drain meanwhile; engines that refuse need none
    stop_grace_s: float = Field(3.0, ge=0)
    health_every_s: float = Field(1.0, gt=0)
    health_timeout_s: float = Field(2.0, gt=0)
    health_misses: int = Field(3, ge=1)
    keep_gone_s: float = Field(180.0, ge=60)  # no shorter than a command lives on the bus
    kv_reservation: Literal["", "paper", "literal_code"] = ""  # WarmServe Eq. 1: the KV cache shrinks in a drain
    swap_host_bytes: int = Field(0, ge=0)  # host memory for engines that sleep outside the GPUs; 0: unlimited
    weights_poll_s: float = Field(0.01, gt=0)
    exit_poll_s: float = Field(0.1, gt=0)  # only where the kernel cannot tell of a process's end
    inventory_s: float = Field(1.0, gt=0)
    engine_secret: str = ""  # routers' too: each engine asks for a key of its own, made from it; empty: for none
    engine_overhead_bytes: int = Field(0, ge=0)  # host memory an engine may take beside its grant; 0: what its kind may
    engine_memory_s: float = Field(0.25, gt=0)  # how often that is looked at
    launch_timeout_s: float = Field(120.0, gt=0)
    load_timeout_s: float = Field(600.0, gt=0)

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
        return AgentParams(
            beat_s=self.beat_s,
            start_deadline_s=self.start_deadline_s,
            sleep_deadline_s=self.sleep_deadline_s,
            wake_deadline_s=self.wake_deadline_s,
            consolidate_deadline_s=self.consolidate_deadline_s,
            drain_quiet_s=self.drain_quiet_s,
            stop_grace_s=self.stop_grace_s,
            health_every_s=self.health_every_s,
            health_misses=self.health_misses,
            keep_gone_s=self.keep_gone_s,
            reservation=self.kv_reservation,
            swap_host_bytes=self.swap_host_bytes,
        )

    def engine_settings(self) -> EngineSettings:
        return EngineSettings(
            python=self.engine_python,
            vllm_python=self.vllm_python,
            llamacpp_parked=self.llamacpp_parked,
            vllm_parked=self.vllm_parked,
            launch_timeout_s=self.launch_timeout_s,
            load_timeout_s=self.load_timeout_s,
            health_timeout_s=self.health_timeout_s,
            emulated_time_scale=self.emulated_time_scale,
            emulated_streams=self.emulated_streams,
            servers_file=self.servers,
        )
