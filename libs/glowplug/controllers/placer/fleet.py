"""State shared by all parts of the placer: nodes, instances, demand, models, and bytes held on GPUs."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from glowplug.controllers.effects import Record
from glowplug.controllers.naming import Ids
from glowplug.controllers.placer.failed_nodes import FailedNodes
from glowplug.controllers.placer.network import Network
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.placer.placement import Placement
from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.errors import WEIGHTS_CODES, WeightsUnavailable
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Becomes, Instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import FetchWeights, StartInstance
from glowplug.events.envelope import Event
from glowplug.fleet.adapters import AdapterIndex, slots_for, with_adapters
from glowplug.fleet.capacity import FleetCapacity
from glowplug.fleet.demand import Demand
from glowplug.fleet.forecasts import Forecasts
from glowplug.fleet.node_index import NodeIndex
from glowplug.fleet.start_times import PRIORS, Prior, StartRow
from glowplug.fleet.status import lacks_one_asleep
from glowplug.fleet.tables import InstanceTable, NodeTable
from glowplug.policies.eviction.sleeping import host_bytes
from glowplug.policies.placement.port import PlacementView

LEAVE_S = 0.1  # of an idle engine to leave, before any was measured
MAX_PEERS = 8  # named to one fetch, beside the source; a prefetcher asks the first of them


class Fleet:
    def __init__(
        self, policies: dict[str, str], epoch: int, params: PlacerParams, priors: Mapping[str, Prior] = PRIORS
    ) -> None:
        self.policies, self.params, self.ids = policies, params, Ids(epoch)
        self.nodes, self.instances, self.loads = NodeTable(params.node_lease_s), InstanceTable(), Demand()
        self.models: dict[str, Model] = {}
        self.adapters = AdapterIndex()
        self.loads.of_models(self.models, self.adapters.bases)
        self.forecasts = Forecasts()
        self.capacity, self.network = FleetCapacity(), Network(params, priors)
        self.scores: dict[str, float] = {}  # by replica
        self.promised: set[str] = set()  # replicas not yet reported
        self.learned: dict[str, StartRow] = {}
        self.failed_nodes = FailedNodes(params)
        self.born_at: float | None = None
        self._asleep_bytes: dict[str, int] = {}  # by model, of the last engine that slept
        self._by_silence: dict[str, None] = {}  # nodes in the capacity's index, the longest silent first

    def restore_models(self, rows: dict[str, Model]) -> None:
        self.models = rows
        self._asleep_bytes = {key: num for key, num in self._asleep_bytes.items() if key in rows}
        self.adapters.restore(rows)
        self.loads.of_models(self.models, self.adapters.bases)

    def restore_nodes(self, rows: Mapping[str, Node], now_s: float) -> bool:
        """Return as `node`."""
        self.nodes.unstored.read(rows)
        news = [self.node(node, now_s) for node in rows.values()]
        return any(news)

    def node(self, node: Node, now_s: float) -> bool:
        """Take a node's beat. Return whether it may allow a placement that was impossible before."""
        if not self.nodes.apply(node, now_s):
            return False
        self._by_silence.pop(node.node_id, None)
        self._by_silence[node.node_id] = None
        self.network.cached(node)
        return self.capacity.put_node(node)

    def node_left(self, node_id: str) -> None:
        self.nodes.forget(node_id)
        self._by_silence.pop(node_id, None)
        self.capacity.drop_node(node_id)
        self.network.drop_node(node_id)

    def row(self, instance: Instance, now_s: float) -> bool:
        """Take an instance's row. Return whether placements that wait for bytes should be tried again."""
        if not self.instances.apply(instance, now_s):
            return False
        return self._took(instance, now_s)

    def restore_rows(self, rows: dict[str, Instance], now_s: float) -> list[Instance]:
        changed = self.instances.restore(rows, now_s)
        for instance in changed:
            self._took(instance, now_s)
            if instance.tries_left:  # the fact with the error code was lost
                self.failed(instance, WeightsUnavailable.code, min(now_s, instance.changed_at))
        self.capacity.keep_only(self.instances.by_id.keys() | self.promised)
        return changed

    def take_over(self, instances: InstanceTable, loads: Demand, now_s: float) -> None:
        self.instances, self.loads = instances, loads
        self.loads.of_models(self.models, self.adapters.bases)
        for instance in instances.by_id.values():
            self._took(instance, now_s)

    def failed(self, instance: Instance, code: str, at: float) -> None:
        model = self.models.get(instance.model_key)
        if model is not None and code in WEIGHTS_CODES:
            self.failed_nodes.failed(model, instance.node_id, code, at, instance.tries_left)

    def forget(self, instance_id: str) -> None:
        self.instances.forget(instance_id)
        self.capacity.forget(instance_id)
        self.scores.pop(instance_id, None)

    def _took(self, instance: Instance, now_s: float) -> bool:
        model, node = self.models.get(instance.model_key), self.nodes.by_id.get(instance.node_id)
        row = self.network.saw(instance, model, now_s)
        if model is not None and node is not None:
            self.network.found(instance, model, node, now_s)
        if row is not None:
            self.learned[row.key] = row
        if instance.host_bytes and not instance.state.is_gone:
            self._asleep_bytes[instance.model_key] = instance.host_bytes
        if instance.state.is_gone:
            self.scores.pop(instance.instance_id, None)
        return self.capacity.put_row(instance)

    def score(self, scores: Mapping[str, float]) -> None:
        self.scores = dict(scores)
        self.capacity.nodes.score(self.scores)

    def on_node(self, node_id: str) -> list[Instance]:
        return list(self.capacity.on_node.get(node_id, {}).values())

    def alive(self, now_s: float) -> NodeIndex:
        while self._by_silence:
            longest_silent = next(iter(self._by_silence))
            if self.nodes.is_alive(longest_silent, now_s):
                break
            del self._by_silence[longest_silent]
            self.capacity.withdraw(longest_silent)
        return self.capacity.nodes

    def placement_view(self, now_s: float) -> PlacementView:
        return PlacementView(
            now_s=now_s,
            nodes=self.alive(now_s),
            links=self.network.links,
            times=self.network.times,
            seconds=self.network.seconds,
            first_token_s=self.network.first_token_s,
            stage_bytes=self.network.stage_bytes,
            start_stages=self.params.start_stages,
        )

    def is_settled(self, now_s: float) -> bool:
        return self.born_at is not None and now_s - self.born_at >= self.params.settle_s

    def decided(
        self, kind: str, policy: str, reason: str, now_s: float, cause: Event | None = None, **fields: Any
    ) -> Record:
        """Record a decision; `fields`: of DecisionRecord."""
        made = DecisionRecord(
            decision_id=self.ids.next("d-p"),
            kind=kind,
            policy=policy,
            service="placer",
            reason=reason,
            made_at=now_s,
            cause_id=cause.event_id if cause else "",
            traceparent=cause.traceparent if cause else "",
            **fields,
        )
        return Record(made, cause)

    def decided_on(
        self,
        placement: Placement,
        kind: str,
        reason: str,
        now_s: float,
        chosen: str = "",
        rivals: tuple[Rival, ...] = (),
        figures: Mapping[str, float | int | str] = MappingProxyType({}),
    ) -> Record:
        """Record a decision at the placement's GPU. `figures`: more inputs."""
        command, expected = placement.command, placement.sent.expected if placement.sent else None
        inputs: dict[str, float | int | str] = {
            "need_bytes": command.model.memory_bytes,
            "waited_s": round(now_s - command.wanted_at, 4),
            "engine": command.model.engine,
            "asked_because": command.reason,
            **figures,
        }
        if expected is not None:
            inputs["start_kind"] = expected.kind.value
            inputs["predicted_start_s"] = round(expected.start_s, 4)
            inputs["predicted_ttft_s"] = round(expected.ttft_s, 4)
        return self.decided(
            kind,
            self.policies["eviction" if kind == "evict" else "placement"],
            reason,
            now_s,
            placement.event,
            model_key=command.model.key,
            instance_id=command.instance_id,
            node_id=placement.node_id,
            gpu_id=placement.gpu_id,
            chosen=chosen,
            inputs=inputs,
            rivals=rivals,
        )

    def load_of(self, model_key: str) -> ModelLoad:
        """Return the load of a model's instances: of a base, with that of its adapters."""
        if not self.adapters.of(model_key):
            return self.loads.of(model_key)
        return with_adapters(model_key, self.loads, self.instances)

    def becomes_of(self, victim: Instance) -> Becomes:
        """Return the rung that an eviction leaves a model: asleep where it lacks a sleeping copy."""
        if victim.host_id:
            return "stopped"  # its host serves on
        owner, rows = self.models.get(victim.model_key), self.instances.living(victim.model_key).values()
        if owner is not None and victim.is_outdated(owner):
            return "stopped"
        return "swapped_out" if owner is not None and lacks_one_asleep(owner, rows) else self.params.evict_becomes

    def asleep_bytes(self, victim: Instance) -> int:
        """Return the host memory that an engine will take asleep: as its model's last one did, else an estimate."""
        owner = self.models.get(victim.model_key)
        known = victim.host_bytes or self._asleep_bytes.get(victim.model_key, 0)
        return known or (host_bytes(owner, victim.shared_bytes) if owner else 0)

    def leave_s(self, leaving: Iterable[Instance]) -> float:
        return max(map(self._leaves_s, leaving), default=0.0)

    def _leaves_s(self, row: Instance) -> float:
        model = self.models.get(row.model_key)
        took = self.network.leave_s(model, self.becomes_of(row)) if model else None
        return took[0] if took else LEAVE_S

    def completed(self, command: FetchWeights | StartInstance) -> FetchWeights | StartInstance:
        return self.with_peers(command) if isinstance(command, FetchWeights) else self.for_adapters(command)

    def for_adapters(self, command: StartInstance) -> StartInstance:
        adapters = self.adapters.of(command.model.key)
        if not adapters:
            return command
        num_slots, rank = slots_for(adapters)
        return replace(command, adapter_slots=num_slots, adapter_rank=rank)

    def with_peers(self, command: FetchWeights) -> FetchWeights:
        """Name the prefetchers that a fetch may read from: of nodes with the whole weights, the fewest transfers first,
        then of nodes with an instance of the model, which have or are fetching some of them."""
        digest = command.weights.digest
        others = [node for node in self.nodes.by_id.values() if node.node_id != command.target and node.prefetcher_url]
        whole = [node for node in others if any(cached.digest == digest for cached in node.cached)]
        using = {row.node_id for row in self.instances.living(command.model_key).values()}
        partly = [node for node in others if node.node_id in using and node not in whole]
        ordered = [*sorted(whole, key=_transfers), *sorted(partly, key=_transfers)]
        return replace(command, peers=tuple(node.prefetcher_url for node in ordered[:MAX_PEERS]))


def _transfers(node: Node) -> tuple[int, str]:
    return sum(link.num_transfers for link in node.links), node.node_id
