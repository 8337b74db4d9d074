"""One server in virtual time: its links, the engines that live on it, and the two controllers it speaks for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from glowplug.controllers.agent import messages as aw
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.simulator.control_plane import ControlPlane
from glowplug.simulator.hardware.engine import Sharing, SimEngine
from glowplug.simulator.links import Link
from glowplug.simulator.run import Run
from glowplug.simulator.setup import ServerSetup


class Requests(Protocol):
    """What runs inside the engines."""

    sharing: Sharing

    def watch(self, engine: SimEngine) -> None:
        """Wake up when the engine's next boundary comes."""
        ...

    def engine_gone(self, engine: SimEngine) -> None:
        """Its process has ended: what it ran is lost."""
        ...


@dataclass(eq=False, repr=False)
class Server:
    """What those who carry out effects on one node (hardware/node.py composes them) share. `servers` are all of the
    run, by node_id, this one among them."""

    run: Run
    control: ControlPlane
    requests: Requests
    node_id: str
    server: ServerSetup
    servers: "Mapping[str, Server]"

    def __post_init__(self) -> None:
        node_id, server, self.sharing = self.node_id, self.server, self.requests.sharing
        self.engines: dict[str, SimEngine] = {}  # processes that live
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
        """An answer over the wire: never inside the question."""
        self.run.kernel.after(self.run.setup.params.network_s, self.tell_agent, stimulus)

    def tell_prefetcher(self, stimulus: Any) -> None:
        self.control.give(f"prefetcher-{self.node_id}", stimulus)

    def lanes_of(self, engine: SimEngine) -> tuple[Link, ...]:
        """The PCIe lanes of its GPUs: they carry their parts side by side."""
        return tuple(self.lanes[gpu_id] for gpu_id in engine.gpu_ids)

    def lives(self, engine: SimEngine) -> bool:
        return self.engines.get(engine.instance_id) is engine

    def find(self, instance_id: str) -> SimEngine | None:
        """An engine by its id, on whatever server."""
        found = (server.engines.get(instance_id) for server in self.servers.values())
        return next((engine for engine in found if engine is not None), None)

    def end(self, instance_id: str) -> None:
        """The process of an engine is gone, and with it what it ran."""
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
        """The process of an engine dies, and its agent sees that."""
        self.end(instance_id)
        self.tell_agent(aw.EngineExited(instance_id, reason))

    def count(self, engine: SimEngine) -> None:
        """Say to the agent what runs inside, and the KV cache it fills."""
        used = engine.kv_bytes_used(self.run.kernel.now_s)
        self.answer_agent(aw.InFlight(engine.instance_id, engine.num_in_flight, used))
