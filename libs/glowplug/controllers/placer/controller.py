"""The placer: it decides node, GPUs and bytes of every instance, and which instances leave when bytes are lacking.

What it is notified of
    Commands `placer.place` (repeated every 2 s by the service that wants the instance) and `placer.cancel`; facts about
    instances, nodes, models, fetched weights and forecasts; the routers' load; ends of requests, where a policy learns
    from them; `Cordon`, `FetchToHost` and `DropFromHost`, from an operator; a `Tick` now and then. Any stimulus may
    come late, twice or never.

What it asks for
    Of agents: `agent.start` of an instance, of a replica or of each stage of a pipeline, `agent.join`, `agent.stop`. Of
    prefetchers: `prefetcher.fetch` beside each start, for a pin and for an operator, and `prefetcher.drop`. Of the
    store: rows of cordons, of start times, and of instances whose node has left. Each decision is recorded with its
    reason before the commands that follow from it.

What it promises
    1. Bytes are promised once: the bytes granted by a GPU's ledger and the claims on it together never exceed the GPU,
       except while it waits for instances that were asked to leave. `fleet/capacity.py` is the only place that counts.
    2. The most urgent placement is tried first (priority, then time of asking); a refused one is tried again when
       bytes come free, and every `retry_s`.
    3. A start that no agent confirms is sent again every `repeat_s`, and after `give_up_s` placed on another node. A
       placement that no service repeats is dropped after `forget_s`.
    4. A busy instance leaves only once it has had its time (policies/eviction/turns.py); a pinned one never; a replica
       at once.
    5. A pipeline serves when all of its stages are ready, and ends when one of its stages ends.
    6. A start waits for the GPU where an engine of its model sleeps no longer than the wake should save (sleepers.py).
    7. A start that waits for free memory (`PlaceInstance.waits`) comes last, and no serving instance leaves for it.
       Where only batch requests wait for a start (`is_batch`), nothing leaves that others run or are expected to need;
       instances that run batch requests alone leave first, and at once (classes.py).
    8. Where the weights of a start cannot be had on its node, the next start of its model goes to another one, on
       `max_start_nodes` in all, and the first node is avoided for `avoid_node_s` (failed_nodes.py).
    9. Commands of a service that has been fenced off are refused (StaleEpoch).
   10. An adapter goes to a READY instance of its base and takes no GPU bytes. Other adapters leave its slots for it,
       the base itself only where it was started without slots (adapters.py).

What it never does
    It starts no process, moves no bytes and touches no clock. It never sets a claim of its own above what a node's
    beat says of its GPUs. It undeploys no model, and scales none.

Parts: `placing` (which placements wait, and where they go), `victims` (which instances leave), `prewarming`, `stages`,
`nodes`, `network` (links and start times), `host_memory` (weights there), `costs` (of an operator's verb), over one
`fleet`.
"""

from collections.abc import Mapping
from typing import Any, get_args

from glowplug.controllers.effects import Effect, Publish, Remove, Save, Tick
from glowplug.controllers.fencing import LEADERS, Fence, service_of
from glowplug.controllers.placer.adapters import AdapterPlacing
from glowplug.controllers.placer.costs import Costs
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.host_memory import HostMemory
from glowplug.controllers.placer.messages import CORDONS, Cordon, DropFromHost, FetchToHost
from glowplug.controllers.placer.network import rest_of
from glowplug.controllers.placer.nodes import Nodes
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.placer.placement import Placement, stop
from glowplug.controllers.placer.placing import Evict, Place, Placing
from glowplug.controllers.placer.prewarming import Prewarm, Prewarming
from glowplug.controllers.placer.price_list import PriceList
from glowplug.controllers.placer.stages import Stages
from glowplug.controllers.port import Handlers, dispatch
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events import facts
from glowplug.events.commands import CancelPlacement, PlaceInstance
from glowplug.events.envelope import Event
from glowplug.fleet.demand import Demand
from glowplug.fleet.tables import InstanceTable, NodeTable
from glowplug.policies.placement.port import wants_seconds
from glowplug.policies.prewarming.port import reads_profile
from glowplug.policies.start_times import PRIORS, START_TIMES, Prior

__all__ = ["CORDONS", "Cordon", "PlacerController", "PlacerParams"]


class PlacerController:
    """State machine of the placer. `place`, `evict`, `prewarm`: its placement, eviction and prewarming policies."""

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
        self.reads_ends = wants_seconds(place) or reads_profile(prewarm)  # whether policies learn from ends of requests
        self._placing, self._stages = Placing(self.fleet, place, evict), Stages(self.fleet)
        self._adapters = AdapterPlacing(self.fleet)
        self._prewarming, self._nodes = Prewarming(self.fleet, prewarm), Nodes(self.fleet)
        self.host_memory = HostMemory(self.fleet)
        self.costs = Costs(self.fleet, self._placing, self.host_memory)
        self.price_list = PriceList(self.fleet, self._placing)
        self._ticked_at: float | None = None
        self.handlers: Handlers = {
            Tick: self._tick,
            Cordon: self._cordon,
            FetchToHost: self.host_memory.fetch,
            DropFromHost: self.host_memory.drop,
            PlaceInstance: self._place,
            CancelPlacement: self._cancel,
            **dict.fromkeys(get_args(facts.InstanceChange), self._instance),
            facts.NodeBeat: self._node,
            facts.NodeJoined: self._node,
            facts.NodeLeft: self._node_left,
            facts.ModelDeployed: self._model,
            facts.RouterLoadReported: self._load,
            facts.RouterRequestsFinished: self._requests_ended,
            facts.ForecastMade: self._forecast,
            facts.WeightsFetched: self._fetched,
            facts.WeightsPartFetched: self._part_fetched,
            facts.WeightsFetchFailed: self._fetch_failed,
        }

    @property
    def placements(self) -> dict[str, Placement]:
        """Instances that wait for a place or for their agents to report them, by instance_id."""
        return {**self._placing.placements, **self._adapters.placements}

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
        """Take a command (raises StaleEpoch when its issuer is fenced off), fact, telemetry or tick."""
        self.fleet.born_at = now_s if self.fleet.born_at is None else self.fleet.born_at
        return [*dispatch(self.handlers, stimulus, now_s), *self._save_learned()]

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Take a whole table: `models`, `nodes`, `instances` or, written by the placer, `cordons` and `start_times`."""
        if table == "models":
            self.fleet.models = rows
            self.fleet.adapters.restore(rows)
            if rows:  # an emptied store undeploys no model
                self.fleet.network.keep(rows, self.instances.by_id)
                self.host_memory.keep_models()
                gone = self.fleet.network.times.forget(lambda key: key not in rows)
                return [Remove(START_TIMES, key) for key in gone]
        elif table == START_TIMES:
            return [Save(START_TIMES, row.key, row) for row in self.fleet.network.times.restore(rows)]
        elif table == CORDONS:
            return self._nodes.restore_cordons(rows)
        elif table == LEADERS:
            self._fence.raise_to(rows)
        elif table == "nodes":
            news = [self.fleet.node(node, now_s) for node in rows.values()]
            if any(news):  # do what the node's beat would have caused: the row is as new
                return [*self._placing.work(now_s), *self._save_learned()]
        else:
            for instance in self.fleet.restore_rows(rows, now_s):
                self._end_placement(instance)
                self._adapters.row_changed(instance, now_s)
                self._prewarming.row_changed(instance, now_s)
        return self._save_learned()

    def inherit(self, earlier: "PlacerController", now_s: float) -> None:
        """Take over an earlier placer's instances, demand, start times and cordons, which also refill an emptied store.
        The nodes are not taken over: those of the table get a whole lease, however long this process did not listen."""
        self.fleet.network.times.restore(earlier.fleet.network.times.rows)
        self.fleet.network.stage_bytes = earlier.fleet.network.stage_bytes
        self.fleet.take_over(earlier.instances, earlier.loads, now_s)
        self.fleet.capacity.cordoned |= earlier.fleet.capacity.cordoned
        self.fleet.failed_nodes.inherit(earlier.fleet.failed_nodes)

    def cordons(self, now_s: float) -> dict[str, bool]:
        """Every cordoned node by id, absent ones included: whether it is alive now."""
        return {node_id: self.nodes.is_alive(node_id, now_s) for node_id in sorted(self.fleet.capacity.cordoned)}

    def view(self, now_s: float) -> list[Node]:
        """The nodes alive now, cordoned ones marked as draining."""
        return list(self.fleet.alive(now_s))

    def _save_learned(self) -> list[Effect]:
        learned, self.fleet.learned = self.fleet.learned, {}
        return [Save(START_TIMES, key, row) for key, row in learned.items()]

    # commands and time

    def _tick(self, _: Tick, now_s: float) -> list[Effect]:
        self._notice_jump(now_s)
        self.fleet.loads.expire(now_s)
        self.fleet.failed_nodes.expire(now_s, self.nodes.by_id.__contains__)
        self._drop_unasked(now_s)
        drained = self._nodes.drain(now_s) if self.fleet.capacity.cordoned else []
        return [
            *self._nodes.expire(now_s),
            *self._nodes.forget_gone(now_s),
            *drained,
            *self._placing.work(now_s),
            *self._placing.repeat(now_s),
            *self._adapters.work(now_s),
            *self._stages.work(now_s),
            *self._prewarming.work(now_s),
            *self.host_memory.work(now_s),
        ]

    def _notice_jump(self, now_s: float) -> None:
        """Treat a long gap between two ticks as a pause or a jump of the placer's clock, and move every wait by it."""
        gap_s = now_s - (now_s if self._ticked_at is None else self._ticked_at)
        self._ticked_at = now_s
        if not 0 <= gap_s <= self._params.max_tick_gap_s:
            self.fleet.shift(gap_s, now_s)
            self.fleet.born_at = now_s if self.fleet.born_at is None else self.fleet.born_at + gap_s
            self._placing.shift(gap_s)
            self._adapters.shift(gap_s)

    def _drop_unasked(self, now_s: float) -> None:
        """Drop placements not yet sent that no service repeats: their cancel was lost, or their autoscaler."""
        for instance_id, placement in list(self.placements.items()):
            if not placement.sent and now_s - placement.asked_at > self._params.forget_s:
                self._drop(instance_id)

    def _drop(self, instance_id: str) -> Placement | None:
        return self._placing.drop(instance_id) or self._adapters.drop(instance_id)

    def _place(self, event: Event, now_s: float) -> list[Effect]:
        self._fence.admit(event)
        command: PlaceInstance = event.data
        stale = [
            i
            for i, p in self.placements.items()
            if p.event.epoch < event.epoch and service_of(p.event.issuer) == service_of(event.issuer)
        ]
        for instance_id in stale:  # asked for by an autoscaler since replaced: the new one asks anew
            if not self.placements[instance_id].sent:
                self._drop(instance_id)
        if command.model.base:
            return self._adapters.ask(event, now_s)
        placement = self.placements.get(command.instance_id)
        if placement is not None and not placement.sent and _was_patient(placement.command, command):
            self._placing.drop(command.instance_id)  # such a request waits for it now: it is placed like any other
            placement = None
        if placement is not None:
            placement.asked_at = now_s
        elif command.instance_id in self.instances.by_id:
            return []
        elif begun := self.fleet.capacity.stages.get(command.instance_id):
            return self._placing.begun_by_half(Placement(event, now_s, now_s), begun.values(), now_s)
        else:
            placement = Placement(event, now_s, now_s)
            self._placing.add(placement)
        return self._placing.try_one(placement, now_s)

    def _cancel(self, event: Event, now_s: float) -> list[Effect]:
        self._fence.admit(event)
        command: CancelPlacement = event.data
        placement = self._drop(command.instance_id)
        if placement is None or not placement.sent:
            return []
        return [
            Publish(stop(stage.node_id, placement.stage_id(number), command.reason, 0.0))
            for number, stage in enumerate(placement.stages)
        ]

    def _cordon(self, cordon: Cordon, now_s: float) -> list[Effect]:
        effects = self._nodes.cordon(cordon, now_s)
        return effects if cordon.cordoned else [*effects, *self._placing.work(now_s)]

    # facts

    def _node(self, event: Event, now_s: float) -> list[Effect]:
        if not self.fleet.node(event.data.node, now_s):
            return []  # most beats offer nothing new
        return self._use_bytes(now_s)

    def _node_left(self, event: Event, now_s: float) -> list[Effect]:
        self.fleet.node_left(event.data.node_id)
        return []

    def _instance(self, event: Event, now_s: float) -> list[Effect]:
        instance: Instance = event.data.instance
        if isinstance(event.data, facts.InstanceFailed):
            self.fleet.failed(instance, event.data.code, now_s)
        self._prewarming.row_changed(instance, now_s)
        may_free_bytes = self.fleet.row(instance, now_s)
        self._end_placement(instance)
        newest = self.instances.by_id.get(instance.instance_id)  # a late fact comes after the store's newer row
        if newest is None:
            return []
        effects = [*self._stages.row_changed(newest, now_s), *self._adapters.row_changed(newest, now_s)]
        return [*effects, *self._use_bytes(now_s)] if may_free_bytes else effects

    def _use_bytes(self, now_s: float) -> list[Effect]:
        """Use bytes that may have come free: for waiting placements first, then for replicas."""
        self._prewarming.plan_soon()
        return [*self._placing.work(now_s), *self._prewarming.work(now_s)]

    def _end_placement(self, instance: Instance) -> None:
        """End the placement of an instance that its agent has reported: the agent's ledger now holds the bytes, or has
        given them back. The placement of a pipeline ends once an agent has reported every stage."""
        whole = instance.part_of or instance.instance_id
        placement = self._placing.placements.get(whole)
        if placement is None:
            return
        known = self.instances.by_id
        if instance.state.is_gone:
            self._placing.drop(whole)
        elif whole in known and all(placement.stage_id(n) in known for n in range(len(placement.stages))):
            self._placing.drop(whole, keep_claims=True)

    def _model(self, event: Event, now_s: float) -> list[Effect]:
        self.fleet.models[event.data.model.key] = event.data.model
        self.fleet.adapters.put(event.data.model)
        self.fleet.failed_nodes.forget(event.data.model)
        return []

    def _load(self, event: Event, now_s: float) -> list[Effect]:
        self.fleet.loads.apply(event.data, now_s)
        return self._placing.work(now_s) if self._placing.is_patient else []

    def _requests_ended(self, event: Event, now_s: float) -> list[Effect]:
        for request in event.data.requests if self.reads_ends else ():
            served_by = self.fleet.instances.by_id.get(request.instance_id)
            if served_by is not None and served_by.is_whole:
                self.fleet.network.served(request, served_by)
        return []

    def _forecast(self, event: Event, now_s: float) -> list[Effect]:
        self._prewarming.forecast(event.data, now_s)
        return []

    def _fetched(self, event: Event, now_s: float) -> list[Effect]:
        node_id, model_key = event.data.node_id, event.data.model_key
        model = self.models.get(model_key)
        if model is not None and isinstance(event.data, facts.WeightsFetched):
            self.fleet.failed_nodes.forget(model, node_id)
        rows = [i for i in self.fleet.on_node(node_id) if i.model_key == model_key]
        ids = [*(row.instance_id for row in rows), *(rest_of(row) for row in rows)]
        self.fleet.network.fetched(node_id, ids, now_s)
        return []

    def _part_fetched(self, event: Event, now_s: float) -> list[Effect]:
        if self._params.follows_parts:
            self.fleet.network.fetched(event.data.node_id, [event.data.instance_id], now_s)
        return []

    def _fetch_failed(self, event: Event, now_s: float) -> list[Effect]:
        self.host_memory.failed(event.data.model_key, event.data.node_id, now_s)
        return self._fetched(event, now_s)


def _was_patient(known: PlaceInstance, command: PlaceInstance) -> bool:
    """Return whether a start that waited for free memory, or that only batch requests waited for, no longer does."""
    return (known.waits and not command.waits) or (known.is_batch and not command.is_batch)
