"""One node in virtual time: server, agent and prefetcher controllers, and their executors."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from glowplug.controllers.agent import messages as aw
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.prefetcher import messages as pw
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.domain import hardware
from glowplug.domain.hardware import Gpu
from glowplug.domain.instance import EngineFigures, Phase, PhaseName
from glowplug.fleet.start_times import ADAPTER_LOAD_S
from glowplug.memory.ledger import ByteLedger
from glowplug.policies.placement.expect import STREAMS
from glowplug_lab.simulator.hardware.disk import Disk
from glowplug_lab.simulator.hardware.engine import Origin, SimEngine
from glowplug_lab.simulator.hardware.fetching import Fetching
from glowplug_lab.simulator.hardware.server import Server
from glowplug_lab.simulator.hardware.starting import Starting
from glowplug_lab.simulator.links import Link
from glowplug_lab.simulator.run import digest_of
from glowplug_lab.simulator.setup import ServerSetup, Setup

# LoRA adapters take `ADAPTER_LOAD_S` and their bytes to load over PCIe, and `STEP_S` per step: Punica (Chen et al.
# 2023, arXiv 2310.18547, abstract) serves many of one model in one batch "while only adding 2ms latency per token";
# S-LoRA (Sheng et al. 2023, arXiv 2311.03285) finds throughput nearly independent of their number. Their slots' bytes
# are kept out of the KV cache.

STEP_S: Final = 0.002


class Adapters:
    def __init__(self, node: Server, fetching: Fetching, starting: Starting) -> None:
        self.node, self.run, self._fetching, self._starting = node, node.run, fetching, starting
        self._coming: dict[str, SimEngine] = {}
        self.handlers: dict[type, Callable[[Any], None]] = {
            aw.AwaitWeights: self._await,
            aw.LoadAdapter: self._load,
            aw.UnloadAdapter: self._unload,
            aw.CountInFlight: self._count,
        }

    def _await(self, effect: aw.AwaitWeights) -> None:
        command = effect.command
        if not command.host_id:
            self._starting.handlers[aw.AwaitWeights](effect)
            return
        model, weights = self.run.models[command.model.key], command.model.weights
        now_s = self.run.kernel.now_s
        adapter = SimEngine(command.instance_id, self.node.node_id, model, (), 0, now_s)
        self._coming[command.instance_id] = adapter
        adapter.found = self._fetching.found(adapter, weights)
        if self._fetching.has_all(weights):
            self._fetched(adapter)
        else:
            self._fetching.wait(adapter, weights, self._fetched)

    def _fetched(self, adapter: SimEngine) -> None:
        digest = adapter.model.model.weights.uri
        self.node.answer_agent(aw.WeightsComplete(adapter.instance_id, digest, adapter.found))

    def _load(self, effect: aw.LoadAdapter) -> None:
        host_id = effect.command.host_id
        host, model = self.node.engines.get(host_id), self.run.models[effect.command.model.key]
        if host is None or host.serving is None:
            failed = aw.EngineStartFailed(effect.instance_id, "engine_failed", f"{host_id} is gone")
            self.node.answer_agent(failed)
            return
        adapter = self._coming.get(effect.instance_id)
        if adapter is None:
            adapter = self._coming[effect.instance_id] = SimEngine(
                effect.instance_id, self.node.node_id, model, (), 0, self.run.kernel.now_s
            )
        adapter.load_began_at = self.run.kernel.now_s
        per_lane = -(-model.model.weights_bytes // len(host.gpu_ids))

        def moved() -> None:
            self.run.kernel.after(ADAPTER_LOAD_S, self._loaded, adapter, host)

        name = f"load adapter {effect.instance_id}"
        adapter.transfer = self.run.links.start(name, per_lane, self.node.lanes_of(host), moved)

    def _loaded(self, adapter: SimEngine, host: SimEngine) -> None:
        if self._coming.get(adapter.instance_id) is not adapter:
            return
        del self._coming[adapter.instance_id]
        serving, now_s = host.serving, self.run.kernel.now_s
        if serving is None or not self.node.lives(host):
            gone = aw.EngineStartFailed(adapter.instance_id, "engine_failed", f"{host.instance_id} is gone")
            self.node.tell_agent(gone)
            return
        host.adapters[adapter.instance_id] = adapter.model.model.key
        self._reshape(host)
        load = Phase(name=PhaseName.LOAD, started_at=adapter.load_began_at, ended_at=now_s)
        url, step_s = f"sim://{host.instance_id}", serving.costs.decode_s(1, 0)
        figures = EngineFigures(num_slots=host.num_slots, kv_tokens=host.kv_tokens, step_s=step_s)
        self.node.tell_agent(aw.EngineReady(adapter.instance_id, url, (load,), figures=figures))

    def _reshape(self, host: SimEngine) -> None:
        if host.serving is None:
            return
        costs = host.model.costs[self.node.server.gpu_kind]
        if host.adapters:
            base_s = costs.prefill_base_s + STEP_S, costs.decode_base_s + STEP_S
            costs = replace(costs, prefill_base_s=base_s[0], decode_base_s=base_s[1])
        host.serving.reshape(costs, host.serving.limits, self.run.kernel.now_s)
        self.node.requests.watch(host)

    def _unload(self, effect: aw.UnloadAdapter) -> None:
        self._fetching.forget(effect.instance_id)
        adapter = self._coming.pop(effect.instance_id, None)
        if adapter is not None and adapter.transfer is not None:
            self.run.links.stop(adapter.transfer)
        host = self.node.engines.get(effect.command.host_id)
        if host is not None and host.adapters.pop(effect.instance_id, None) is not None and not host.adapters:
            self._reshape(host)
        self.node.answer_agent(aw.EngineGone(effect.instance_id))

    def _count(self, effect: aw.CountInFlight) -> None:
        if effect.adapter is None:
            self._starting.handlers[aw.CountInFlight](effect)
            return
        host, key = self.node.engines.get(effect.adapter.host_id), effect.adapter.model.key
        num = sum(request.arrival.model == key for request in host.tickets.values()) if host is not None else 0
        self.node.answer_agent(aw.InFlight(effect.instance_id, num))


# Replicas and sleepers. WarmServe sections 4 and 6: missing weights continue in the foreground, and the first prefill
# begins once each layer will arrive in time: k is "the smallest such that for every later layer the load time so far is
# at most the compute time so far" (erratum E7), so with L equal layers at most (L-1)/L x prefill x bandwidth bytes are
# missing, for the shortest prefill. A replica has all layers (as in the published code) or the first k
# (`warmserve:first_layers=true`). SwapServeLLM section 4: a swap-in takes a fixed time, then moves bytes at its own
# rate over the same PCIe lanes.


class Dormancy:
    def __init__(self, node: Server, fetching: Fetching, starting: Starting) -> None:
        self.node, self.run, self._fetching, self._starting = node, node.run, fetching, starting
        self.handlers: dict[type, Any] = {
            aw.ActivateEngine: self._activate,
            aw.SleepEngine: self._sleep,
            aw.LimitKv: self._limit,
        }

    def _activate(self, effect: aw.ActivateEngine) -> None:
        node, now_s, command = self.node, self.run.kernel.now_s, effect.command
        engine = node.engines.pop(command.source, None)
        if engine is None:
            gone = aw.EngineStartFailed(effect.instance_id, "engine_failed", f"{command.source} is gone")
            node.answer_agent(gone)
            return
        self._fetching.rename(engine, effect.instance_id)
        engine.instance_id = effect.instance_id
        mine = [w for w in command.workers if w.node_id == node.node_id]
        engine.num_bytes = sum(w.num_bytes for w in mine)
        engine.gpu_ids = tuple(w.gpu_id for w in mine)  # may differ for a sleeper
        engine.stage_gpus = (engine.gpu_ids,)
        node.engines[effect.instance_id] = engine
        engine.is_replica, engine.is_activating = False, True
        start, model = engine.start, command.model
        if engine.is_swapped:
            self.run.results.starts[Origin.SWAPPED] += 1
            self.run.kernel.after(start.swap_base_s, self._swap_in, engine, now_s)
            return
        self.run.results.starts[Origin.PREWARMED if engine.loaded_at >= 0 else Origin.PREWARMING] += 1
        if engine.transfer is not None:
            self.node.sharing.load(engine, False)
            self.run.links.hurry(engine.transfer, 0)
        elif engine.loaded_at >= 0:
            self._starting.load_rest(engine)
        num_pages = math.ceil(model.kv_bytes / len(engine.gpu_ids) / start.page_bytes)
        self.run.kernel.after(start.activate_s + num_pages * start.page_map_s, self._try, engine, now_s)

    def _try(self, engine: SimEngine, since_s: float) -> None:
        if not self.node.lives(engine):
            return
        now_s, start = self.run.kernel.now_s, engine.start
        left = self._left(engine)
        if left > 0:
            rate = engine.transfer.rate if engine.transfer is not None else 0.0
            share = (start.num_layers - 1) / start.num_layers if start.stream_layers else 0.0
            shortest_s = engine.model.costs[self.node.server.gpu_kind].prefill_s(1, 1)
            late = left - share * shortest_s * rate
            if rate <= 0 or late > 1.0:
                wait_s = late / rate if rate > 0 else 0.05  # weights not in host memory yet
                self.run.kernel.after(max(wait_s, 1e-6), self._try, engine, since_s)
                return
        engine.is_activating = False
        engine.serve(self.node.server.gpu_kind, self.run.setup.params)
        load = Phase(name=PhaseName.LOAD, started_at=since_s, ended_at=now_s)
        self.node.tell_agent(engine.ready(load))

    def _left(self, engine: SimEngine) -> float:
        if engine.loaded_at >= 0:
            return 0.0
        if engine.transfer is None:
            return float(engine.load_bytes)
        return engine.transfer.left_at(self.run.kernel.now_s) + engine.rest_bytes

    def _swap_in(self, engine: SimEngine, since_s: float) -> None:
        if not self.node.lives(engine):
            return
        start = engine.start
        num_bytes = self._swap_bytes(engine)
        own = Link(f"{engine.instance_id}/swap", start.swap_bytes_per_s / len(engine.gpu_ids))
        self.run.results.bytes_swapped += num_bytes
        engine.transfer = self.run.links.start(
            f"swap in {engine.instance_id}",
            num_bytes / len(engine.gpu_ids),
            (*self.node.lanes_of(engine), own),
            lambda: self._swapped_in(engine, since_s),
        )

    def _swapped_in(self, engine: SimEngine, since_s: float) -> None:
        engine.transfer, engine.is_swapped = None, False
        engine.loaded_at = self.run.kernel.now_s
        self._try(engine, since_s)

    def _swap_bytes(self, engine: SimEngine) -> int:
        model = engine.model.model
        return model.memory_bytes if engine.start.swap_resident else model.weights_bytes

    def _sleep(self, effect: aw.SleepEngine) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is None:
            self.node.answer_agent(aw.SleepFailed(effect.instance_id, "its engine is gone"))
            return
        now_s = self.run.kernel.now_s
        start = engine.start = self.run.wake_of(engine.model)
        self.node.requests.engine_gone(engine)  # drained: no requests
        delay = start.sleep_s
        if effect.becomes == "swapped_out":
            engine.is_swapped = True
            num_bytes = self._swap_bytes(engine)
            self.run.results.bytes_swapped += num_bytes
            delay += num_bytes / start.swap_bytes_per_s
        else:
            engine.is_replica = True
            engine.loaded_at = now_s if engine.loaded_at < 0 else engine.loaded_at
        self.run.kernel.after(delay, self._asleep, engine)

    def _asleep(self, engine: SimEngine) -> None:
        if self.node.lives(engine):
            self.node.tell_agent(aw.EngineAsleep(engine.instance_id))

    def _limit(self, effect: aw.LimitKv) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is not None and engine.serving is not None:
            kv_tokens = effect.num_bytes // engine.model.kv_bytes_per_token
            engine.serving.limit_kv(kv_tokens, self.run.kernel.now_s)
            self.node.requests.watch(engine)


# Consolidation of pipelines (HydraServe section 6): the rest of the model arrives at background priority, then the
# other stages' KV cache at a lower one, while the pipeline serves; tokens made meanwhile are not charged. For tensor
# groups only the network card is charged. After the rest has arrived, `failing` drops it and `hanging` stays silent.


class Pipelines:
    def __init__(self, node: Server, fetching: Fetching) -> None:
        self.node, self.run, self._fetching = node, node.run, fetching
        self.failing: list[str] = []  # by model, once per entry; "": any
        self.hanging: list[str] = []
        self.handlers: dict[type, Any] = {
            aw.ServeStages: self._serve,
            aw.ConsolidateEngine: self._consolidate,
            aw.AbandonConsolidation: self._abandon,
            aw.FinishStages: self._finish,
        }

    def _serve(self, effect: aw.ServeStages) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is None:
            return
        later = (self.node.find(f"{effect.instance_id}.{r}") for r in range(1, engine.num_stages))
        stages = tuple(one for one in (engine, *later) if one is not None)
        if len(stages) < engine.num_stages:
            why = f"{len(stages)} of {engine.num_stages} stages are there"
            self.node.answer_agent(aw.EngineStartFailed(effect.instance_id, "engine_failed", why))
            return
        if engine.serving is None:
            engine.serve(self.node.server.gpu_kind, self.run.setup.params, stages)
        self.node.answer_agent(engine.ready())

    def _consolidate(self, effect: aw.ConsolidateEngine) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is None or engine.num_stages == 1 or engine.transfer is not None:
            return
        model = engine.model.model
        rest = max(0, model.weights_bytes - engine.weights_bytes)
        results, node = self.run.results, self.node
        results.bytes_loaded += rest
        links = node.lanes_of(engine)
        if not self._fetching.has_all(model.weights):
            results.bytes_fetched += rest
            links = (node.network, *links) if len(links) == 1 else (node.network,)
        elif len(links) > 1:
            rest = -(-rest // len(links))
        self.node.sharing.load(engine, True)
        engine.transfer = self.run.links.start(
            f"rest of {engine.instance_id}", rest, links, lambda: self._rest_is_here(engine), priority=1
        )

    def _rest_is_here(self, engine: SimEngine) -> None:
        engine.transfer = None
        self.node.sharing.load(engine, False)
        if _struck(self.failing, engine):
            self.node.tell_agent(aw.ConsolidationFailed(engine.instance_id, "broken by a fault"))
            return
        if _struck(self.hanging, engine):
            return
        used = engine.kv_bytes_used(self.run.kernel.now_s)
        num_bytes = used * (engine.num_stages - 1) // engine.num_stages
        engine.num_migrations += 1
        self.run.results.bytes_migrated += num_bytes
        engine.transfer = self.run.links.start(
            f"KV of {engine.instance_id}", num_bytes, (self.node.network,), lambda: self._whole(engine), priority=2
        )

    def _whole(self, engine: SimEngine) -> None:
        engine.transfer = None
        self.run.results.num_consolidated += 1
        is_busy = bool(engine.tickets)
        if is_busy:
            self.node.sharing.idle(engine)
        engine.become_whole(self.node.server.gpu_kind, self.run.setup.params, self.run.kernel.now_s)
        if is_busy:
            self.node.sharing.busy(engine)
        self.node.requests.watch(engine)
        self.node.tell_agent(aw.EngineConsolidated(engine.instance_id, engine.kv_tokens))

    def _finish(self, effect: aw.FinishStages) -> None:
        """A simulated engine becomes whole in its own process, so no stage remains to end."""
        self.node.answer_agent(aw.StagesFinished(effect.instance_id))

    def _abandon(self, effect: aw.AbandonConsolidation) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is None or engine.num_stages == 1:
            return  # gone or whole; the agent knows
        if engine.transfer is not None:
            self.run.links.stop(engine.transfer)
            engine.transfer = None
        self.node.sharing.load(engine, False)
        engine.num_migrations = 0  # moved KV cache is dropped
        self.node.answer_agent(aw.ConsolidationFailed(engine.instance_id, "given up"))


def _struck(models: list[str], engine: SimEngine) -> bool:
    doomed = next((key for key in models if key in ("", engine.model.model.key)), None)
    if doomed is None:
        return False
    models.remove(doomed)
    return True


EMULATED: Final = "emulated"
UNHEEDED: Final = (aw.ReportStart, aw.ReportDrain, aw.ReportConsolidation, aw.ForgetEngine, pw.NameRegion)
"""Spans, logs and names, which a simulated node has none of."""


class SimNode(Server):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._looks = False
        self._memory: aw.AgentMemory | None = None  # last saved
        self._links = (
            hardware.Link(link_id=self.network.name, bytes_per_s=self.network.bytes_per_s),
            hardware.Link(link_id=f"{self.node_id}/pcie", bytes_per_s=self.server.pcie_bytes_per_s),
        )
        self.disk = Disk(self, self.look_around)
        self.fetching = Fetching(self, self.disk, self.look_around)
        self.starting = Starting(self, self.fetching)
        self.adapters = Adapters(self, self.fetching, self.starting)
        self.dormancy = Dormancy(self, self.fetching, self.starting)
        self.pipelines = Pipelines(self, self.fetching)
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            **dict.fromkeys(UNHEEDED, lambda effect: None),
            aw.Remember: self._remember,
            **self.fetching.handlers,
            **self.disk.handlers,
            **self.starting.handlers,
            **self.adapters.handlers,
            **self.dormancy.handlers,
            **self.pipelines.handlers,
        }
        self.executes = self._handlers.keys()
        self.control.add_node(self.node_id, self._make_agent, self._make_prefetcher, self)

    def _make_agent(self, epoch: int) -> AgentController:
        names = sorted({one.model.engine for one in self.run.setup.models})
        abilities = {name: self.server.abilities_of(name) | self._streams(name) for name in names}
        kinds = {name: aw.EngineKind(name=name, emulated=True, abilities=abilities[name]) for name in names}
        gpus = [Gpu(gpu_id=gpu_id, total_bytes=self.server.gpu_bytes, kind=EMULATED) for gpu_id in self.gpu_ids]
        return AgentController(
            self.node_id,
            ByteLedger(gpus),
            kinds,
            agent_url=f"sim://{self.node_id}",
            params=self.run.setup.params.agent,
            memory=self._memory,
        )

    def _make_prefetcher(self, epoch: int) -> PrefetcherController:
        params = prefetcher_params(self.run.setup, self.server)
        return PrefetcherController(self.node_id, params, digest_of=digest_of)

    def _streams(self, engine: str) -> frozenset[str]:
        """Stream weights while fetching if all of the engine's models do (`StartSeconds.overlap`)."""
        mine = (one.start.overlap for one in self.run.setup.models if one.model.engine == engine)
        return frozenset({STREAMS}) if all(mine) else frozenset()

    def start(self) -> None:
        self.tell_agent(aw.Recalled(frozenset()))
        if self.server.weights_in_host:
            for one in self.run.setup.models:
                self.fetching.keep(digest_of(one.model.weights), one.model.weights.num_bytes)
        self._find_weights()
        self.look_around()

    def _find_weights(self) -> None:
        regions, copies = tuple(self.fetching.regions.values()), tuple(self.disk.copies.values())
        self.tell_prefetcher(pw.RegionsFound(regions, on_disk=copies))

    def restarted(self, name: str) -> None:
        """Engines survived; fetches ended with their process."""
        if name == self.node_id:
            self.fetching.wait_for_none()
            self.tell_agent(aw.Recalled(frozenset(self.engines)))
        else:
            self.fetching.stop_all()
            self.disk.stop_all()
            self._find_weights()
        self.look_around()

    def look_around(self) -> None:
        if not self._looks:
            self._looks = True
            self.run.kernel.after(0.0, self._look)

    def _look(self) -> None:
        self._looks = False
        cached = tuple(self.fetching.regions.values())
        disk = self.prefetcher.disk
        around = aw.Surroundings(
            cached, self.server.host_cache_bytes, self._links, on_disk=disk.whole, disk_bytes_per_s=disk.bytes_per_s
        )
        self.tell_agent(around)

    def execute(self, effect: Any) -> None:
        self._handlers[type(effect)](effect)

    def _remember(self, effect: aw.Remember) -> None:
        self._memory = effect.memory


def prefetcher_params(setup: Setup, server: ServerSetup) -> PrefetcherParams:
    return PrefetcherParams(
        capacity_bytes=server.host_cache_bytes,
        caching=setup.policies.caching,
        heal_s=setup.params.heal_s,
        disk_bytes=server.disk_cache_bytes,
    )
