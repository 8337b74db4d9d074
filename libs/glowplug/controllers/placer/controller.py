"""The placer: choose node, GPUs and bytes of every instance, and the instances that leave when bytes are lacking.

What it is notified of (reads.py)
    `placer.place` is repeated every 2 s by the requesting service. Any stimulus may come late, twice or never.

What it asks for
    Of agents: `agent.start` (an instance, a replica, or each stage of a pipeline), `agent.join`, `agent.stop`. Of
    prefetchers: `prefetcher.fetch` beside each start, for a pin and for an operator; `prefetcher.drop`. Each decision
    is recorded, with its reason, before its commands.

What it promises
    1. Grants and claims on a GPU never exceed it, except while it waits for instances that were asked to leave. Only
       `fleet/capacity.py` counts.
    2. The most urgent placement is tried first (priority, then time of request); a refused one is retried when bytes
       come free, and every `retry_s`.
    3. An unconfirmed start is repeated every `repeat_s`, and moved to another node after `give_up_s`. A placement that
       no service repeats is dropped after `forget_s`.
    4. A busy instance leaves only after its turn (policies/eviction/turns.py); a pinned one never; a replica at once.
    5. A pipeline serves when all of its stages are ready, and ends when one of them ends.
    6. A start waits for the GPU where an engine of its model sleeps no longer than the wake should save (placing.py).
    7. A start that waits for free memory (`PlaceInstance.waits`) comes last, and evicts no serving instance. A start
       for batch requests alone (`is_batch`) evicts nothing that others run or are expected to need; instances that run
       only batch requests leave first, and at once.
    8. Where weights cannot be had on a node, the model's next start tries another, on `max_start_nodes` in all; the
       first node is avoided for `avoid_node_s` (failed_nodes.py).
    9. Commands of a fenced-off service are refused (StaleEpoch).
   10. Of a model no more engines sleep on a device than could be awake there at once, and a node's sleepers stay within
       its host memory for them: those of least worth end (sleepers.py).
   11. An adapter joins a READY instance of its base and takes no GPU bytes. Other adapters leave its slots for it; the
       base itself only where it was started without slots (adapters.py).

What it never does
    Start a process, move bytes, read a clock, claim more than a node's beat offers, undeploy or scale a model.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

from glowplug.controllers import operator
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save, Tick
from glowplug.controllers.fencing import LEADERS, Fence, service_of
from glowplug.controllers.operator import CORDONS, Cordon, DropFromHost, FetchToHost
from glowplug.controllers.placer.adapters import AdapterPlacing
from glowplug.controllers.placer.costs import Costs
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.controllers.placer.host_memory import HostMemory
from glowplug.controllers.placer.network import REST, rest_of
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.placer.placement import NEVER, Placement, stop
from glowplug.controllers.placer.placing import EvictPolicy, PlacePolicy, Placing
from glowplug.controllers.placer.price_list import PriceList
from glowplug.controllers.placer.sleepers import Drops, Sleepers
from glowplug.controllers.port import Handlers, dispatch
from glowplug.domain.decision import Rival
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, InstanceState, StageAddress, Worker
from glowplug.domain.model import Model
from glowplug.events import facts
from glowplug.events.commands import CancelPlacement, FetchWeights, JoinStages, PlaceInstance, StartInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import ForecastMade, InstanceFailed, NodeLeft
from glowplug.fleet.start_times import PRIORS, START_TIMES, Prior
from glowplug.policies.placement.links import has_weights
from glowplug.policies.placement.port import wants_seconds
from glowplug.policies.placement.shape import weights_per_gpu
from glowplug.policies.placement.warmserve_evict_aware import SCORE_UNIT, PrewarmStep
from glowplug.policies.prewarming.port import PrewarmPlan, PrewarmView, reads_profile, weighs_worth
from glowplug.policies.scaling.port import needed_by_pipeline

# Nodes that fall silent, and nodes that an operator drains.
#
# A node and its instances are gone when its lease runs out. Nothing is placed on a cordoned node, and every instance
# there is stopped, again until it drains: a command may be lost. Of a serving pipeline the first stage is stopped, or
# becomes whole; `Stages` then ends the later ones.


class Nodes:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._knows_cordons = False
        self._stopped_at: dict[str, float] = {}

    def expire(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        lease_s = self.fleet.params.node_lease_s
        for node in self.fleet.nodes.expire(now_s):
            self.fleet.node_left(node.node_id)
            reason = f"{node.node_id} has been silent for {lease_s:g} s"
            here = self.fleet.on_node(node.node_id)
            if not here and node.node_id in self.fleet.nodes.unstored.lacked:
                continue  # an invented one: no decision of others gives way to it in the log
            inputs = {"lease_s": lease_s, "instances": len(here)}
            decided = self.fleet.decided(
                "expire", "node_lease", reason, now_s, node_id=node.node_id, chosen="taken as left", inputs=inputs
            )
            effects += [decided, Remove("nodes", node.node_id), Publish(NodeLeft(node_id=node.node_id, reason=reason))]
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

    def forget_gone(self, now_s: float) -> list[Effect]:
        """Forget instances long gone, and rows of nodes that never came back; a living agent removes its own."""
        removed: list[Effect] = []
        for instance in self.fleet.capacity.gone_before(now_s - self.fleet.params.keep_gone_s):
            self.fleet.forget(instance.instance_id)
            if instance.node_id and instance.node_id not in self.fleet.nodes.by_id:
                removed.append(Remove("instances", instance.instance_id))
        return removed

    def cordon(self, cordon: Cordon, now_s: float) -> list[Effect]:
        node_id, here = cordon.node_id, self.fleet.on_node(cordon.node_id)
        self.fleet.capacity.cordon(node_id, is_cordoned=cordon.cordoned)
        if cordon.cordoned:
            verb, why = "drain", f"an operator drains {node_id}, and nothing is placed there until the drain is lifted"
        else:
            verb = "undrain"
            why = f"an operator has lifted the drain of {node_id}, and instances may be placed there again"
        decided = self.fleet.decided(
            "drain", operator.POLICY, why, now_s, node_id=node_id, chosen=verb, inputs={"instances": len(here)}
        )
        effects: list[Effect] = [decided, Save(CORDONS, node_id, cordon)]
        if cordon.cordoned:
            return [*effects, *self.drain(now_s)]
        for instance in here:
            self._stopped_at.pop(instance.instance_id, None)
        return effects

    def restore_cordons(self, rows: dict[str, Cordon]) -> list[Effect]:
        """Take the table at the first call; later, write its differences from this placer's cordons. `cordoned` false
        is a lifted cordon; a missing row says nothing."""
        capacity = self.fleet.capacity
        if not self._knows_cordons:
            for node_id, row in rows.items():
                if row.cordoned != (node_id in capacity.cordoned):
                    capacity.cordon(node_id, is_cordoned=row.cordoned)
            self._knows_cordons = True
        stored = {n for n, row in rows.items() if row.cordoned}
        wrong = {n: n in capacity.cordoned for n in capacity.cordoned ^ stored}
        return [Save(CORDONS, n, Cordon(n, wrong[n])) for n in sorted(wrong)]

    def drain(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        known = self.fleet.instances.by_id
        self._stopped_at = {name: at for name, at in self._stopped_at.items() if name in known}
        for node_id in sorted(self.fleet.capacity.cordoned):
            for instance in self.fleet.on_node(node_id):
                leaves = self._who_leaves(instance)
                effects += self._stop(leaves, node_id, now_s) if leaves is not None else []
        return effects

    def _who_leaves(self, instance: Instance) -> Instance | None:
        """Return the instance to stop so that `instance` ends: the first stage of a serving pipeline, which has the
        streams. None while the first stage becomes whole, or ends what runs in its stages; the others end after
        that."""
        known = self.fleet.instances.by_id
        first = known.get(instance.part_of or needed_by_pipeline(instance.instance_id, known))
        if first is None or first.state not in (InstanceState.READY, InstanceState.DRAINING):
            return instance
        if first.is_whole:
            return None if first.stages_busy else instance
        return None if first.consolidating else first

    def _stop(self, instance: Instance, node_id: str, now_s: float) -> list[Effect]:
        last = self._stopped_at.get(instance.instance_id)
        is_going = instance.state is InstanceState.DRAINING
        if is_going or (last is not None and now_s - last < self.fleet.params.repeat_s):
            return []
        self._stopped_at[instance.instance_id] = now_s
        load, why = self.fleet.loads.of(instance.model_key), "its node is being drained"
        if instance.node_id != node_id:
            why = f"{node_id}, which runs one of its later stages, is being drained"
        command = Publish(stop(instance.node_id, instance.instance_id, why, self.fleet.params.evict_grace_s))
        if last is not None:
            return [command]
        decided = self.fleet.decided(
            "drain",
            operator.POLICY,
            why,
            now_s,
            model_key=instance.model_key,
            instance_id=instance.instance_id,
            node_id=node_id,
            gpu_id=instance.gpu_id,
            chosen="drain",
            inputs={"in_flight": load.in_flight_by_instance.get(instance.instance_id, 0)},
        )
        return [decided, command]


# Pipelines: an instance and its later stages start, serve and end together.
#
# Paper: HydraServe sections 4 and 6. Whatever is lost,
#
# - the first stage serves once every later one is READY (`agent.join`, repeated until it does);
# - a lost stage ends the others, but a first stage that becomes whole has `hole_grace_s` to go on alone. Where a later
#   stage drains, the first drains with it and ends before it, or becomes whole;
# - all end where no agent has reported a stage for `give_up_s`: its placer died before sending all starts;
# - later stages end when the instance is gone, or serves alone after consolidation (section 6.2, scale down) with its
#   stages idle;
# - a stage that becomes whole gets the rest of its weights (`prefetcher.fetch`, in the background, repeated).

ENDS_AHEAD_S = 0.5  # the first stage's drain ends this long before a later stage's


class Stages:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._sent_at: dict[str, float] = {}

    def row_changed(self, row: Instance, now_s: float) -> list[Effect]:
        whole, capacity = row.part_of or row.instance_id, self.fleet.capacity
        is_pipeline = whole in capacity.stages or whole in capacity.pipelines
        follows = self._follow_up(whole, now_s) if is_pipeline else []
        return [*follows, *self._fetch_rest(row, now_s)]

    def work(self, now_s: float) -> list[Effect]:
        parts, known = self.fleet.capacity.stages, self.fleet.instances.by_id
        self._sent_at = {key: at for key, at in self._sent_at.items() if key.removesuffix(REST) in known}
        wholes = sorted(parts.keys() | self.fleet.capacity.pipelines.keys())
        follows = [effect for whole in wholes for effect in self._follow_up(whole, now_s)]
        rows = [row for w in wholes for row in (known.get(w), *parts.get(w, {}).values()) if row is not None]
        return [*follows, *(effect for row in rows for effect in self._fetch_rest(row, now_s))]

    def _fetch_rest(self, row: Instance, now_s: float) -> list[Effect]:
        model, node = self.fleet.models.get(row.model_key), self.fleet.nodes.by_id.get(row.node_id)
        grows = row.consolidating and not row.state.is_gone
        if not (grows and self.fleet.params.follows_parts) or model is None or node is None:
            return []
        if has_weights(node, model) or not self._is_due(rest_of(row), now_s):
            return []
        self.fleet.network.rest(row, model, node, now_s)
        command = FetchWeights(
            target=row.node_id,
            model_key=model.key,
            weights=model.weights,
            instance_id=row.instance_id,
            priority=model.priority,
            background=True,
        )
        return [Publish(command)]

    def _follow_up(self, whole: str, now_s: float) -> list[Effect]:
        first = self.fleet.instances.by_id.get(whole)
        parts = list(self.fleet.capacity.stages.get(whole, {}).values())
        living = [part for part in parts if not part.state.is_gone]
        if first is None:
            orphaned = [p for p in living if now_s - p.created_at > self.fleet.params.give_up_s]
            return self._end(orphaned, f"its pipeline {whole} is not known", now_s)
        if first.state.is_gone:
            return self._end(living, f"{whole} is gone: {first.reason}", now_s)
        if first.is_whole:
            left = [p for p in living if not p.is_whole and not p.consolidating]
            is_busy = first.stages_busy and first.state in (InstanceState.READY, InstanceState.DRAINING)
            if is_busy and all(p.state in (InstanceState.READY, InstanceState.DRAINING) for p in parts):
                return []
            return self._end(left, f"{whole} serves alone", now_s)
        hole = next((p for p in parts if p.state.is_gone or p.state is InstanceState.DRAINING), None)
        if hole is not None and first.consolidating:
            is_there = not hole.state.is_gone  # the stage serves while it drains
            if is_there or now_s - hole.changed_at < self.fleet.params.hole_grace_s:
                return []
        if hole is not None:
            why = f"its stage {hole.instance_id} is {hole.state.value}: {hole.reason}"
            return self._end([first], why, now_s, self._grace_s(hole, now_s))
        is_late = first.state.is_coming and now_s - first.created_at > self.fleet.params.give_up_s
        if is_late and len(parts) < first.num_stages - 1:
            why = f"only {len(parts)} of its {first.num_stages - 1} later stages were started"
            return self._end([first, *living], why, now_s)
        is_ready = len(living) == first.num_stages - 1 and all(p.state is InstanceState.READY for p in living)
        if first.state.is_coming and is_ready and self._is_due(whole, now_s):
            later = tuple(_address(part) for part in sorted(living, key=lambda part: part.stage))
            return [Publish(JoinStages(target=first.node_id, instance_id=whole, stages=later))]
        return []

    def _grace_s(self, hole: Instance, now_s: float) -> float:
        if hole.state.is_gone:
            return 0.0
        most_s = self.fleet.params.evict_grace_s
        return min(most_s, max(0.0, hole.drain_ends_at - ENDS_AHEAD_S - now_s)) if hole.drain_ends_at else most_s

    def _end(self, rows: list[Instance], why: str, now_s: float, grace_s: float = 0.0) -> list[Effect]:
        return [
            Publish(stop(row.node_id, row.instance_id, why, grace_s))
            for row in rows
            if self._is_due(row.instance_id, now_s)
        ]

    def _is_due(self, key: str, now_s: float) -> bool:
        if now_s - self._sent_at.get(key, NEVER) < self.fleet.params.repeat_s:
            return False
        self._sent_at[key] = now_s
        return True


def _address(part: Instance) -> StageAddress:
    return StageAddress(instance_id=part.instance_id, url=part.url, key_id=part.key_id)


# Prewarming: order the policy's plan, repeated until the agent reports the replica.
#
# A plan is made at a forecast, when an instance starts, drains or ends, when bytes come free (a draining instance
# returned some of its KV cache, WarmServe section 4.1), and each `prewarm_every_s`.

URGENCY = -100  # of a replica's fetch: below those of awaited instances

Prewarm = Callable[[PrewarmView], PrewarmPlan]
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Ordered:
    row: Instance
    commands: tuple[FetchWeights | StartInstance, ...]
    began_at: float
    sent_at: float


class Prewarming:
    def __init__(self, fleet: Fleet, prewarm: Prewarm | None, drops: Drops) -> None:
        self.fleet, self._prewarm, self._drops = fleet, prewarm, drops
        self._weighs = weighs_worth(prewarm)
        self._ordered: dict[str, _Ordered] = {}
        self._failed_at: dict[str, float] = {}
        self._planned_at = NEVER
        self._is_due = False

    def forecast(self, fact: ForecastMade, now_s: float) -> None:
        self.fleet.forecasts.take(fact, now_s)
        self._is_due = True

    def row_changed(self, row: Instance, now_s: float) -> None:
        taken = self.fleet.capacity.taken
        if row.instance_id in self._ordered:
            del self._ordered[row.instance_id]
            self.fleet.promised.discard(row.instance_id)
        for replica_id in [r for r in self._ordered if taken.get(r) == row.instance_id]:
            self._forget(replica_id)
        if row.replica and row.state is InstanceState.FAILED:
            self._failed_at[row.model_key] = now_s

    def plan_soon(self) -> None:
        self._is_due = True

    def work(self, now_s: float) -> list[Effect]:
        if self._prewarm is None:
            return []
        effects = self._repeat(now_s)
        params = self.fleet.params
        gap_s = params.prewarm_gap_s if self._is_due else params.prewarm_every_s
        has_something = bool(self.fleet.forecasts or self.fleet.capacity.dormant)
        if has_something and self.fleet.is_settled(now_s) and now_s - self._planned_at >= gap_s:
            self._planned_at, self._is_due = now_s, False
            effects += self._plan(self._prewarm, now_s)
        return effects

    # planning

    def _plan(self, prewarm: Prewarm, now_s: float) -> list[Effect]:
        view = self._view(now_s)
        plan = prewarm(view)
        self.fleet.score(plan.scores)
        dropped = dict.fromkeys(plan.drops, "its model has changed") | dict(plan.unpaid)
        effects = [e for replica_id, why in dropped.items() for e in self._drops.drop(replica_id, why, now_s)]
        for step in plan.steps:
            effects += self._order(step, plan, view, now_s)
        self._is_due = bool(plan.steps)
        return effects

    def _view(self, now_s: float) -> PrewarmView:
        fleet, capacity = self.fleet, self.fleet.capacity
        finishing = {
            node_id: [row for row in capacity.on_node[node_id].values() if row.state is InstanceState.DRAINING]
            for node_id in capacity.leaving
        }
        retry_s, models = fleet.params.prewarm_retry_s, fleet.models
        self._failed_at = {key: at for key, at in self._failed_at.items() if now_s - at < retry_s}
        forecasts = {
            key: found
            for key, found in fleet.forecasts.expected(now_s).items()
            if key in models and key not in self._failed_at and not models[key].base
        }
        nodes, holdings = fleet.alive(now_s), Holdings(fleet, now_s)
        return PrewarmView(
            now_s=now_s,
            nodes=nodes,
            models=models,
            draining=frozenset(row.instance_id for rows in finishing.values() for row in rows),
            finishing=finishing,
            num_active=capacity.num_active,
            num_leaving_copies=Counter(
                row.model_key for rows in finishing.values() for row in rows if self._is_idle(row)
            ),
            slots={key: holdings.slots_of(models[key]) for key in forecasts},
            forecasts=forecasts,
            load_s={key: fleet.network.load_seconds(models[key]) for key in forecasts},
            prefill_s=fleet.network.quickest_s,
            growth_s=fleet.network.times.growths_s,
            last_used_at={key: fleet.loads.of(key).last_active_at for key in nodes.models_with_copies()},
            climb_s={key: holdings.replica_seconds(models[key]) for key in self._weighed(forecasts)},
            holdings={
                row.instance_id: holdings.of(row)
                for row in self._weighed(row for rows in capacity.dormant.values() for row in rows)
            },
        )

    def _is_idle(self, row: Instance) -> bool:
        return not self.fleet.loads.of(row.model_key).in_flight_by_instance.get(row.instance_id, 0)

    def _weighed(self, some: Iterable[_T]) -> Iterable[_T]:
        return some if self._weighs else ()

    # ordering

    def _order(self, step: PrewarmStep, plan: PrewarmPlan, view: PrewarmView, now_s: float) -> list[Effect]:
        capacity, model = self.fleet.capacity, view.models[step.model_key]
        replica_id = self.fleet.ids.next("r")
        decided = self._record(step, replica_id, plan, view)
        decision_id = decided.decision.decision_id
        row = _replica(step, replica_id, model, decision_id, now_s)
        given_up = {g: capacity.bytes_of(g, step.drop) for g in step.gpu_ids}
        workers = tuple(replace(w, num_bytes=max(0, w.num_bytes - given_up[w.gpu_id])) for w in row.workers)
        for dropped in step.drop:
            capacity.take(dropped, replica_id)
        self.fleet.promised.add(replica_id)
        self.fleet.scores[replica_id] = step.score
        capacity.put_row(replace(row, workers=workers))
        start = StartInstance(
            target=step.node_id,
            instance_id=replica_id,
            model=model,
            workers=row.workers,
            decision_id=decision_id,
            drops=step.drop,
            replica=True,
        )
        fetch = FetchWeights(
            target=step.node_id,
            model_key=model.key,
            weights=model.weights,
            instance_id=replica_id,
            priority=URGENCY,
            drops=step.drop,
        )
        start = self.fleet.for_adapters(start)
        commands = (self.fleet.with_peers(fetch), start) if model.weights.uri else (start,)
        self._ordered[replica_id] = _Ordered(row, commands, now_s, now_s)
        return [decided, *(Publish(command) for command in commands)]

    def _repeat(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        params, capacity = self.fleet.params, self.fleet.capacity
        for replica_id, ordered in list(self._ordered.items()):
            node_id, is_taken = ordered.row.node_id, replica_id in capacity.taken
            if now_s - ordered.began_at > params.give_up_s or not self.fleet.nodes.is_alive(node_id, now_s):
                self._forget(replica_id)
                if not is_taken:
                    self._failed_at[ordered.row.model_key] = now_s
                    effects.append(Publish(stop(node_id, replica_id, "its agent did not answer", 0.0)))
            elif now_s - ordered.sent_at >= params.repeat_s and not is_taken:  # else the start that took it does
                ordered.sent_at = now_s
                effects += [Publish(command) for command in ordered.commands]
        return effects

    def _forget(self, replica_id: str) -> None:
        del self._ordered[replica_id]
        self.fleet.promised.discard(replica_id)
        self.fleet.capacity.taken.pop(replica_id, None)
        self.fleet.capacity.forget(replica_id)

    def _record(self, step: PrewarmStep, replica_id: str, plan: PrewarmPlan, view: PrewarmView) -> Record:
        name, where = view.models[step.model_key].name, ", ".join(step.gpu_ids)
        forecast, on = view.forecasts.get(step.model_key), set(step.gpu_ids)
        inputs: dict[str, float | int | str] = {"score": round(step.score, 4), **plan.inputs}
        inputs["load_s"] = round(view.load_s.get(step.model_key, 0.0), 4)
        if 0 < step.bytes_per_gpu < weights_per_gpu(view.models[step.model_key]):
            inputs["bytes_per_gpu"] = step.bytes_per_gpu
        if forecast is not None:
            inputs["concurrency_mean"] = round(forecast.concurrency_mean, 3)
            inputs["concurrency_peak"] = round(forecast.concurrency_peak, 3)
        rivals = tuple(
            Rival(
                name=row.instance_id,
                score=self.fleet.scores.get(row.instance_id, 0.0),
                why="it gives way" if row.instance_id in step.drop else f"a copy of {row.model_key} is there too",
                unit=SCORE_UNIT,
            )
            for row in self.fleet.capacity.dormant.get(step.node_id, ())
            if any(worker.gpu_id in on for worker in row.workers)
        )
        return self.fleet.decided(
            "prewarm",
            self.fleet.policies.get("prewarming", ""),
            f"a copy of {name} is prewarmed on {where}" + (f": {step.reason}" if step.reason else ""),
            view.now_s,
            model_key=step.model_key,
            instance_id=replica_id,
            node_id=step.node_id,
            gpu_id=step.gpu_ids[0],
            chosen=where,
            inputs=inputs,
            rivals=rivals,
        )


def _replica(step: PrewarmStep, replica_id: str, model: Model, decision_id: str, now_s: float) -> Instance:
    return Instance(
        instance_id=replica_id,
        model_key=model.key,
        engine=model.engine,
        state=InstanceState.STARTING,
        workers=tuple(
            Worker(
                worker_id=f"{replica_id}-{rank}",
                node_id=step.node_id,
                gpu_id=gpu_id,
                num_bytes=step.bytes_per_gpu or weights_per_gpu(model),
                rank=rank,
            )
            for rank, gpu_id in enumerate(step.gpu_ids)
        ),
        max_concurrency=model.max_concurrency,
        model_revision=model.revision,
        engine_digest=model.engine_digest,
        created_at=now_s,
        decision_id=decision_id,
        replica=True,
    )


class PlacerController:
    def __init__(
        self,
        place: PlacePolicy,
        evict: EvictPolicy,
        policies: dict[str, str],
        epoch: int,
        params: PlacerParams = PlacerParams(),
        *,
        prewarm: Prewarm | None = None,
        priors: Mapping[str, Prior] = PRIORS,
    ) -> None:
        self.policies, self._params, self._fence = policies, params, Fence()
        self.fleet = Fleet(policies, epoch, params, priors)
        self.reads_ends = wants_seconds(place) or reads_profile(prewarm)
        self.host_memory = HostMemory(self.fleet)
        self._drops = Drops(self.fleet)
        self._sleepers = Sleepers(self.fleet, evict, self._drops)
        self._placing = Placing(self.fleet, place, evict, self.host_memory, self._sleepers)
        self._stages = Stages(self.fleet)
        self._adapters = AdapterPlacing(self.fleet)
        self._prewarming, self._nodes = Prewarming(self.fleet, prewarm, self._drops), Nodes(self.fleet)
        self.costs = Costs(self.fleet, self._placing, self.host_memory)
        self.price_list = PriceList(self.fleet, self._placing)
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
        return {**self._placing.placements, **self._adapters.placements}

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Take a command (raises StaleEpoch when its issuer is fenced off), fact, telemetry or tick."""
        self.fleet.born_at = now_s if self.fleet.born_at is None else self.fleet.born_at
        return [*dispatch(self.handlers, stimulus, now_s), *self._save_learned()]

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Take a whole table: `models`, `nodes`, `instances`, or the placer's own `cordons` and `start_times`."""
        if table == "models":
            self.fleet.restore_models(rows)
            if rows:  # an emptied store undeploys no model
                self.fleet.network.keep(rows, self.fleet.instances.by_id)
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
            if self.fleet.restore_nodes(rows, now_s):  # as after a beat
                return [*self._placing.work(now_s), *self._save_learned()]
        else:
            for instance in self.fleet.restore_rows(rows, now_s):
                self._end_placement(instance)
                self._adapters.row_changed(instance, now_s)
                self._prewarming.row_changed(instance, now_s)
        return self._save_learned()

    def inherit(self, earlier: "PlacerController", now_s: float) -> None:
        """Take over an earlier placer's instances, demand, start times and cordons, which also refill an emptied store.
        Nodes come from the table, with a whole lease."""
        self.fleet.network.times.restore(earlier.fleet.network.times.rows)
        self.fleet.network.stage_bytes = earlier.fleet.network.stage_bytes
        self.fleet.take_over(earlier.fleet.instances, earlier.fleet.loads, now_s)
        self.fleet.capacity.cordoned |= earlier.fleet.capacity.cordoned
        self.fleet.failed_nodes.inherit(earlier.fleet.failed_nodes)

    def cordons(self, now_s: float) -> dict[str, bool]:
        """Return whether each cordoned node, absent ones included, is alive now."""
        return {node_id: self.fleet.nodes.is_alive(node_id, now_s) for node_id in sorted(self.fleet.capacity.cordoned)}

    def view(self, now_s: float) -> list[Node]:
        return list(self.fleet.alive(now_s))

    def _save_learned(self) -> list[Effect]:
        learned, self.fleet.learned = self.fleet.learned, {}
        return [Save(START_TIMES, key, row) for key, row in learned.items()]

    # commands and time

    def _tick(self, _: Tick, now_s: float) -> list[Effect]:
        self.fleet.loads.expire(now_s)
        self.fleet.failed_nodes.expire(now_s, self.fleet.nodes.by_id.__contains__)
        self._drop_unasked(now_s)
        drained = self._nodes.drain(now_s) if self.fleet.capacity.cordoned else []
        return [
            *self._nodes.expire(now_s),
            *self._nodes.forget_gone(now_s),
            *drained,
            *self._drops.repeat(now_s),
            *self._sleepers.work(now_s),
            *self._placing.work(now_s),
            *self._placing.repeat(now_s),
            *self._adapters.work(now_s),
            *self._stages.work(now_s),
            *self._prewarming.work(now_s),
            *self.host_memory.work(now_s),
        ]

    def _drop_unasked(self, now_s: float) -> None:
        """Drop unsent placements that no service repeats: their cancel or their autoscaler was lost."""
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
        for instance_id in stale:  # of a replaced autoscaler
            if not self.placements[instance_id].sent:
                self._drop(instance_id)
        if command.model.base:
            return self._adapters.ask(event, now_s)
        placement = self.placements.get(command.instance_id)
        if placement is not None and not placement.sent and _was_patient(placement.command, command):
            self._placing.drop(command.instance_id)
            placement = None
        if placement is not None:
            placement.asked_at = now_s
        elif command.instance_id in self.fleet.instances.by_id:
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
            return []
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
        newest = self.fleet.instances.by_id.get(instance.instance_id)  # a late fact comes after the store's newer row
        if newest is None:
            return []
        effects = [*self._stages.row_changed(newest, now_s), *self._adapters.row_changed(newest, now_s)]
        return [*effects, *self._use_bytes(now_s)] if may_free_bytes else effects

    def _use_bytes(self, now_s: float) -> list[Effect]:
        self._prewarming.plan_soon()
        return [*self._placing.work(now_s), *self._prewarming.work(now_s)]

    def _end_placement(self, instance: Instance) -> None:
        """End a placement once its agents have reported every stage: their ledgers now count the bytes."""
        whole = instance.part_of or instance.instance_id
        placement = self._placing.placements.get(whole)
        if placement is None:
            return
        known = self.fleet.instances.by_id
        if instance.state.is_gone:
            self._placing.drop(whole)
        elif whole in known and all(placement.stage_id(n) in known for n in range(len(placement.stages))):
            self._placing.drop(whole, keep_claims=True)

    def _model(self, event: Event, now_s: float) -> list[Effect]:
        self.fleet.models[event.data.model.key] = event.data.model
        self.fleet.adapters.put(event.data.model)
        self.fleet.failed_nodes.forget(event.data.model.weights.digest)
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
        node_id, digest = event.data.node_id, event.data.digest
        if isinstance(event.data, facts.WeightsFetched):
            self.fleet.failed_nodes.forget(digest, node_id)
        rows = [i for i in self.fleet.on_node(node_id) if i.model_key == event.data.model_key]
        ids = [*(row.instance_id for row in rows), *(rest_of(row) for row in rows)]
        self.fleet.network.fetched(node_id, digest, ids, now_s)
        return []

    def _part_fetched(self, event: Event, now_s: float) -> list[Effect]:
        if self._params.follows_parts:
            self.fleet.network.fetched(event.data.node_id, event.data.digest, [event.data.instance_id], now_s)
        return []

    def _fetch_failed(self, event: Event, now_s: float) -> list[Effect]:
        self.host_memory.failed(event.data, now_s)
        return self._fetched(event, now_s)


def _was_patient(known: PlaceInstance, command: PlaceInstance) -> bool:
    return (known.waits and not command.waits) or (known.is_batch and not command.is_batch)
