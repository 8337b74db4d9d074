"""LoRA adapters in the engines of one node: loaded over the host's PCIe lanes, and served in its batch.

A load moves the adapter's bytes and takes `ADAPTER_LOAD_S` besides. While an engine holds any adapter, each step takes
`STEP_S` longer: Punica (Chen et al. 2023, arXiv 2310.18547, abstract) serves many LoRA adapters of one model in
one batch "while only adding 2ms latency per token"; S-LoRA (Sheng et al. 2023, arXiv 2311.03285) finds its throughput
nearly independent of how many there are. An engine started for adapters keeps its slots' bytes out of the KV cache.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from glowplug.controllers.agent import messages as aw
from glowplug.domain.instance import Phase, PhaseName
from glowplug.policies.start_times import ADAPTER_LOAD_S
from glowplug_lab.simulator.hardware.engine import SimEngine
from glowplug_lab.simulator.hardware.fetching import Fetching
from glowplug_lab.simulator.hardware.server import Server
from glowplug_lab.simulator.hardware.starting import Starting

STEP_S: Final = 0.002


class Adapters:
    """The adapters of one node. `handlers` has a method for each effect; those of `starting` that adapters share go on
    to it for other instances."""

    def __init__(self, node: Server, fetching: Fetching, starting: Starting) -> None:
        self.node, self.run, self._fetching, self._starting = node, node.run, fetching, starting
        self._coming: dict[str, SimEngine] = {}  # adapters whose weights are awaited or load, by instance_id
        self.handlers: dict[type, Callable[[Any], None]] = {
            aw.AwaitWeights: self._await,
            aw.LoadAdapter: self._load,
            aw.UnloadAdapter: self._unload,
            aw.CountInFlight: self._count,
        }

    def _await(self, effect: aw.AwaitWeights) -> None:
        holding = self.node.agent.holdings.get(effect.instance_id)
        if holding is None or not holding.instance.host_id:
            self._starting.handlers[aw.AwaitWeights](effect)
            return
        model = self.run.models[holding.model.key]
        now_s = self.run.kernel.now_s
        adapter = SimEngine(effect.instance_id, self.node.node_id, model, (), 0, now_s)
        self._coming[effect.instance_id] = adapter
        adapter.found = self._fetching.found(adapter, effect.weights)
        if self._fetching.has_all(effect.weights):
            self._fetched(adapter)
        else:
            self._fetching.wait(adapter, effect.weights, self._fetched)

    def _fetched(self, adapter: SimEngine) -> None:
        digest = adapter.model.model.weights.uri
        self.node.answer_agent(aw.WeightsComplete(adapter.instance_id, digest, adapter.found))

    def _load(self, effect: aw.LoadAdapter) -> None:
        host, model = self.node.engines.get(effect.host_id), self.run.models[effect.model.key]
        if host is None or host.serving is None:
            failed = aw.EngineStartFailed(effect.instance_id, "engine_failed", f"{effect.host_id} is gone")
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
        url, slots = f"sim://{host.instance_id}", host.num_slots
        step_s = serving.costs.decode_s(1, 0)
        self.node.tell_agent(
            aw.EngineReady(adapter.instance_id, url, (load,), host.kv_tokens, num_slots=slots, step_s=step_s)
        )

    def _reshape(self, host: SimEngine) -> None:
        """Let a host's steps cost what they do beside adapters."""
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
        host = self.node.engines.get(effect.host_id)
        if host is not None and host.adapters.pop(effect.instance_id, None) is not None and not host.adapters:
            self._reshape(host)
        self.node.answer_agent(aw.EngineGone(effect.instance_id))

    def _count(self, effect: aw.CountInFlight) -> None:
        if not effect.host_id or effect.model is None:
            self._starting.handlers[aw.CountInFlight](effect)
            return
        host, key = self.node.engines.get(effect.host_id), effect.model.key
        num = sum(request.arrival.model == key for request in host.tickets.values()) if host is not None else 0
        self.node.answer_agent(aw.InFlight(effect.instance_id, num))
