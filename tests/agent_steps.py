"""A controller checked at each step, shortcuts to its states, and its stimuli."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.record import State
from glowplug.controllers.effects import Effect, Publish
from glowplug.domain.hardware import Gpu
from glowplug.domain.instance import EngineFigures, Instance, Phase, PhaseName, Worker
from glowplug.domain.model import Model
from glowplug.events.commands import ResumeInstance, StopInstance
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
)
T = TypeVar("T")
MODEL = a_model(weights_bytes=60 * MIB, kv_bytes=180 * MIB)  # 240 of a GPU's 300
ALL = ("prewarm", "swap")
EQ1 = replace(PARAMS, reservation="paper", reservation_step_bytes=1)
WIDE = replace(MODEL, kv_bytes=160 * MIB, max_concurrency=32)  # M = 160 MiB, M/C = 5 MiB


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

    def instance(self, instance_id: str = "i-1") -> Instance:
        return self.holdings[instance_id].instance

    def used(self, gpu: int = 0) -> int:
        return self.ledger.gpus[gpu].used_bytes // MIB

    def shared(self, gpu: int = 0) -> dict[int, tuple[str, ...]]:
        return {one.num_bytes // MIB: one.holders for one in self.ledger.gpus[gpu].shared}

    def owned(self, gpu: int = 0) -> dict[tuple[str, str], int]:
        return {(g.holder, g.owner.value): g.num_bytes // MIB for g in self.ledger.gpus[gpu].all_grants}

    def halves(self, instance_id: str, now_s: float) -> list[Effect]:
        self.handle(msg.EngineLaunched(instance_id), now_s)
        return self.handle(msg.WeightsComplete(instance_id, "/w"), now_s)

    def ready(self, now_s: float = 10.0, **fields: Any) -> Self:
        """Bring i-1 to READY three seconds after `now_s`."""
        self.handle(start(**fields), now_s)
        self.handle(msg.EngineLaunched("i-1"), now_s + 0.5)
        self.handle(msg.WeightsComplete("i-1", "/w"), now_s + 2)
        phases = (
            Phase(name=PhaseName.LAUNCH, started_at=now_s, ended_at=now_s + 0.5),
            Phase(name=PhaseName.LOAD, started_at=now_s + 2, ended_at=now_s + 3),
        )
        self.handle(msg.EngineReady("i-1", "http://e:1", phases), now_s + 3)
        return self

    def stopped(self, instance_id: str = "i-1", now_s: float = 20.0) -> list[Effect]:
        """Stop without a grace period; the process exits a second later."""
        self.handle(stop(instance_id, grace_s=0), now_s)
        return self.handle(msg.EngineGone(instance_id), now_s + 1)

    def restarted(
        self, living: Iterable[str], now_s: float = 50.0, **fields: Any
    ) -> tuple["CheckedAgent", list[Effect]]:
        """(next controller after a kill, its effects). `fields` are those of `make`."""
        reborn = make(self.memory(), **fields)
        return reborn, reborn.handle(msg.Recalled(frozenset(living)), now_s)

    def loading(self, instance_id: str = "i-1", now_s: float = 10.0, **fields: Any) -> Self:
        self.handle(start_of(instance_id, **fields), now_s)
        self.halves(instance_id, now_s)
        return self

    def replica(self, instance_id: str = "r-1", now_s: float = 10.0, *, shared: int = 0, **fields: Any) -> Self:
        """Bring a replica to PREWARMED a second after `now_s`; it reports `shared` MiB as shared."""
        self.loading(instance_id, now_s, replica=True, **fields)
        self.handle(msg.EnginePrewarmed(instance_id, shares(shared)), now_s + 1)
        return self

    def serving(self, instance_id: str = "i-1", now_s: float = 10.0, *, shared: int = 0, **fields: Any) -> Self:
        """Bring an instance to READY a second after `now_s`; it reports `shared` MiB as shared."""
        self.loading(instance_id, now_s, **fields)
        self.handle(msg.EngineReady(instance_id, "http://e", figures=shares(shared)), now_s + 1)
        return self

    def drained(self, becomes: str, now_s: float = 20.0) -> list[Effect]:
        self.handle(stop(becomes=becomes), now_s)
        return self.handle(msg.InFlight("i-1", 0), now_s + 1)

    def asleep(self, becomes: str, now_s: float = 20.0, *, keeps: int = -1) -> Self:
        """Put i-1 to sleep two seconds after `now_s`; it reports `keeps` bytes as left on its GPU."""
        self.drained(becomes, now_s)
        self.handle(msg.EngineAsleep("i-1", keeps), now_s + 2)
        return self

    def draining(self) -> Self:
        self.serving(model=WIDE)
        self.handle(stop(becomes="prewarmed"), 20.0)
        return self

    def state(self, instance_id: str) -> str:
        return self.instance(instance_id).state.value


def make(
    memory: msg.AgentMemory | None = None,
    *,
    mib: int = 300,
    gpus: int = 1,
    abilities: Iterable[str] = (),
    params: msg.AgentParams = PARAMS,
    asleep_mib: int = 0,
    gpu_kind: str = "host",
    holds_layers: bool = True,
    refuses: bool = False,
    groups_lack: Iterable[str] = (),
) -> CheckedAgent:
    """`abilities` are the emulated engine's; asleep it keeps at most `asleep_mib` (0: unchecked). `refuses`: a sleeping
    engine refuses requests."""
    ledger = ByteLedger([Gpu(gpu_id=f"{NODE}/{n}", total_bytes=mib * MIB, kind=gpu_kind) for n in range(gpus)])
    engines = {
        "emulated": msg.EngineKind(
            name="emulated",
            emulated=True,
            abilities=frozenset(abilities),
            holds_layers=holds_layers,
            refuses=refuses,
            groups_lack=frozenset(groups_lack),
            asleep_bytes=asleep_mib * MIB,
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


def stop(instance_id: str = "i-1", *, grace_s: float = 30.0, epoch: int = 1, **fields: Any) -> Event:
    command = StopInstance(target=NODE, instance_id=instance_id, reason="idle", grace_s=grace_s, **fields)
    return an_event(command, issuer="autoscaler-1", epoch=epoch)


def resume(instance_id: str = "i-1") -> Event:
    return an_event(
        ResumeInstance(target=NODE, instance_id=instance_id, reason="wanted"), issuer="autoscaler-1", epoch=1
    )


def shares(mib: int) -> EngineFigures:
    return EngineFigures(shared_bytes=mib * MIB)


def of(kind: type[T], effects: list[Effect]) -> list[T]:
    return [e for e in effects if isinstance(e, kind)]


def facts(effects: list[Effect]) -> list[str]:
    return [e.payload.TYPE for e in of(Publish, effects) if e.payload.TYPE.startswith("instance.")]


def code(effects: list[Effect]) -> str:
    (only,) = [e.payload for e in of(Publish, effects) if e.payload.TYPE == "instance.failed"]
    found: str = only.code
    return found


def start_of(instance_id: str = "i-1", **fields: Any) -> Event:
    return start(instance_id, **({"model": MODEL, "workers": workers(instance_id, 0)} | fields))
