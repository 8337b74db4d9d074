"""The placer: decides node, GPU and bytes of every instance, and who leaves when there is no room.

placer.place ──▶ policy placement ──▶ decision · prefetcher.fetch · agent.start (of each stage; agent.join)
                      │ no room
                      └▶ policy eviction ──▶ decision · agent.stop of the victims; placed when they are gone
forecast.made ─▶ policy prewarming ──▶ decision · replicas started and dropped
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from glowplug.controllers import operator
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save, Tick
from glowplug.controllers.fencing import LEADERS, Fence, service_of
from glowplug.controllers.placer.drains import Drains
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.orders import Placement, stop
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.placer.placing import Evict, Place, Placing
from glowplug.controllers.placer.prewarming import Prewarm, Prewarming
from glowplug.controllers.placer.stages import Stages
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.events.commands import CancelPlacement, PlaceInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import (
    ForecastMade,
    InstanceFailed,
    ModelDeployed,
    NodeBeat,
    NodeJoined,
    NodeLeft,
    RequestFinished,
    RouterLoadReported,
    WeightsFetched,
    WeightsFetchFailed,
)
from glowplug.fleet.demand import Demand
from glowplug.fleet.tables import InstanceTable, NodeTable
from glowplug.policies.placement.port import wants_seconds
from glowplug.policies.prewarming.port import reads_profile
from glowplug.policies.start_times import PRIORS, START_TIMES, Prior

__all__ = ["CORDONS", "Cordon", "PlacerController", "PlacerParams"]

CORDONS = "cordons"  # nodes that an operator drains


class PlacerController:
    """`place`, `evict` and `prewarm` are policies of the rooms "placement", "eviction" and "prewarming"."""

    def __init__(
        self,
        place: Place,
        evict: Evict,
        policies: dict[str, str],
        epoch: int,
        params: PlacerParams = PlacerParams(),
        *,
        prewarm: Prewarm | None = None,
        priors: Mapping[str, Prior] = PRIORS,
    ) -> None:
        self.policies, self._params, self._fence = policies, params, Fence()
        self.fleet = Fleet(policies, epoch, params, priors)
        self.reads_ends = wants_seconds(place) or reads_profile(prewarm)  # whether it learns from how requests end
        self._placing, self._stages = Placing(self.fleet, place, evict), Stages(self.fleet)
        self._prewarming = Prewarming(self.fleet, prewarm)
        self._drains = Drains(params.repeat_s)
        self._knows_cordons = False  # the table, ours, has been read once
        self._ticked_at: float | None = None

    @property
    def placements(self) -> dict[str, Placement]:
        """Instances that wait for a place, or for their agents to take them."""
        return self._placing.placements

    @property
    def nodes(self) -> NodeTable:
        return self.fleet.nodes

    @property
    def instances(self) -> InstanceTable:
        return self.fleet.instances

    @property
    def loads(self) -> Demand:
        return self.fleet.loads

    @property
    def models(self) -> dict[str, Model]:
        return self.fleet.models

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Commands (StaleEpoch when fenced off), facts, telemetry and ticks."""
        effects = self._handle(stimulus, now_s)
        return [*effects, *self._keep_learned()] if self.fleet.learned else effects

    def _keep_learned(self) -> list[Effect]:
        learned, self.fleet.learned = self.fleet.learned, {}
        return [Save(START_TIMES, key, row) for key, row in learned.items()]

    def _handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        fleet = self.fleet
        fleet.born_at = now_s if fleet.born_at is None else fleet.born_at
        if isinstance(stimulus, Tick):
            return self._tick(now_s)
        if isinstance(stimulus, Cordon):
            (fleet.cordoned.add if stimulus.cordoned else fleet.cordoned.discard)(stimulus.node_id)
            fleet.books.version += 1
            return self._empty_node(stimulus, now_s)
        data = stimulus.data
        if isinstance(data, NodeBeat | NodeJoined):
            return self._bytes_freed(now_s) if fleet.node(data.node, now_s) else []  # most beats offer nothing new
        if isinstance(instance := getattr(data, "instance", None), Instance):
            return self._row(instance, now_s)
        if isinstance(data, PlaceInstance | CancelPlacement):
            self._fence.admit(stimulus)
            return self._take(stimulus, now_s) if isinstance(data, PlaceInstance) else self._cancel(data)
        if isinstance(data, ModelDeployed):
            fleet.models[data.model.key] = data.model
        elif isinstance(data, NodeLeft):
            fleet.node_left(data.node_id)
        elif isinstance(data, RouterLoadReported):
            fleet.loads.apply(data, now_s)
        elif isinstance(data, RequestFinished):
            served_by = fleet.instances.by_id.get(data.instance_id)
            if self.reads_ends and served_by is not None and served_by.is_whole:
                fleet.network.served(data, served_by)
        elif isinstance(data, ForecastMade):
            self._prewarming.forecast(data)
        elif isinstance(data, WeightsFetched | WeightsFetchFailed):
            ids = [i.instance_id for i in fleet.on_node(data.node_id) if i.model_key == data.model_key]
            fleet.network.fetched(data.node_id, ids, now_s)
        return []

    def _tick(self, now_s: float) -> list[Effect]:
        self._mind_the_gap(now_s)
        self.fleet.loads.expire(now_s)
        self._drop_unasked(now_s)
        drained = self._drain_cordoned(now_s) if self.fleet.cordoned else []
        return [
            *self._expire_nodes(now_s),
            *self._bury(now_s),
            *drained,
            *self._placing.work(now_s),
            *self._placing.chase(now_s),
            *self._stages.work(now_s),
            *self._prewarming.work(now_s),
        ]

    def _bytes_freed(self, now_s: float) -> list[Effect]:
        self._prewarming.look_again()
        return [*self._placing.work(now_s), *self._prewarming.work(now_s)]

    def _row(self, instance: Instance, now_s: float) -> list[Effect]:
        self._prewarming.heed(instance, now_s)
        wants_a_look = self.fleet.row(instance, now_s)
        self._settle(instance)
        effects = self._stages.heed(instance, now_s)
        if wants_a_look:
            self._prewarming.look_again()
            effects += [*self._placing.work(now_s), *self._prewarming.work(now_s)]
        return effects

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Tables `models`, `nodes`, `instances` and, ours, `cordons` and `start_times`."""
        if table == "models":
            self.fleet.models = rows
            if rows:  # an emptied store undeploys nobody
                self.fleet.network.keep_models(rows)
                gone = self.fleet.network.times.forget(lambda key: key not in rows)
                return [Remove(START_TIMES, key) for key in gone]
        elif table == START_TIMES:
            return [Save(START_TIMES, row.key, row) for row in self.fleet.network.times.restore(rows)]
        elif table == CORDONS:
            return self._restore_cordons(rows)
        elif table == LEADERS:
            self._fence.raise_to(rows)
        elif table == "nodes":
            for node in rows.values():
                self.fleet.node(node, now_s)
        else:
            for instance in self.fleet.restore_rows(rows, now_s):
                self._settle(instance)
                self._prewarming.heed(instance, now_s)
        return self._keep_learned()

    def inherit(self, earlier: "PlacerController", now_s: float) -> None:
        """Instances, demand, what starts took, and cordons, which an emptied store gets from us. Not the nodes: those
        of the table have a whole lease to speak, however long we have not listened."""
        self.fleet.network.times.restore(earlier.fleet.network.times.rows)
        self.fleet.take_over(earlier.instances, earlier.loads, now_s)
        self.fleet.cordoned = set(earlier.fleet.cordoned)

    def _restore_cordons(self, rows: dict[str, "Cordon"]) -> list[Effect]:
        """Taken once, at the start; from then on the table is made to say what we know. A row that says `cordoned`
        false is one that was lifted; a row that is missing tells nothing."""
        if not self._knows_cordons:
            self.fleet.cordoned |= {n for n, row in rows.items() if row.cordoned}
            self.fleet.cordoned -= {n for n, row in rows.items() if not row.cordoned}
            self._knows_cordons = True
        said = {n for n, row in rows.items() if row.cordoned}
        wrong = {n: n in self.fleet.cordoned for n in self.fleet.cordoned ^ said}
        return [Save(CORDONS, n, Cordon(n, wrong[n])) for n in sorted(wrong)]

    def _mind_the_gap(self, now_s: float) -> None:
        gap_s = now_s - (now_s if self._ticked_at is None else self._ticked_at)
        self._ticked_at = now_s
        if not 0 <= gap_s <= self._params.max_tick_gap_s:
            self.fleet.nodes.shift(gap_s)
            self.fleet.born_at = now_s if self.fleet.born_at is None else self.fleet.born_at + gap_s
            self._placing.shift(gap_s)

    def _drop_unasked(self, now_s: float) -> None:
        """What is not on its way yet and not asked for any more: its cancel was lost, or its autoscaler."""
        for instance_id, placement in list(self.placements.items()):
            if not placement.sent_at and now_s - placement.asked_at > self._params.forget_s:
                self._placing.drop(instance_id)

    def _take(self, event: Event, now_s: float) -> list[Effect]:
        command: PlaceInstance = event.data
        stale = [
            i
            for i, p in self.placements.items()
            if p.event.epoch < event.epoch and service_of(p.event.issuer) == service_of(event.issuer)
        ]
        for instance_id in stale:  # asked for by an autoscaler that has since been replaced: the next one asks anew
            if not self.placements[instance_id].sent_at:
                self._placing.drop(instance_id)
        placement = self.placements.get(command.instance_id)
        if placement is not None:
            placement.asked_at = now_s
        elif command.instance_id in self.instances.by_id:
            return []
        else:
            placement = Placement(event, now_s, now_s)
            self._placing.add(placement)
        return self._placing.try_one(placement, now_s)

    def _settle(self, instance: Instance) -> None:
        """The agent has spoken of it: its ledger holds the bytes (or is done with them), seen by us or not yet. Of a
        pipeline every stage's agent must have."""
        whole = instance.part_of or instance.instance_id
        placement = self.placements.get(whole)
        if placement is None:
            return
        known = self.instances.by_id
        if instance.state.is_gone:
            self._placing.drop(whole)
        elif whole in known and all(placement.stage_id(n) in known for n in range(len(placement.stages))):
            self._placing.drop(whole, keep_claims=True)

    def _cancel(self, command: CancelPlacement) -> list[Effect]:
        placement = self._placing.drop(command.instance_id)
        if placement is None or not placement.sent_at:
            return []
        return [
            Publish(stop(stage.node_id, placement.stage_id(number), command.reason, 0.0))
            for number, stage in enumerate(placement.stages)
        ]

    # nodes

    def _expire_nodes(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for node in self.nodes.expire(now_s):
            self.fleet.node_left(node.node_id)
            reason = f"{node.node_id} has given no sign of life for {self._params.node_lease_s:g} s"
            here = self.fleet.on_node(node.node_id)
            inputs = {"lease_s": self._params.node_lease_s, "instances": len(here)}
            decided = self.fleet.about_node(
                node.node_id, "expire", "node_lease", reason, "taken as left", inputs, now_s
            )
            left = Publish(NodeLeft(node_id=node.node_id, reason=reason))
            effects += [Record(decided), Remove("nodes", node.node_id), left]
            for instance in here:
                lost = replace(
                    instance,
                    state=InstanceState.FAILED,
                    reason="its node has left",
                    changed_at=now_s,
                    revision=instance.revision + 1,
                )
                self.fleet.row(lost, now_s)
                effects += [
                    Save("instances", lost.instance_id, lost),
                    Publish(InstanceFailed(instance=lost, code="node_left")),
                ]
        return effects

    def _bury(self, now_s: float) -> list[Effect]:
        """Rows long gone are forgotten. Those of a node that never came back are removed; a living agent removes its
        own."""
        removed: list[Effect] = []
        for instance in self.fleet.books.gone_before(now_s - self._params.bury_s):
            self.fleet.forget(instance.instance_id)
            if instance.node_id and instance.node_id not in self.nodes.by_id:
                removed.append(Remove("instances", instance.instance_id))
        return removed

    def _empty_node(self, cordon: "Cordon", now_s: float) -> list[Effect]:
        node_id, here = cordon.node_id, self.fleet.on_node(cordon.node_id)
        inputs: dict[str, float | int | str] = {"instances": len(here)}
        if not cordon.cordoned:
            why = f"an operator has lifted the drain of {node_id}, and instances may be placed there again"
            lifted = self.fleet.about_node(node_id, "drain", operator.POLICY, why, "undrain", inputs, now_s)
            self._drains.forget(i.instance_id for i in here)
            return [Record(lifted), Save(CORDONS, node_id, cordon), *self._placing.work(now_s)]
        why = f"an operator drains {node_id}, and nothing is placed there until the drain is lifted"
        decided = self.fleet.about_node(node_id, "drain", operator.POLICY, why, "drain", inputs, now_s)
        return [Record(decided), Save(CORDONS, node_id, cordon), *self._drain_cordoned(now_s)]

    def _drain_cordoned(self, now_s: float) -> list[Effect]:
        """Whatever is on a cordoned node goes, whenever it came there; each is told until it drains."""
        effects: list[Effect] = []
        self._drains.forget(self._drains.instance_ids - self.instances.by_id.keys())
        for node_id in sorted(self.fleet.cordoned):
            for instance, is_first in self._drains.due(self.fleet.on_node(node_id), now_s):
                load, why = self.loads.of(instance.model_key), "its node is being drained"
                busy = {"in_flight": load.in_flight_by_instance.get(instance.instance_id, 0)}
                if is_first:
                    told = self.fleet.about_node(node_id, "drain", operator.POLICY, why, "drain", busy, now_s, instance)
                    effects.append(Record(told))
                effects.append(Publish(stop(node_id, instance.instance_id, why, self._params.evict_grace_s)))
        return effects

    def cordons(self, now_s: float) -> dict[str, bool]:
        """Every cordoned node by id, also one that is away: whether it is alive now."""
        return {node_id: self.nodes.is_alive(node_id, now_s) for node_id in sorted(self.fleet.cordoned)}

    def view(self, now_s: float) -> list[Node]:
        """The nodes alive now, cordoned ones marked as draining."""
        return self.fleet.view(now_s)


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator takes a node out of placement (and drains it), or puts it back."""

    node_id: str
    cordoned: bool
