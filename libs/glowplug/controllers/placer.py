"""The placer: decides node, GPU and bytes of every instance, and who leaves when there is no room.

placer.place ──▶ policy placement ──▶ decision · prefetcher.fetch · agent.start
                      │ no room
                      └▶ policy residency ──▶ decision · agent.stop of the victims; placed when they are gone
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from glowplug.controllers import operator
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save, Tick
from glowplug.controllers.fencing import LEADERS, Fence, service_of
from glowplug.controllers.naming import Ids
from glowplug.controllers.placer_drains import Drains
from glowplug.controllers.placer_orders import Placement, record, record_of_node, refused, start_commands
from glowplug.controllers.placer_room import Room, on_gpus
from glowplug.controllers.views import InstanceView, LoadView, NodeView
from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.events.commands import CancelPlacement, PlaceInstance, StopInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import InstanceFailed, ModelDeployed, NodeBeat, NodeJoined, NodeLeft, RouterLoadReported
from glowplug.policies.decisions import EvictDecision, PlaceDecision

CORDONS = "cordons"  # nodes that an operator drains


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerParams:
    """How long things may take or stay, in seconds."""

    node_lease_s: float = 8.0  # a node silent for this long has left
    repeat_s: float = 2.0  # a start of which no fact has come is sent again after this
    give_up_s: float = 8.0  # ... and placed anew after this, on another node where there is one
    impossible_s: float = 3.0  # how long a placement that no GPU could hold waits for nodes to join
    evict_grace_s: float = 30.0  # longest drain of a victim
    min_residency_s: float = 1.0  # a READY instance stays at least this long
    fair_wait_s: float = 5.0  # after this wait a busy instance may be drained for a waiting one
    fair_turn_s: float = 5.0  # ... that has been READY this long: a start costs seconds, and is for more than one batch
    bury_s: float = 300.0  # rows of instances on a node that left are kept this long
    forget_s: float = 10.0  # a placement that nobody repeats (the autoscaler does each 2 s) is wanted no more
    max_tick_gap_s: float = 3.0  # a longer one was our pause or a jump of the clock, not the silence of the nodes
    settle_s: float = 3.0  # after start, time for nodes and routers to speak before anybody is evicted or given up


class PlacerController:
    """`place` and `evict` are policies of the rooms "placement" and "residency"."""

    def __init__(
        self,
        place: Callable[..., PlaceDecision],
        evict: Callable[..., EvictDecision],
        policies: dict[str, str],
        epoch: int,
        params: PlacerParams = PlacerParams(),
    ) -> None:
        self._place, self._evict, self.policies, self._params = place, evict, policies, params
        self._ids, self._fence = Ids(epoch), Fence()
        self.nodes, self.instances, self.loads = NodeView(params.node_lease_s), InstanceView(), LoadView()
        self.placements: dict[str, Placement] = {}
        self.models: dict[str, Model] = {}
        self._cordoned: set[str] = set()
        self._drains = Drains(params.repeat_s)
        self._knows_cordons = False  # the table, ours, has been read once
        self._born_at: float | None = None
        self._ticked_at: float | None = None

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Commands (StaleEpoch when fenced off), facts, telemetry and ticks."""
        self._born_at = now_s if self._born_at is None else self._born_at
        if isinstance(stimulus, Tick):
            self._mind_the_gap(now_s)
            self.loads.expire(now_s)
            self._drop_unasked(now_s)
            drained = self._drain_cordoned(now_s) if self._cordoned else []
            return [*self._expire_nodes(now_s), *self._bury(now_s), *drained, *self._work(now_s)]
        if isinstance(stimulus, Cordon):
            (self._cordoned.add if stimulus.cordoned else self._cordoned.discard)(stimulus.node_id)
            return self._empty_node(stimulus, now_s)
        data = stimulus.data
        if isinstance(data, NodeBeat | NodeJoined):
            known = self.nodes.by_id.get(data.node.node_id)
            self.nodes.apply(data.node, now_s)
            if known is not None and _offers(known) == _offers(data.node):
                return []  # most beats: nothing could be placed that could not before
        elif isinstance(data, ModelDeployed):
            self.models[data.model.key] = data.model
        elif isinstance(data, NodeLeft):
            self.nodes.forget(data.node_id)
        elif isinstance(data, RouterLoadReported):
            self.loads.apply(data, now_s)
            return []
        elif isinstance(data, PlaceInstance):
            self._fence.admit(stimulus)
            self._take(stimulus, now_s)
        elif isinstance(data, CancelPlacement):
            self._fence.admit(stimulus)
            return self._cancel(data, now_s)
        elif isinstance(instance := getattr(data, "instance", None), Instance):
            self.instances.apply(instance, now_s)
            self._settle(instance)
        return self._work(now_s) if self.placements else []

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Tables `models`, `nodes`, `instances` and, ours, `cordons`."""
        if table == "models":
            self.models = rows
        elif table == CORDONS:
            return self._restore_cordons(rows)
        elif table == LEADERS:
            self._fence.raise_to(rows)
        elif table == "nodes":
            for node in rows.values():
                self.nodes.apply(node, now_s)
        else:
            for instance in self.instances.restore(rows, now_s):
                self._settle(instance)
        return []

    def inherit(self, earlier: "PlacerController", now_s: float) -> None:
        """Instances, demand, and cordons, which an emptied store gets from us. Not the nodes: those of the table have
        a whole lease to speak, however long we have not listened."""
        self.instances, self.loads = earlier.instances, earlier.loads
        self._cordoned = set(earlier._cordoned)

    def _restore_cordons(self, rows: dict[str, "Cordon"]) -> list[Effect]:
        """Taken once, at the start; from then on the table is made to say what we know. A row that says `cordoned`
        false is one that was lifted; a row that is missing tells nothing."""
        if not self._knows_cordons:
            self._cordoned |= {n for n, row in rows.items() if row.cordoned}
            self._cordoned -= {n for n, row in rows.items() if not row.cordoned}
            self._knows_cordons = True
        said = {n for n, row in rows.items() if row.cordoned}
        wrong = {n: n in self._cordoned for n in self._cordoned ^ said}
        return [Save(CORDONS, n, Cordon(n, wrong[n])) for n in sorted(wrong)]

    def _mind_the_gap(self, now_s: float) -> None:
        gap_s = now_s - (now_s if self._ticked_at is None else self._ticked_at)
        self._ticked_at = now_s
        if not 0 <= gap_s <= self._params.max_tick_gap_s:
            self.nodes.shift(gap_s)
            self._born_at = now_s if self._born_at is None else self._born_at + gap_s
            for placement in self.placements.values():
                placement.shift(gap_s)

    def _drop_unasked(self, now_s: float) -> None:
        """What is not on its way yet and not asked for any more: its cancel was lost, or its autoscaler."""
        for instance_id, placement in list(self.placements.items()):
            if not placement.sent_at and now_s - placement.asked_at > self._params.forget_s:
                del self.placements[instance_id]

    def _take(self, event: Event, now_s: float) -> None:
        command: PlaceInstance = event.data
        stale = [
            i
            for i, p in self.placements.items()
            if service_of(p.event.issuer) == service_of(event.issuer) and p.event.epoch < event.epoch
        ]
        for instance_id in stale:  # asked for by an autoscaler that has since been replaced: the next one asks anew
            if not self.placements[instance_id].sent_at:
                del self.placements[instance_id]
        known = self.placements.get(command.instance_id)
        if known is not None:
            known.asked_at = now_s
        elif command.instance_id not in self.instances.by_id:
            self.placements[command.instance_id] = Placement(event, now_s, now_s)

    def _settle(self, instance: Instance) -> None:
        """The agent has spoken of it: its ledger holds the bytes (or is done with them), seen by us or not yet."""
        self.placements.pop(instance.instance_id, None)

    def _cancel(self, command: CancelPlacement, now_s: float) -> list[Effect]:
        placement = self.placements.pop(command.instance_id, None)
        if placement is None or not placement.sent_at:
            return []
        return [Publish(_stop(placement.node_id, command.instance_id, command.reason, 0.0))]

    # nodes

    def _expire_nodes(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for node in self.nodes.expire(now_s):
            reason = f"no sign of life for {self._params.node_lease_s:g} s"
            here = self._on_node(node.node_id)
            inputs = {"lease_s": self._params.node_lease_s, "instances": len(here)}
            decided = self._about_node(node.node_id, "expire", "node_lease", reason, "taken as left", inputs, now_s)
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
                self.instances.apply(lost, now_s)
                effects += [
                    Save("instances", lost.instance_id, lost),
                    Publish(InstanceFailed(instance=lost, code="node_left")),
                ]
        return effects

    def _on_node(self, node_id: str) -> list[Instance]:
        return [i for i in self.instances.by_id.values() if i.node_id == node_id and not i.state.is_gone]

    def _bury(self, now_s: float) -> list[Effect]:
        """Rows of instances whose node never came back are removed in the end; a living agent removes its own."""
        nodes = self.nodes.by_id
        over = [
            i
            for i in self.instances.by_id.values()
            if i.state.is_gone and i.node_id not in nodes and now_s - i.changed_at > self._params.bury_s
        ]
        for instance in over:
            self.instances.forget(instance.instance_id)
        return [Remove("instances", i.instance_id) for i in over if i.node_id]

    def _empty_node(self, cordon: "Cordon", now_s: float) -> list[Effect]:
        node_id, here = cordon.node_id, self._on_node(cordon.node_id)
        inputs: dict[str, float | int | str] = {"instances": len(here)}
        if not cordon.cordoned:
            why = "undrained by its operator: instances may be placed there again"
            lifted = self._about_node(node_id, "drain", operator.POLICY, why, "undrain", inputs, now_s)
            self._drains.forget(i.instance_id for i in here)
            return [Record(lifted), Save(CORDONS, node_id, cordon), *self._work(now_s)]
        why = "drained by its operator: nothing is placed there until it is undrained"
        decided = self._about_node(node_id, "drain", operator.POLICY, why, "drain", inputs, now_s)
        return [Record(decided), Save(CORDONS, node_id, cordon), *self._drain_cordoned(now_s)]

    def _drain_cordoned(self, now_s: float) -> list[Effect]:
        """Whatever is on a cordoned node goes, whenever it came there; each is told until it drains."""
        effects: list[Effect] = []
        self._drains.forget(self._drains.instance_ids - self.instances.by_id.keys())
        for node_id in sorted(self._cordoned):
            for instance, is_first in self._drains.due(self._on_node(node_id), now_s):
                load, why = self.loads.of(instance.model_key), "its node is being drained"
                busy = {"in_flight": load.in_flight_by_instance.get(instance.instance_id, 0)}
                if is_first:
                    told = self._about_node(node_id, "drain", operator.POLICY, why, "drain", busy, now_s, instance)
                    effects.append(Record(told))
                effects.append(Publish(_stop(node_id, instance.instance_id, why, self._params.evict_grace_s)))
        return effects

    def _about_node(self, node_id: str, *what: Any) -> DecisionRecord:
        """See record_of_node, which `what` is for."""
        return record_of_node(node_id, self._ids.next("d-p"), *what)

    def view(self, now_s: float) -> list[Node]:
        """The nodes alive now, cordoned ones marked as draining."""
        alive = sorted(self.nodes.alive(now_s), key=lambda n: n.node_id)
        return [replace(n, draining=True) if n.node_id in self._cordoned else n for n in alive]

    # placing

    def _work(self, now_s: float) -> list[Effect]:
        """Try every placement, most urgent first."""
        effects: list[Effect] = []
        order = sorted(
            self.placements.values(), key=lambda p: (-p.command.model.priority, p.received_at, p.command.instance_id)
        )
        granted = {(gpu.gpu_id, g.holder) for n in self.nodes.by_id.values() for gpu in n.gpus for g in gpu.grants}
        reserved: dict[str, int] = {}
        for instance in self.instances.by_id.values():  # the fact of a start may be here before the beat that shows it
            is_held = not instance.state.is_gone and instance.state is not InstanceState.DRAINING
            if is_held and (instance.gpu_id, instance.instance_id) not in granted:
                num_bytes = sum(worker.num_bytes for worker in instance.workers)
                reserved[instance.gpu_id] = reserved.get(instance.gpu_id, 0) + num_bytes

        def promise(placement: Placement, sign: int) -> None:
            """Bytes of a placement that its GPU's ledger does not show yet, put in or taken out of `reserved`."""
            if placement.gpu_id and (placement.gpu_id, placement.command.instance_id) not in granted:
                num_bytes = sign * placement.command.model.memory_bytes
                reserved[placement.gpu_id] = reserved.get(placement.gpu_id, 0) + num_bytes

        for placement in order:
            promise(placement, 1)
        room = self._room(now_s, reserved)
        for placement in order:
            promise(placement, -1)
            effects += self._sent(placement, room) if placement.sent_at else self._try(placement, room)
            if placement.command.instance_id in self.placements:
                promise(placement, 1)
        return effects

    def _room(self, now_s: float, reserved: dict[str, int]) -> Room:
        return Room(
            now_s=now_s,
            nodes=self.view(now_s),
            reserved=reserved,
            by_gpu=on_gpus(self.instances.by_id.values()),
            models=self.models,
            loads=self.loads,
            min_residency_s=self._params.min_residency_s,
            fair_turn_s=self._params.fair_turn_s,
        )

    def _try(self, placement: Placement, room: Room) -> list[Effect]:
        command, now_s = placement.command, room.now_s
        heard = [n for n in room.nodes if n.node_id not in placement.silent] or room.nodes
        decision = self._place(command.model, heard, room.reserved)
        if decision.gpu_id:
            return self._start(placement, decision, now_s)
        waited = now_s - placement.received_at
        settled = self._born_at is not None and now_s - self._born_at >= self._params.settle_s
        if not decision.possible:
            patient = waited < self._params.impossible_s or not settled
            return [] if patient else self._refuse(placement, decision, now_s)
        asked_lately = now_s - placement.asked_victims_at < self._params.evict_grace_s
        if asked_lately and room.is_being_made(placement.gpu_id, placement.victims):
            return []
        if not settled and not self.loads.is_fresh(now_s):
            return []
        fair = waited >= self._params.fair_wait_s
        chosen = room.make(command.model, self._evict, busy_may_go=fair)
        if chosen is None:
            return []
        gpu_id, eviction = chosen
        return self._evict_for(placement, gpu_id, eviction, now_s)

    def _evict_for(self, placement: Placement, gpu_id: str, eviction: EvictDecision, now_s: float) -> list[Effect]:
        placement.gpu_id, placement.victims, placement.asked_victims_at = gpu_id, eviction.victims, now_s
        placement.node_id = gpu_id.rpartition("/")[0]
        chosen = ", ".join(eviction.victims) or "wait for a drain under way"
        decided = self._record(placement, "evict", eviction.reason, eviction.rivals, now_s, chosen)
        why = f"evicted for {placement.command.model.name}"
        nodes = {victim: self.instances.by_id[victim].node_id for victim in eviction.victims}
        stops = [_stop(node, victim, why, self._params.evict_grace_s) for victim, node in nodes.items()]
        return [Record(decided, placement.event), *(Publish(stop, placement.event) for stop in stops)]

    def _start(self, placement: Placement, decision: PlaceDecision, now_s: float) -> list[Effect]:
        placement.gpu_id, placement.node_id = decision.gpu_id, decision.node_id
        placement.started_at = placement.sent_at = now_s
        decided = self._record(placement, "place", decision.reason, decision.rivals, now_s, decision.gpu_id)
        placement.decision_id = decided.decision_id
        return [Record(decided, placement.event), *self._orders(placement)]

    def _orders(self, placement: Placement) -> list[Effect]:
        return [Publish(command, placement.event) for command in start_commands(placement)]

    def _sent(self, placement: Placement, room: Room) -> list[Effect]:
        """A start of which the agent has not spoken yet: ask again, in the end somewhere else."""
        now_s = room.now_s
        node_gone = not self.nodes.is_alive(placement.node_id, now_s)
        if node_gone or now_s - placement.started_at > self._params.give_up_s:
            stop = _stop(placement.node_id, placement.command.instance_id, "placed anew", 0.0)
            silent = f"{placement.node_id} did not answer its start for {now_s - placement.started_at:.1f} s"
            why = "its node has left before it took the start" if node_gone else silent
            decided = self._record(placement, "place", f"{why}: placed anew", (), now_s, "anew")
            placement.start_over()
            return [Record(decided, placement.event), Publish(stop)]
        if now_s - placement.sent_at >= self._params.repeat_s:
            placement.sent_at = now_s
            return self._orders(placement)
        return []

    def _refuse(self, placement: Placement, decision: PlaceDecision, now_s: float) -> list[Effect]:
        """No GPU could ever hold it: say so as a failed start."""
        del self.placements[placement.command.instance_id]
        decided = self._record(placement, "refuse", decision.reason, decision.rivals, now_s)
        failed = refused(placement, decision.reason, decided.decision_id, now_s)
        fact = InstanceFailed(instance=failed, code="no_capacity")
        return [Record(decided, placement.event), Publish(fact, placement.event)]

    def _record(
        self,
        placement: Placement,
        kind: str,
        reason: str,
        rivals: tuple[Rival, ...],
        now_s: float,
        chosen: str = "",
    ) -> DecisionRecord:
        policy = self.policies["residency" if kind == "evict" else "placement"]
        return record(placement, self._ids.next("d-p"), kind, policy, reason, now_s, rivals=rivals, chosen=chosen)


def _offers(node: Node) -> tuple[object, ...]:
    return node.gpus, node.engines, node.draining


def _stop(node_id: str, instance_id: str, reason: str, grace_s: float) -> StopInstance:
    return StopInstance(target=node_id, instance_id=instance_id, reason=reason, grace_s=grace_s)


@dataclass(frozen=True, slots=True)
class Cordon:
    """An operator takes a node out of placement (and drains it), or puts it back."""

    node_id: str
    cordoned: bool
