"""Replicas and sleepers of one node, which are weights without an engine and engines outside their GPUs.

WarmServe sections 4 and 6: an engine that grows from a replica starts no process; weights still on their way continue
in the foreground, and the first prefill begins as soon as each missing layer will arrive before it is needed. That k is
"the smallest such that for every later layer the load time so far is at most the compute time so far" (erratum E7):
with L equal layers, when at most (L-1)/L x prefill x bandwidth bytes are missing, for the shortest possible prefill. A
replica holds the layers it was granted: all (as in the published code), or the first k (`warmserve:first_layers=true`);
the rest is streamed from the moment when an engine grows from the replica.
SwapServeLLM section 4: a swap-in takes a fixed time and then moves its bytes at a rate of its own, over the same PCIe
lanes.
"""

import math
from typing import Any

from glowplug.controllers.agent import messages as aw
from glowplug.domain.instance import Phase, PhaseName
from glowplug_lab.simulator.hardware.engine import Origin, SimEngine
from glowplug_lab.simulator.hardware.fetching import Fetching
from glowplug_lab.simulator.hardware.server import Server
from glowplug_lab.simulator.hardware.starting import Starting
from glowplug_lab.simulator.links import Link


class Dormancy:
    """The replicas and sleepers of one node. `handlers` has a method for each effect of the agent."""

    def __init__(self, node: Server, fetching: Fetching, starting: Starting) -> None:
        self.node, self.run, self._fetching, self._starting = node, node.run, fetching, starting
        self.handlers: dict[type, Any] = {
            aw.ActivateEngine: self._activate,
            aw.SleepEngine: self._sleep,
            aw.LimitKv: self._limit,
        }

    def _activate(self, effect: aw.ActivateEngine) -> None:
        node, now_s = self.node, self.run.kernel.now_s
        engine = node.engines.pop(effect.source, None)
        if engine is None:
            gone = aw.EngineStartFailed(effect.instance_id, "engine_failed", f"{effect.source} is gone")
            node.answer_agent(gone)
            return
        self._fetching.rename(engine, effect.instance_id)
        engine.instance_id = effect.instance_id
        mine = [w for w in effect.workers if w.node_id == node.node_id]
        engine.num_bytes = sum(w.num_bytes for w in mine)
        engine.gpu_ids = tuple(w.gpu_id for w in mine)  # a sleeper may wake on other GPUs
        engine.stage_gpus = (engine.gpu_ids,)
        node.engines[effect.instance_id] = engine
        engine.is_replica, engine.is_activating = False, True
        start, model = engine.start, effect.model
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
        """Serve if the first prefill will find every layer in time, else try again when it should."""
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
                wait_s = late / rate if rate > 0 else 0.05  # its weights are not in host memory yet
                self.run.kernel.after(max(wait_s, 1e-6), self._try, engine, since_s)
                return
        engine.is_activating = False
        engine.serve(self.node.server.gpu_kind, self.run.setup.params)
        load = Phase(name=PhaseName.LOAD, started_at=since_s, ended_at=now_s)
        self.node.tell_agent(engine.ready(load))

    def _left(self, engine: SimEngine) -> float:
        """Bytes still to load over each lane."""
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
        self.node.requests.engine_gone(engine)  # drained, so it has no requests
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
