"""One server in virtual time: its GPUs, host memory and links, and what its agent and prefetcher ask for."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from glowplug.controllers import agent_words as aw
from glowplug.controllers import prefetcher_words as pw
from glowplug.controllers.agent import AgentController
from glowplug.domain.hardware import CachedWeights, Gpu
from glowplug.domain.instance import Phase, PhaseName
from glowplug.domain.model import WeightsRef
from glowplug.memory.ledger import ByteLedger
from glowplug.simulator.batching import BatchEngine, EngineLimits
from glowplug.simulator.fleet import make_prefetcher
from glowplug.simulator.kernel import Timer
from glowplug.simulator.links import Link, Transfer
from glowplug.simulator.setup import ModelSetup, ServerSetup

if TYPE_CHECKING:
    from glowplug.simulator.world import World

EMULATED = "emulated"


def digest_of(weights: WeightsRef) -> str:
    """The region of a set of weights."""
    return weights.uri


@dataclass(slots=True, eq=False)
class SimEngine:
    """One engine process: launched, then loaded, then serving."""

    instance_id: str
    model: ModelSetup
    gpu_id: str
    num_bytes: int
    launched_at: float
    serving: BatchEngine | None = None
    transfer: Transfer | None = None
    wake: Timer | None = None
    tickets: dict[int, Any] = field(default_factory=dict)


class SimNode:
    """What the shells of one node's agent and prefetcher would do."""

    def __init__(self, world: "World", node_id: str, server: ServerSetup) -> None:
        self.world, self.node_id, self.server = world, node_id, server
        gpus = [
            Gpu(gpu_id=f"{node_id}/{n}", total_bytes=server.gpu_bytes, kind=EMULATED) for n in range(server.num_gpus)
        ]
        self.network = Link(f"{node_id}/nic", server.network_bytes_per_s)
        self.lanes = {gpu.gpu_id: Link(f"{gpu.gpu_id}/pcie", server.pcie_bytes_per_s) for gpu in gpus}
        self.engines: dict[str, SimEngine] = {}
        self.regions: set[str] = set()
        self._waiting: dict[str, str] = {}  # instance_id -> digest
        self._fetches: dict[str, tuple[pw.StartFetch, Transfer | None]] = {}
        kinds = {EMULATED: aw.EngineKind(name=EMULATED, emulated=True)}
        self.agent = AgentController(
            node_id, ByteLedger(gpus), kinds, agent_url=f"sim://{node_id}", params=world.setup.params.agent
        )
        caching = world.setup.policies.caching
        self.prefetcher = make_prefetcher(node_id, server.host_cache_bytes, caching, digest_of)
        world.fleet.add_node(node_id, self.agent, self.prefetcher, self)

    def start(self) -> None:
        """What the two find when they come up."""
        self._agent(aw.Recalled(frozenset()))
        there: list[CachedWeights] = []
        if self.server.weights_in_host:
            for one in self.world.setup.models:
                digest = digest_of(one.model.weights)
                if digest not in self.regions:
                    self.regions.add(digest)
                    there.append(CachedWeights(digest=digest, num_bytes=one.model.weights.num_bytes))
        self._prefetcher(pw.RegionsFound(tuple(there)))
        self._agent(aw.Surroundings(host_cache_bytes=self.server.host_cache_bytes))

    def execute(self, effect: Any) -> None:
        """One effect of either controller; what needs no hands in a simulation is passed over."""
        handler = self._HANDLERS.get(type(effect))
        if handler is not None:
            handler(self, effect)

    def _agent(self, stimulus: Any) -> None:
        self.world.fleet.give(self.node_id, stimulus)

    def _prefetcher(self, stimulus: Any) -> None:
        self.world.fleet.give(f"prefetcher-{self.node_id}", stimulus)

    # the agent's effects

    def _launch(self, effect: aw.LaunchEngine) -> None:
        model = self.world.models[effect.model.key]
        now_s = self.world.kernel.now_s
        engine = SimEngine(effect.instance_id, model, effect.worker.gpu_id, effect.worker.num_bytes, now_s)
        self.engines[effect.instance_id] = engine
        self.world.results.num_starts += 1
        self.world.kernel.after(model.start.launch_s, self._launched, engine)

    def _launched(self, engine: SimEngine) -> None:
        if self.engines.get(engine.instance_id) is engine:
            self._agent(aw.EngineLaunched(engine.instance_id))

    def _await(self, effect: aw.AwaitWeights) -> None:
        digest = digest_of(effect.weights)
        if not effect.weights.uri or digest in self.regions:
            self._agent(aw.WeightsComplete(effect.instance_id, digest, cached=True))
        else:
            self._waiting[effect.instance_id] = digest

    def _region_ready(self, digest: str) -> None:
        for instance_id in [i for i, wanted in self._waiting.items() if wanted == digest]:
            del self._waiting[instance_id]
            self._agent(aw.WeightsComplete(instance_id, digest))

    def _load(self, effect: aw.LoadEngine) -> None:
        engine = self.engines.get(effect.instance_id)
        if engine is None:
            return
        num_bytes = engine.model.model.weights_bytes
        began = self.world.kernel.now_s
        self.world.results.bytes_loaded += num_bytes
        engine.transfer = self.world.links.start(
            f"load {engine.instance_id}", num_bytes, (self.lanes[engine.gpu_id],), lambda: self._loaded(engine, began)
        )

    def _loaded(self, engine: SimEngine, began: float) -> None:
        engine.transfer = None
        self.world.kernel.after(engine.model.start.warmup_s, self._warm, engine, began, self.world.kernel.now_s)

    def _warm(self, engine: SimEngine, began: float, loaded: float) -> None:
        if self.engines.get(engine.instance_id) is not engine:
            return
        now_s = self.world.kernel.now_s
        model = engine.model.model
        limits = EngineLimits(
            kv_tokens=max(1, model.kv_bytes // engine.model.kv_bytes_per_token), max_sequences=model.max_concurrency
        )
        engine.serving = BatchEngine(engine.model.costs[self.server.gpu_kind], limits)
        phases = (
            Phase(
                name=PhaseName.LAUNCH,
                started_at=engine.launched_at,
                ended_at=engine.launched_at + engine.model.start.launch_s,
            ),
            Phase(name=PhaseName.LOAD, started_at=began, ended_at=loaded),
            Phase(name=PhaseName.WARMUP, started_at=loaded, ended_at=now_s),
        )
        self._agent(aw.EngineReady(engine.instance_id, f"sim://{engine.instance_id}", phases))

    def _stop(self, effect: aw.StopEngine) -> None:
        self._waiting.pop(effect.instance_id, None)
        engine = self.engines.get(effect.instance_id)
        delay = engine.model.start.stop_s if engine else 0.0
        self.world.kernel.after(delay, self._gone, effect.instance_id)

    def _gone(self, instance_id: str) -> None:
        engine = self.engines.pop(instance_id, None)
        if engine is not None:
            if engine.transfer is not None:
                self.world.links.stop(engine.transfer)
            self.world.traffic.engine_gone(engine)
        self._agent(aw.EngineGone(instance_id))

    def _health(self, effect: aw.CheckHealth) -> None:
        self._agent_later(aw.HealthSeen(effect.instance_id, ok=True))

    def _count(self, effect: aw.CountInFlight) -> None:
        engine = self.engines.get(effect.instance_id)
        if engine is not None:
            self._agent_later(aw.InFlight(effect.instance_id, len(engine.tickets)))

    def _agent_later(self, stimulus: Any) -> None:
        """An answer over the wire: never inside the question."""
        self.world.kernel.after(self.world.setup.params.network_s, self._agent, stimulus)

    # the prefetcher's effects

    def _fetch(self, effect: pw.StartFetch) -> None:
        self._fetches[effect.digest] = (effect, None)
        self.world.kernel.after(0.0, self._prefetcher, pw.FetchSized(effect.digest, effect.weights.num_bytes))

    def _granted(self, effect: pw.GrantRoom) -> None:
        found = self._fetches.get(effect.digest)
        if found is None:
            return
        began = self.world.kernel.now_s
        num_bytes = found[0].weights.num_bytes
        transfer = self.world.links.start(
            f"fetch {effect.digest}",
            num_bytes,
            (self.network,),
            lambda: self._fetched(effect.digest, num_bytes, began),
            priority=0 if found[0].urgency > 0 else 1,
        )
        self._fetches[effect.digest] = (found[0], transfer)

    def _fetched(self, digest: str, num_bytes: int, began: float) -> None:
        del self._fetches[digest]
        self.regions.add(digest)
        self.world.results.bytes_fetched += num_bytes
        seconds = self.world.kernel.now_s - began
        self._prefetcher(pw.FetchEnded(digest=digest, num_bytes=num_bytes, whole=True, seconds=seconds, source="sim"))
        self._region_ready(digest)

    def _stop_fetch(self, effect: pw.StopFetch) -> None:
        found = self._fetches.pop(effect.digest, None)
        if found is not None and found[1] is not None:
            self.world.links.stop(found[1])
        ended = pw.FetchEnded(digest=effect.digest, num_bytes=0, code=pw.CANCELLED)
        self.world.kernel.after(0.0, self._prefetcher, ended)

    def _use(self, effect: pw.UseRegion) -> None:
        if effect.digest not in self.regions:
            self.world.kernel.after(0.0, self._prefetcher, pw.RegionLost(effect.digest, effect.want))

    def _drop(self, effect: pw.DropRegion) -> None:
        self.regions.discard(effect.digest)
        self.world.results.num_evictions += effect.evicted

    def _mark_failed(self, effect: pw.MarkFailed) -> None:
        for instance_id in effect.instance_ids:
            if self._waiting.pop(instance_id, None) is not None:
                self._agent_later(aw.WeightsFailed(instance_id, effect.code, effect.message))

    _HANDLERS: ClassVar[dict[type, Any]] = {
        aw.LaunchEngine: _launch,
        aw.AwaitWeights: _await,
        aw.LoadEngine: _load,
        aw.StopEngine: _stop,
        aw.CheckHealth: _health,
        aw.CountInFlight: _count,
        pw.StartFetch: _fetch,
        pw.GrantRoom: _granted,
        pw.StopFetch: _stop_fetch,
        pw.UseRegion: _use,
        pw.DropRegion: _drop,
        pw.MarkFailed: _mark_failed,
    }
