"""An agent's controller checked at each step."""

from collections.abc import Iterable
from typing import Any, ClassVar, Self

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.record import State
from glowplug.controllers.effects import Effect
from glowplug.domain.hardware import Gpu
from glowplug.domain.instance import Phase, PhaseName, Worker
from glowplug.domain.model import Model
from glowplug.events.commands import StopInstance
from glowplug.events.envelope import Event
from glowplug.memory.ledger import ByteLedger
from tests.fleet_builder import MIB, a_model, a_start, an_event

NODE = "node-1"
PARAMS = msg.AgentParams(
    start_deadline_s=60,
    drain_quiet_s=0.3,
    stop_grace_s=5,
    health_every_s=1,
    health_misses=3,
    keep_gone_s=180,
    max_tick_gap_s=1000,
)


class CheckedAgent(AgentController):
    """A controller whose records, steps and bytes are checked after every stimulus. `seen`: all (state, stimulus) pairs
    so far."""

    seen: ClassVar[set[tuple[State | None, type]]] = set()

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        effects = super().handle(stimulus, now_s)
        self._check()
        return effects

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        effects = super().restore(table, rows, now_s)
        self._check()
        return effects

    def _check(self) -> None:
        self.seen.update((step.before and step.before.state, step.stimulus) for step in self.steps)
        self.validate()

    def ready(self, **fields: Any) -> Self:
        """Bring i-1 to READY."""
        self.handle(start(**fields), 10.0)
        self.handle(msg.EngineLaunched("i-1"), 10.5)
        self.handle(msg.WeightsComplete("i-1", "/w"), 12.0)
        phases = (
            Phase(name=PhaseName.LAUNCH, started_at=10.0, ended_at=10.5),
            Phase(name=PhaseName.LOAD, started_at=12.0, ended_at=13.0),
        )
        self.handle(msg.EngineReady("i-1", "http://e:1", phases), 13.0)
        return self

    def drained(self, becomes: str) -> list[Effect]:
        command = StopInstance(target=NODE, instance_id="i-1", reason="idle", becomes=becomes)
        self.handle(an_event(command, issuer="autoscaler-1", epoch=1), 20.0)
        return self.handle(msg.InFlight("i-1", 0), 21.0)


def make(
    memory: msg.AgentMemory | None = None,
    *,
    mib: int = 300,
    gpus: int = 1,
    abilities: Iterable[str] = (),
    params: msg.AgentParams = PARAMS,
    gpu_kind: str = "host",
    refuses: bool = False,
) -> CheckedAgent:
    """`abilities` are the emulated engine's; `refuses`: it refuses requests while it sleeps."""
    ledger = ByteLedger([Gpu(gpu_id=f"{NODE}/{n}", total_bytes=mib * MIB, kind=gpu_kind) for n in range(gpus)])
    engines = {
        "emulated": msg.EngineKind(
            name="emulated",
            emulated=True,
            abilities=frozenset(abilities),
            refuses=refuses,
        ),
        "vllm": msg.EngineKind(name="vllm", unavailable="no vLLM here"),
    }
    return CheckedAgent(NODE, ledger, engines, params=params, memory=memory, agent_url="http://a")


def workers(instance_id: str, *gpus: int, mib: int = 0) -> tuple[Worker, ...]:
    return tuple(
        Worker(worker_id=f"{instance_id}-{n}", node_id=NODE, gpu_id=f"{NODE}/{gpu}", num_bytes=mib * MIB, rank=n)
        for n, gpu in enumerate(gpus)
    )


def start(instance_id: str = "i-1", *, mib: int = 100, epoch: int = 1, **fields: Any) -> Event:
    model: Model = fields.pop("model", None) or a_model(mib=mib)
    worker = Worker(worker_id=f"{instance_id}-0", node_id=NODE, gpu_id=f"{NODE}/0", num_bytes=model.memory_bytes)
    command = a_start(model, instance_id, **({"workers": (worker,)} | fields))
    return an_event(command, issuer="placer-1", epoch=epoch, traceparent="tp")
