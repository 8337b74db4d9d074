"""One server in virtual time: links, engines, and access to the controllers of its agent and prefetcher."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from glowplug.controllers.agent import messages as aw
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug_lab.simulator.control_plane import ControlPlane
from glowplug_lab.simulator.hardware.engine import Sharing, SimEngine
from glowplug_lab.simulator.links import Link
from glowplug_lab.simulator.run import Run
from glowplug_lab.simulator.setup import ServerSetup


class Requests(Protocol):
    sharing: Sharing

    def watch(self, engine: SimEngine) -> None: ...

    def engine_gone(self, engine: SimEngine) -> None: ...


@dataclass(eq=False, repr=False)
class Server:
    """Shared by one node's executors (composed in hardware/node.py). `servers`: all of the run, by node_id."""

    run: Run
    control: ControlPlane
    requests: Requests
    node_id: str
    server: ServerSetup
    servers: "Mapping[str, Server]"

    def __post_init__(self) -> None:
        node_id, server, self.sharing = self.node_id, self.server, self.requests.sharing
        self.engines: dict[str, SimEngine] = {}  # live processes, by instance_id
        self.is_down = False
        self.gpu_ids = tuple(f"{node_id}/{n}" for n in range(server.num_gpus))
        self.network = Link(f"{node_id}/nic", server.network_bytes_per_s)
        self.cpu = Link(f"{node_id}/cpu", server.start_cores) if server.start_cores else None
        self.lanes = {gpu_id: Link(f"{gpu_id}/pcie", server.pcie_bytes_per_s) for gpu_id in self.gpu_ids}

    @property
    def agent(self) -> AgentController:
        found: AgentController = self.control.services[self.node_id]
        return found

    @property
    def prefetcher(self) -> PrefetcherController:
        found: PrefetcherController = self.control.services[f"prefetcher-{self.node_id}"]
        return found

    def tell_agent(self, stimulus: Any) -> None:
        self.control.give(self.node_id, stimulus)

    def answer_agent(self, stimulus: Any) -> None:
        """Answer after the network's delay, so never within the agent's call."""
        self.run.kernel.after(self.run.setup.params.network_s, self.tell_agent, stimulus)

    def tell_prefetcher(self, stimulus: Any) -> None:
        self.control.give(f"prefetcher-{self.node_id}", stimulus)

    def lanes_of(self, engine: SimEngine) -> tuple[Link, ...]:
        return tuple(self.lanes[gpu_id] for gpu_id in engine.gpu_ids)

    def lives(self, engine: SimEngine) -> bool:
        return self.engines.get(engine.instance_id) is engine

    def find(self, instance_id: str) -> SimEngine | None:
        found = (server.engines.get(instance_id) for server in self.servers.values())
        return next((engine for engine in found if engine is not None), None)

    def end(self, instance_id: str) -> None:
        engine = self.engines.pop(instance_id, None)
        if engine is None:
            return
        if engine.transfer is not None:
            self.run.links.stop(engine.transfer)
            engine.transfer = None
        self.sharing.load(engine, False)
        carried = engine.carries
        self.requests.engine_gone(engine)
        if carried is not None:
            self.requests.engine_gone(carried)
            exited = aw.EngineExited(carried.instance_id, f"its stage {instance_id} is gone")
            self.servers[carried.node_id].answer_agent(exited)

    def kill(self, instance_id: str, reason: str) -> None:
        self.end(instance_id)
        self.tell_agent(aw.EngineExited(instance_id, reason))

    def count(self, engine: SimEngine) -> None:
        used = engine.kv_bytes_used(self.run.kernel.now_s)
        self.answer_agent(aw.InFlight(engine.instance_id, engine.num_in_flight, used))
