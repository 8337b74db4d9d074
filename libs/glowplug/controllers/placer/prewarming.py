"""Prewarming: the placer orders what the policy plans, again and again until the agent reports the replica.

A plan is made when a forecast comes (a window has closed), when an instance starts, drains or ends, when bytes come
free (a draining instance gave some of its KV cache back, WarmServe section 4.1), and each `prewarm_every_s`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from glowplug.controllers.effects import Effect, Publish, Record
from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.controllers.placer.placement import NEVER, stop
from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.domain.model import Model
from glowplug.events.commands import FetchWeights, StartInstance
from glowplug.events.facts import ForecastMade
from glowplug.policies.placement.shape import weights_per_gpu
from glowplug.policies.placement.warmserve_evict_aware import PrewarmStep
from glowplug.policies.placement.warmserve_scores import SCORE_UNIT
from glowplug.policies.prewarming.port import PrewarmPlan, PrewarmView, weighs_worth

URGENCY = -100  # of a replica's fetch: below those of instances that requests wait for
GIVEN_UP = "dropped"  # holder of the promise of a replica that was asked to leave

Prewarm = Callable[[PrewarmView], PrewarmPlan]
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Ordered:
    """A replica that was ordered and that its agent has not reported yet."""

    row: Instance
    commands: tuple[FetchWeights | StartInstance, ...]
    began_at: float
    sent_at: float


class Prewarming:
    """Replicas that were ordered or dropped, and the planning of new ones."""

    def __init__(self, fleet: Fleet, prewarm: Prewarm | None) -> None:
        self.fleet, self._prewarm = fleet, prewarm
        self._weighs = weighs_worth(prewarm)
        self._ordered: dict[str, _Ordered] = {}
        self._dropped: dict[str, tuple[float, str]] = {}  # replica -> when it was last dropped, and why
        self._failed_at: dict[str, float] = {}  # model_key -> when a replica of it last failed
        self._planned_at = NEVER
        self._is_due = False

    def forecast(self, fact: ForecastMade, now_s: float) -> None:
        """Take the forecast of a closed window."""
        self.fleet.forecasts.take(fact, now_s)
        self._is_due = True

    def row_changed(self, row: Instance, now_s: float) -> None:
        """Take a changed row: it reports an ordered replica, or the start that took the replica's place."""
        taken = self.fleet.capacity.taken
        if row.instance_id in self._ordered:
            del self._ordered[row.instance_id]
            self.fleet.promised.discard(row.instance_id)
        for replica_id in [r for r in self._ordered if taken.get(r) == row.instance_id]:
            self._forget(replica_id)
        if row.replica and row.state is InstanceState.FAILED:
            self._failed_at[row.model_key] = now_s

    def plan_soon(self) -> None:
        """Plan at the next chance: bytes came free, or an instance started, drained or ended."""
        self._is_due = True

    def work(self, now_s: float) -> list[Effect]:
        """Repeat orders that no agent has confirmed, then make a plan where one is due."""
        if self._prewarm is None:
            return []
        effects = [*self._repeat(now_s), *self._drop_again(now_s)]
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
        effects = [e for replica_id, why in dropped.items() for e in self._drop(replica_id, why, now_s)]
        for step in plan.steps:
            effects += self._order(step, plan, view, now_s)
        self._is_due = bool(plan.steps)  # there may be more to do than one plan holds
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

    def _weighed(self, some: Iterable[_T]) -> Iterable[_T]:
        """Return `some` where the policy weighs what copies are worth; else nothing."""
        return some if self._weighs else ()

    # ordering

    def _order(self, step: PrewarmStep, plan: PrewarmPlan, view: PrewarmView, now_s: float) -> list[Effect]:
        """Order one replica; its bytes, and the replicas it replaces, are promised to it at once."""
        capacity, model = self.fleet.capacity, view.models[step.model_key]
        replica_id = self.fleet.ids.next("r")
        decided = self._record(step, replica_id, plan, view)
        row = _replica(step, replica_id, model, decided.decision_id, now_s)
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
            decision_id=decided.decision_id,
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
        return [Record(decided), *(Publish(command) for command in commands)]

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
        """Stop waiting for an ordered replica, and release its promises."""
        del self._ordered[replica_id]
        self.fleet.promised.discard(replica_id)
        self.fleet.capacity.taken.pop(replica_id, None)
        self.fleet.capacity.forget(replica_id)

    def _drop(self, replica_id: str, why: str, now_s: float) -> list[Effect]:
        row = self.fleet.instances.by_id.get(replica_id)
        if row is None or now_s - self._dropped.get(replica_id, (NEVER, ""))[0] < self.fleet.params.repeat_s:
            return []
        self._dropped[replica_id] = now_s, why
        self.fleet.capacity.take(replica_id, GIVEN_UP)
        return [Publish(stop(row.node_id, replica_id, why, 0.0))]

    def _drop_again(self, now_s: float) -> list[Effect]:
        rows = self.fleet.instances.by_id
        self._dropped = {r: at for r, at in self._dropped.items() if r in rows and not rows[r].state.is_gone}
        return [e for replica_id, (_, why) in self._dropped.items() for e in self._drop(replica_id, why, now_s)]

    def _record(self, step: PrewarmStep, replica_id: str, plan: PrewarmPlan, view: PrewarmView) -> DecisionRecord:
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
                why="it gives way" if row.instance_id in step.drop else f"a copy of {row.model_key} lies there too",
                unit=SCORE_UNIT,
            )
            for row in self.fleet.capacity.dormant.get(step.node_id, ())
            if any(worker.gpu_id in on for worker in row.workers)
        )
        return DecisionRecord(
            decision_id=self.fleet.ids.next("d-p"),
            kind="prewarm",
            policy=self.fleet.policies.get("prewarming", ""),
            service="placer",
            reason=f"a copy of {name} is prewarmed on {where}" + (f": {step.reason}" if step.reason else ""),
            made_at=view.now_s,
            model_key=step.model_key,
            instance_id=replica_id,
            node_id=step.node_id,
            gpu_id=step.gpu_ids[0],
            chosen=where,
            inputs=inputs,
            rivals=rivals,
        )


def _replica(step: PrewarmStep, replica_id: str, model: Model, decision_id: str, now_s: float) -> Instance:
    """The row that the replica's agent will write."""
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
        created_at=now_s,
        decision_id=decision_id,
        replica=True,
    )
