"""Settings of an agent."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from glowplug.controllers.agent.params import AgentParams
from glowplug.domain.address import PortRange, host_and_port, reachable
from glowplug.domain.bounds import Checked, Positive
from glowplug.domain.reading import ADVANCED, CONSTANT
from glowplug.domain.units import parse_bytes
from glowplug.engines.port import EngineSettings
from glowplug.policies.systems import UNION
from glowplug.runtime.settings import EngineSecret, GpuKind, NodeSettings


def _are_sizes(given: str) -> None:
    for part in given.split(",") if given else ():
        parse_bytes(part.strip())


Ports = Annotated[str, Checked(PortRange.parse)]


@dataclass(kw_only=True)
class AgentSettings(EngineSecret, NodeSettings):
    """`gpu_budgets`: "1GiB,1GiB" gives the node two GPUs of host memory. Times are seconds."""

    prefetcher_url: str = ""
    gpu_kind: GpuKind = "host"  # host: GPUs of host memory
    gpu_budgets: Annotated[str, Checked(_are_sizes)] = "1GiB"  # of each GPU, comma-separated
    engine_ports: Ports = ""  # first-last, ports that engines listen on; empty: any free one
    stage_ports: Ports = "29400-29999"  # first-last, ports by which the stages of a pipeline meet
    engines: str = ""  # comma-separated, may start here; empty: every one that can
    warm_engines: str = ""  # comma-separated, prepared at start (vLLM: 15 s of CPU, 630 MB); empty: all
    stream_weights: Annotated[bool, ADVANCED] = True  # engines that can load weights while they arrive
    engines_on_stop: Literal["stop", "leave"] = "stop"  # what a stopping agent does with its engines
    engine_overhead_bytes: int = 0  # host memory an engine may take beyond its grant; 0: its kind's
    engine_memory_s: Annotated[Positive, CONSTANT] = 0.25  # how often that is checked
    inventory_s: Annotated[Positive, CONSTANT] = 1.0
    tick_s: Annotated[Positive, CONSTANT] = 0.05
    drain_s: Annotated[float, ADVANCED] = 5.0
    params: AgentParams = field(default_factory=lambda: AgentParams(**UNION.params["agent"]))
    driver: EngineSettings = field(default_factory=EngineSettings)

    @property
    def port_range(self) -> PortRange | None:
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
        return self.node_id

    @property
    def node_dir(self) -> Path:
        """The agent's own files: its state, run directories and logs of engines."""
        return self.state_dir.absolute() / self.node

    def warms(self, engine: str) -> bool:
        """Return whether that engine is prepared before its first model; without the setting every engine is."""
        return not self.warm_engines or engine in {name.strip() for name in self.warm_engines.split(",")}
