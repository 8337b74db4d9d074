"""Starts and stops of engines on one node: process, weights over PCIe, warm-up, first answer.

With `StartSeconds.overlap` stages overlap as in HydraServe section 5.2 (Eq. 5 with the last chunk, erratum E15):
imports during the load, the load during the fetch. Otherwise they follow one another.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from glowplug.controllers.agent import messages as aw
from glowplug.domain.instance import EngineFigures, Phase, PhaseName
from glowplug.fleet.start_times import StartKind
from glowplug_lab.simulator.hardware.engine import ORIGINS, SimEngine
from glowplug_lab.simulator.hardware.fetching import Fetching
from glowplug_lab.simulator.hardware.server import Server
from glowplug_lab.simulator.links import Link, Transfer
from glowplug_lab.simulator.setup import ModelSetup


class Starting:
    def __init__(self, node: Server, fetching: Fetching) -> None:
        self.node, self.run, self._fetching = node, node.run, fetching
        self.handlers: dict[type, Any] = {
            aw.LaunchEngine: self._launch,
            aw.AwaitWeights: self._await,
            aw.LoadEngine: self._load_asked,
            aw.StopEngine: self._stop,
            aw.CountInFlight: self._count,
            aw.CheckHealth: self._check,
        }

    def _launch(self, effect: aw.LaunchEngine) -> None:
        command, devices = effect.command, effect.devices
        model, now_s = self.run.models[command.model.key], self.run.kernel.now_s
        engine = SimEngine(
            command.instance_id,
            self.node.node_id,
            model,
            tuple(self.node.gpu_ids[ordinal] for ordinal in devices.ordinals),
            devices.num_bytes,
            now_s,
            is_replica=command.replica,
            shares=self.node.server.shares(command.model),
            stage=command.stage,
            num_stages=command.num_stages,
            slot_bytes=self._slot_bytes(model, command.adapter_slots),
        )
        self.node.engines[command.instance_id] = engine
        if command.replica:
            self.run.results.num_prewarms += 1
        start = engine.start = self.run.start_of(model)
        own_s = start.launch_s + (0.0 if start.overlap else start.library_s)
        self._work(engine, start.replica_s if command.replica else own_s, self._launched)

    def _slot_bytes(self, base: ModelSetup, num_slots: int) -> int:
        """As large as the base's largest deployed adapter."""
        models = (one.model for one in self.run.setup.models) if num_slots else ()
        return num_slots * max((m.weights_bytes for m in models if m.base == base.model.key), default=0)

    def _work(self, engine: SimEngine, seconds: float, then: Callable[[SimEngine], None]) -> Transfer | None:
        """Takes longer if starts exceed the node's cores."""
        if self.node.cpu is None:
            self.run.kernel.after(seconds, then, engine)
            return None
        links = (Link(f"{engine.instance_id}/core", 1.0), self.node.cpu)
        return self.run.links.start(f"start {engine.instance_id}", seconds, links, partial(then, engine))

    def _launched(self, engine: SimEngine) -> None:
        if not self.node.lives(engine):
            return
        engine.up_at = self.run.kernel.now_s
        if engine.is_activating:
            self._load_when_both(engine)
        else:
            self.node.tell_agent(aw.EngineLaunched(engine.instance_id))

    def _await(self, effect: aw.AwaitWeights) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is None:
            return
        weights = effect.command.model.weights
        engine.found = self._fetching.found(engine, weights)
        if not (engine.is_replica or engine.stage):
            self.run.results.starts[ORIGINS[engine.found]] += 1
        if engine.found is StartKind.CACHED:
            self._fetched(engine)
        else:
            self._fetching.wait(engine, weights, self._fetched)

    def _fetched(self, engine: SimEngine) -> None:
        engine.fetched_at = self.run.kernel.now_s
        if engine.is_activating:
            self._load_when_both(engine)
        else:
            digest = engine.model.model.weights.uri
            self.node.tell_agent(aw.WeightsComplete(engine.instance_id, digest, engine.found))

    def _load_when_both(self, engine: SimEngine) -> None:
        if engine.up_at >= 0 and engine.fetched_at >= 0 and engine.transfer is None and engine.loaded_at < 0:
            self.load(engine)

    def _load_asked(self, effect: aw.LoadEngine) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is not None and engine.transfer is None and engine.loaded_at < 0:
            self.load(engine)

    def load(self, engine: SimEngine) -> None:
        """Replicas load in the background."""
        now_s, start = self.run.kernel.now_s, engine.start
        left: float = engine.load_bytes
        rate = min(self.node.server.pcie_bytes_per_s, start.load_bytes_per_s / len(engine.gpu_ids))
        if engine.is_replica and engine.num_bytes:
            left = min(engine.load_bytes, -(-engine.num_bytes // len(engine.gpu_ids)))
            engine.rest_bytes = engine.load_bytes - int(left)
        mine, moved = left, engine.weights_bytes - engine.rest_bytes * len(engine.gpu_ids)
        tail_s = 0.0
        if start.overlap and engine.found is not StartKind.CACHED:
            tail_s = 0.0 if engine.is_replica else start.tail_s
            went_s = max(0.0, engine.fetched_at - engine.up_at)
            left = max(min(start.chunk_bytes, left), left - went_s * rate)
        engine.load_began_at = min(now_s, max(engine.up_at, engine.launched_at)) if left < mine else now_s
        in_background = engine.is_replica and not engine.is_activating
        results = self.run.results
        results.bytes_loaded += moved
        results.bytes_prewarmed += moved if engine.is_replica else 0
        if self.node.cpu is not None and not in_background:
            engine.transfer = self._work(engine, left / rate + tail_s, self._loaded)
            return
        engine.transfer = self.run.links.start(
            f"load {engine.instance_id}",
            left,
            self._way_in(engine),
            lambda: self._tail(engine, tail_s),
            priority=1 if in_background else 0,
        )
        self.node.sharing.load(engine, in_background)

    def _tail(self, engine: SimEngine, seconds: float) -> None:
        if seconds:
            self.run.kernel.at(self.run.kernel.now_s + seconds, self._loaded, engine)
        else:
            self._loaded(engine)

    def _way_in(self, engine: SimEngine) -> tuple[Link, ...]:
        lanes, rate = self.node.lanes_of(engine), engine.start.load_bytes_per_s / len(engine.gpu_ids)
        return lanes if math.isinf(rate) else (*lanes, Link(f"{engine.instance_id}/load", rate))

    def _loaded(self, engine: SimEngine) -> None:
        if not self.node.lives(engine):
            return
        now_s, start = self.run.kernel.now_s, engine.start
        engine.transfer, engine.loaded_at = None, now_s
        self.run.results.load_seconds += now_s - engine.load_began_at
        self.node.sharing.load(engine, False)
        if engine.is_activating or engine.serving is not None:
            self.load_rest(engine)
            return  # Dormancy polls it
        if engine.is_replica:
            figures = EngineFigures(shared_bytes=engine.shared_bytes)
            self.node.tell_agent(aw.EnginePrewarmed(engine.instance_id, figures))
            return
        imported_at = engine.up_at + start.library_s if start.overlap else now_s
        if self.node.cpu is None:
            self.run.kernel.at(max(now_s, imported_at) + start.warmup_s, self._warm, engine)
        else:
            self.run.kernel.at(max(now_s, imported_at), self._work, engine, start.warmup_s, self._warm)

    def load_rest(self, engine: SimEngine) -> None:
        if not engine.rest_bytes:
            return
        engine.load_began_at, engine.loaded_at = self.run.kernel.now_s, -1.0
        self.run.results.bytes_loaded += engine.rest_bytes * len(engine.gpu_ids)
        engine.transfer = self.run.links.start(
            f"load the rest of {engine.instance_id}",
            engine.rest_bytes,
            self._way_in(engine),
            lambda: self._loaded(engine),
        )
        engine.rest_bytes = 0

    def _warm(self, engine: SimEngine) -> None:
        if not self.node.lives(engine):
            return
        if engine.num_stages == 1:
            engine.serve(self.node.server.gpu_kind, self.run.setup.params)
        launch = Phase(name=PhaseName.LAUNCH, started_at=engine.launched_at, ended_at=engine.up_at)
        load = Phase(name=PhaseName.LOAD, started_at=engine.load_began_at, ended_at=engine.loaded_at)
        warmup = Phase(name=PhaseName.WARMUP, started_at=engine.loaded_at, ended_at=self.run.kernel.now_s)
        self.node.tell_agent(engine.ready(launch, load, warmup))

    def _stop(self, effect: aw.StopEngine) -> None:
        self._fetching.forget(effect.instance_id)
        engine = self.node.engines.get(effect.instance_id)
        delay = 0.0
        if engine is not None and engine.is_replica:
            self.node.end(effect.instance_id)  # pages are free at once
        elif engine is not None:
            delay = engine.start.stop_s
        self.run.kernel.after(delay, self._gone, effect.instance_id, engine)

    def _gone(self, instance_id: str, engine: SimEngine | None) -> None:
        if self.node.engines.get(instance_id) not in (None, engine):
            return  # already stopped, and the instance restarted
        self.node.end(instance_id)
        self.node.tell_agent(aw.EngineGone(instance_id))

    def _count(self, effect: aw.CountInFlight) -> None:
        engine = self.node.engines.get(effect.instance_id)
        if engine is not None:
            self.node.count(engine)

    def _check(self, effect: aw.CheckHealth) -> None:
        lives = effect.instance_id in self.node.engines
        self.node.answer_agent(aw.HealthSeen(effect.instance_id, ok=lives, alive=lives, reason="" if lives else "gone"))
