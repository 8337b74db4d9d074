"""One node's engines and host memory in virtual time: what the shells of agent and prefetcher would do."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from glowplug.controllers.agent import messages as aw
from glowplug.controllers.prefetcher import messages as pw
from glowplug.domain.hardware import CachedWeights
from glowplug.domain.instance import Phase, PhaseName

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass
class Engine:
    instance_id: str
    gpu_id: str
    num_bytes: int
    serving: bool = False


@dataclass
class SimulatedNode:
    world: "World"
    node_id: str
    kinds: dict[str, aw.EngineKind] = field(
        default_factory=lambda: {"emulated": aw.EngineKind(name="emulated", emulated=True)}
    )
    memory: aw.AgentMemory | None = None
    engines: dict[str, Engine] = field(default_factory=dict)
    regions: dict[str, str] = field(default_factory=dict)  # digest -> complete | failed
    bad_digests: set[str] = field(default_factory=set)
    waiting: dict[str, aw.AwaitWeights] = field(default_factory=dict)

    def recalled(self) -> aw.Recalled:
        self.waiting.clear()
        return aw.Recalled(frozenset(self.engines))

    def found(self) -> pw.RegionsFound:
        whole = [CachedWeights(digest=d, num_bytes=10) for d, s in self.regions.items() if s == "complete"]
        return pw.RegionsFound(tuple(whole))

    def tell_agent(self, delay_s: float, stimulus: Any) -> None:
        generation = self.world.services[self.node_id]
        self.world.at(
            delay_s,
            lambda: self.world.services[self.node_id] is generation and self.world.give(self.node_id, stimulus),
        )

    def tell_prefetcher(self, delay_s: float, stimulus: Any) -> None:
        name = f"prefetcher-{self.node_id}"
        generation = self.world.services[name]
        self.world.at(delay_s, lambda: self.world.services[name] is generation and self.world.give(name, stimulus))

    def some(self, low: float, high: float) -> float:
        return self.world.random.uniform(low, high)

    def execute(self, effect: Any) -> None:
        handler = getattr(self, "_" + type(effect).__name__, None)
        if handler is not None:
            handler(effect)

    # agent

    def _Remember(self, effect: aw.Remember) -> None:
        self.memory = effect.memory

    def _LaunchEngine(self, effect: aw.LaunchEngine) -> None:
        worker = effect.worker
        self.engines[effect.instance_id] = Engine(effect.instance_id, worker.gpu_id, worker.num_bytes)
        self.tell_agent(self.some(0.02, 0.2), aw.EngineLaunched(effect.instance_id))

    def _AwaitWeights(self, effect: aw.AwaitWeights) -> None:
        self.waiting[effect.instance_id] = effect
        self._poll(effect, self.world.services[self.node_id])

    def _poll(self, effect: aw.AwaitWeights, agent: Any) -> None:
        if agent is not self.world.services[self.node_id] or self.waiting.get(effect.instance_id) is not effect:
            return
        from glowplug.weights.region import region_digest

        state = self.regions.get(region_digest(effect.weights)) if effect.weights.uri else "complete"
        if state == "complete":
            del self.waiting[effect.instance_id]
            self.world.give(self.node_id, aw.WeightsComplete(effect.instance_id, "/blob"))
        elif state == "failed":
            del self.waiting[effect.instance_id]
            self.world.give(self.node_id, aw.WeightsFailed(effect.instance_id, "weights_corrupt", "sha256 differs"))
        elif self.world.now < effect.deadline_at:
            self.world.at(0.05, lambda: self._poll(effect, agent))

    def _LoadEngine(self, effect: aw.LoadEngine) -> None:
        took = self.some(0.1, 0.8)
        engine = self.engines.get(effect.instance_id)
        if engine is None:
            return

        def serve() -> None:
            if self.engines.get(effect.instance_id) is engine:
                engine.serving = True

        self.world.at(took, serve)
        now = self.world.now
        phase = Phase(name=PhaseName.LOAD, started_at=now, ended_at=now + took)
        self.tell_agent(took, aw.EngineReady(effect.instance_id, "http://engine", (phase,)))

    def _StopEngine(self, effect: aw.StopEngine) -> None:
        self.waiting.pop(effect.instance_id, None)

        def gone() -> None:
            if self.engines.pop(effect.instance_id, None):
                self.world.engine_died(effect.instance_id)

        delay = self.some(0.01, 0.3)
        self.world.at(delay, gone)
        self.tell_agent(delay + 0.001, aw.EngineGone(effect.instance_id))

    def kill(self, instance_id: str) -> None:
        """kill -9 of an engine."""
        del self.engines[instance_id]
        self.world.engine_died(instance_id)
        self.tell_agent(self.some(0.01, 0.5), aw.EngineExited(instance_id, "killed"))

    def _CheckHealth(self, effect: aw.CheckHealth) -> None:
        alive = effect.instance_id in self.engines
        self.tell_agent(0.01, aw.HealthSeen(effect.instance_id, ok=alive, alive=alive, reason="" if alive else "gone"))

    def _CountInFlight(self, effect: aw.CountInFlight) -> None:
        num = sum(i == effect.instance_id for i in self.world.running.values())
        self.tell_agent(0.002, aw.InFlight(effect.instance_id, num))

    # prefetcher

    def _StartFetch(self, effect: pw.StartFetch) -> None:
        self.tell_prefetcher(0.005, pw.FetchSized(effect.digest, 10))

    def _GrantRoom(self, effect: pw.GrantRoom) -> None:
        took = self.some(0.05, 1.0)
        name = f"prefetcher-{self.node_id}"
        prefetcher = self.world.services[name]

        def done() -> None:
            if self.world.services[name] is not prefetcher:
                return
            if effect.digest in self.bad_digests:
                end = pw.FetchEnded(digest=effect.digest, num_bytes=0, code="weights_corrupt", message="sha256 differs")
            else:
                self.regions[effect.digest] = "complete"
                end = pw.FetchEnded(digest=effect.digest, num_bytes=10, whole=True, seconds=took, source="file")
            self.world.give(name, end)

        self.world.at(took, done)

    def _StopFetch(self, effect: pw.StopFetch) -> None:
        self.tell_prefetcher(0.01, pw.FetchEnded(digest=effect.digest, num_bytes=0, code=pw.CANCELLED))

    def _UseRegion(self, effect: pw.UseRegion) -> None:
        if self.regions.get(effect.digest) != "complete":
            self.tell_prefetcher(0.001, pw.RegionLost(effect.digest, effect.want))

    def _MarkFailed(self, effect: pw.MarkFailed) -> None:
        self.regions[effect.digest] = "failed"

    def _DropRegion(self, effect: pw.DropRegion) -> None:
        self.regions.pop(effect.digest, None)
