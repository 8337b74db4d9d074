"""The autoscaler: owns the table of models and the number of instances of each. Nobody else changes either.

request.waiting | load report | tick ──▶ policy scaling ──▶ placer.place · agent.stop · agent.resume
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.consolidation import Consolidations
from glowplug.controllers.autoscaler.forecasts import ForecastBook
from glowplug.controllers.autoscaler.models import ModelTable
from glowplug.controllers.autoscaler.params import AutoscalerParams, Pending
from glowplug.controllers.autoscaler.view import Records, as_told, figures, gpus_without_room, snapshot_of, without_gone
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save, Tick
from glowplug.controllers.naming import Ids
from glowplug.domain.errors import ModelNotFound
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import CancelPlacement, PlaceInstance, ResumeInstance, StopInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import (
    ForecastMade,
    InstanceFailed,
    ModelDeployed,
    ModelUndeployed,
    RequestWaiting,
    RouterLoadReported,
)
from glowplug.fleet.demand import Demand
from glowplug.fleet.tables import InstanceTable
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.standing import worths


class AutoscalerController:
    """`scale` is a policy of the room "scaling"; `epoch` makes instance ids unique over restarts."""

    def __init__(
        self,
        scale: Callable[..., tuple[ScaleDecision, Any]],
        policy: str,
        epoch: int,
        params: AutoscalerParams = AutoscalerParams(),
    ) -> None:
        self._scale, self._policy, self._params = scale, policy, params
        self._ids = Ids(epoch)
        self._records = Records(self._ids, policy)
        self._consolidations = Consolidations(self._records, params.repeat_s)
        self._states: dict[str, Any] = {}  # model_key -> what the policy remembers of it
        self._table = ModelTable()
        self.instances, self.loads, self.forecasts = InstanceTable(), Demand(), ForecastBook()
        self._pending: dict[str, Pending] = {}
        self._stopping: dict[str, float] = {}  # instance_id -> when its stop was last sent
        self._resumed: dict[str, float] = {}  # instance_id -> when it was told to come back
        self._unloaded: set[str] = set()  # instance_ids an operator sent away: what they still stream is no demand
        self._asked: dict[str, str] = {}  # model_key -> who asked for an instance of it without a request
        self._waiting: dict[str, Event] = {}  # model_key -> the request that waits, for the trace
        self._unknown_since: dict[str, float] = {}  # model_key of instances without a model
        self._failures: dict[str, tuple[int, float]] = {}  # model_key -> consecutive failures, not before
        self._resting: dict[str, float] = {}  # model_key with nothing to balance -> not before

    @property
    def models(self) -> dict[str, Model]:
        """model_key -> Model, as deployed."""
        return self._table.by_key

    # stimuli

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Facts, telemetry, operator requests (raise ModelNotFound, Conflict) and ticks."""
        if isinstance(stimulus, Tick):
            self.loads.expire(now_s)
            self.forecasts.expire(now_s)
            self._consolidations.keep(self.instances.by_id)
            self._unknown_since = {k: at for k, at in self._unknown_since.items() if self.instances.of(k)}
            self._stopping = {i: at for i, at in self._stopping.items() if i in self.instances.by_id}
            self._resumed = {i: at for i, at in self._resumed.items() if now_s - at < self._params.repeat_s}
            keys = sorted({*self.models, *self.instances.model_keys})
            due = (key for key in keys if not now_s < self._resting.get(key, 0.0))
            return [effect for key in due for effect in self._balance(key, now_s)]
        if isinstance(stimulus, Event):
            return self._on_event(stimulus, now_s)
        return self._on_operator(stimulus, now_s)

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Tables `models` (ours: a lost row is written again, one of an undeployed model removed) and `instances`."""
        self._resting.clear()
        if table == "models":
            return self._table.restore(rows, now_s)
        for instance in self.instances.restore(rows, now_s):
            self._noticed(instance, now_s)
        return []

    def inherit(self, earlier: "AutoscalerController", now_s: float) -> None:
        """Demand, and models: a store that came back empty gets them from us. One that the leader has undeployed is
        known by the fact, or by its row having gone alone."""
        self.instances, self.loads, self.forecasts = earlier.instances, earlier.loads, earlier.forecasts
        self._table.inherit(earlier._table, now_s, self._params.absent_s)

    def _on_event(self, event: Event, now_s: float) -> list[Effect]:
        data = event.data
        if isinstance(data, RouterLoadReported):
            for key in self.loads.apply(data, now_s, event.occurred_at):
                self._resting.pop(key, None)
            return []
        if isinstance(data, ForecastMade):
            self.forecasts.apply(data)
            self._resting.pop(data.model_key, None)
            return []
        if isinstance(data, RequestWaiting):
            if data.model_key not in self.models:
                return []
            if not self.loads.wait(data, now_s, event.occurred_at) and not self.loads.of(data.model_key).num_waiting:
                return []  # a late fact, and nobody waits by what is newer: that request has been answered long ago
            self._waiting[data.model_key] = event
            self.loads.touch(data.model_key, now_s)  # a router's report of it may be half a second behind
            return self._balance(data.model_key, now_s)
        if isinstance(data, ModelUndeployed):
            model = self.models.get(data.model_key)
            if model is not None and model.revision <= event.occurred_at * 1000:  # another led, and has let it go
                self._forget(model)
            return []
        instance = getattr(data, "instance", None)
        if isinstance(instance, Instance) and self.instances.apply(instance, now_s):
            self._noticed(instance, now_s)
            if isinstance(data, InstanceFailed) and not (instance.replica or instance.part_of):
                self._failed(instance, now_s)  # a replica's end is nobody's wait, a stage's is its pipeline's too
            return self._balance(instance.model_key, now_s)
        return []

    def _noticed(self, instance: Instance, now_s: float) -> None:
        self._pending.pop(instance.instance_id, None)
        if instance.state is InstanceState.READY and instance.serves:
            self._failures.pop(instance.model_key, None)
            self._asked.pop(instance.model_key, None)
            self._waiting.pop(instance.model_key, None)
        if instance.state.is_gone or instance.state.is_dormant:
            self._stopping.pop(instance.instance_id, None)
            self._unloaded.discard(instance.instance_id)

    def _failed(self, instance: Instance, now_s: float) -> None:
        count = self._failures.get(instance.model_key, (0, 0.0))[0] + 1
        pause = min(self._params.backoff_s * 2 ** (count - 1), self._params.max_backoff_s)
        if instance.model_key in self.models:
            self._failures[instance.model_key] = (count, now_s + pause)
        self._asked.pop(instance.model_key, None)

    # operator

    def _on_operator(self, request: Any, now_s: float) -> list[Effect]:
        if isinstance(request, operator.Deploy):
            return self._deploy(request, now_s)
        model = self.models.get(request.model_key)
        if model is None:
            raise ModelNotFound(f"no model {request.model_key!r} is deployed", param="model")
        if isinstance(request, operator.Undeploy):
            self._forget(model)
            stops = self._stop_all(model.key, "an operator has undeployed it", "undeploy", now_s)
            return [*stops, Remove("models", model.key), Publish(ModelUndeployed(model_key=model.key))]
        if isinstance(request, operator.Load):
            self._asked[model.key] = "an operator has loaded it"
            self._failures.pop(model.key, None)
            self._unloaded -= set(self.instances.of(model.key))
            self.loads.touch(model.key, now_s)
            lifted = self._table.change(model, now_s, suspended=False) if model.suspended else []
            return [*lifted, *self._balance(model.key, now_s)]
        if isinstance(request, operator.Unload):
            self._asked.pop(model.key, None)
            self._states.pop(model.key, None)  # the load of the last seconds is no demand either
            self._unloaded |= {i for i, row in self.instances.of(model.key).items() if not row.state.is_gone}
            return self._stop_all(model.key, "an operator has unloaded it", "unload", now_s)
        if isinstance(request, operator.Suspend):
            self._asked.pop(model.key, None)
            why = f"an operator has drained {model.name}, and no instance of it starts until it is loaded again"
            return [
                self._by_operator(model.key, why, "suspend", now_s),
                *self._table.change(model, now_s, suspended=True),
                *self._stop_all(model.key, "an operator has drained the model", "drain", now_s),
            ]
        if isinstance(request, operator.Pin):
            unpinned = f"an operator has unpinned {model.name}, and its last instance may leave"
            why = f"an operator has pinned {model.name}, and one instance stays" if request.pinned else unpinned
            pinned = self._by_operator(model.key, why, "pin" if request.pinned else "unpin", now_s)
            return [pinned, *self._table.change(model, now_s, pinned=request.pinned), *self._balance(model.key, now_s)]
        raise TypeError(f"not a stimulus of the autoscaler: {request!r}")

    def _deploy(self, request: operator.Deploy, now_s: float) -> list[Effect]:
        known = self.models.get(request.model.key)
        model = self._table.deploy(request.model, create=request.create, now_s=now_s)
        if model is None:
            return []
        self._unknown_since.pop(model.key, None)
        if model.preload and known is None:
            self._asked[model.key] = "its deployment asks for one at once"
            self.loads.touch(model.key, now_s)
        self._failures.pop(model.key, None)
        return [Save("models", model.key, model), Publish(ModelDeployed(model=model)), *self._balance(model.key, now_s)]

    def _forget(self, model: Model) -> None:
        self._table.forget(model)
        for kept in (self._asked, self._waiting, self._failures, self._states, self._resting):
            kept.pop(model.key, None)
        self.forecasts.forget(model.key)
        self.loads.forget(model.key)

    def _stop_all(
        self, model_key: str, reason: str, chosen: str, now_s: float, policy: str = operator.POLICY
    ) -> list[Effect]:
        """Cancel what is coming and drain what is there; one decision each, written when it is first carried out."""
        effects: list[Effect] = []

        def decide(instance_id: str) -> None:
            decision = ScaleDecision(
                model_key=model_key,
                num_wanted=0,
                reason=reason,
                inputs=figures(self.loads.of(model_key), self.instances.of(model_key), instance_id),
            )
            effects.append(Record(self._records.of(decision, instance_id, chosen, now_s, None, policy)))

        for instance_id, pending in list(self._pending.items()):
            if pending.model_key == model_key:
                decide(instance_id)
                effects += self._cancel(instance_id, reason)
        for instance in self.instances.of(model_key).values():
            if not instance.state.is_gone:
                if instance.instance_id not in self._stopping:
                    decide(instance.instance_id)
                effects += self._stop(instance, reason, now_s)
        return effects

    def _by_operator(self, model_key: str, reason: str, chosen: str, now_s: float) -> Record:
        """What an operator decided about the model itself."""
        decision = ScaleDecision(
            model_key=model_key,
            num_wanted=0,
            reason=reason,
            inputs=figures(self.loads.of(model_key), self.instances.of(model_key)),
        )
        return Record(self._records.of(decision, "", chosen, now_s, None, operator.POLICY))

    # balance

    def _balance(self, model_key: str, now_s: float) -> list[Effect]:
        """Bring one model towards what the policy wants. Level-triggered: asks again what was not answered."""
        model = self.models.get(model_key)
        if model is None:
            return self._orphans(model_key, now_s)
        load = self.loads.of(model_key)
        mine = self.instances.living(model_key)
        if model_key in self._asked and any(i.state is InstanceState.READY and i.serves for i in mine.values()):
            self._asked.pop(model_key, None)
        if asked := model_key in self._asked and not load.num_waiting:
            load = replace(load, num_waiting=1)
        load = without_gone(load, self.instances.of(model_key), self._unloaded)
        coming = [i for i, pending in self._pending.items() if pending.model_key == model_key]
        num_pending = sum(self._pending[i].num_required for i in coming)
        told = {i: InstanceState.READY for i, at in self._resumed.items() if now_s - at < self._params.repeat_s}
        told |= {i: InstanceState.DRAINING for i, at in self._stopping.items() if now_s - at < self._params.repeat_s}
        snapshot = snapshot_of(
            model,
            load,
            as_told(mine, told),
            self.forecasts,
            num_pending=num_pending,
            gpus_without_room=gpus_without_room(self._pending.values(), self.models, model_key, now_s),
            now_s=now_s,
            lead_s=self._params.lead_s,
        )
        decision, self._states[model_key] = self._scale(snapshot, model, self._states.get(model_key))
        if asked:
            decision = replace(decision, reason=self._asked[model_key])
        there = [i for i in snapshot.instances_of(model_key) if i.state is not InstanceState.DRAINING]
        missing = decision.num_wanted - sum(worths(there).values()) - num_pending
        back = [i for i in decision.resume if i in self._stopping and i not in self._unloaded and not model.suspended]
        resume = back[: max(0, missing)]
        effects = self._resume(decision, resume, now_s)
        effects += self._add(model, decision, missing - len(resume), load, now_s)
        if missing < 0 and not load.num_waiting:
            for instance_id in coming:
                if missing + self._pending[instance_id].num_required > 0:
                    continue
                missing += self._pending[instance_id].num_required
                effects.append(Record(self._records.of(decision, instance_id, "cancel", now_s)))
                effects += self._cancel(instance_id, "it is no longer wanted")
        effects += self._drain(decision, now_s)
        if self._params.consolidate:
            effects += self._consolidations.of_model(mine, decision, now_s)
        effects += self._repeat(model_key, now_s)
        is_empty = not coming and all(i.state.is_dormant for i in mine.values())
        if is_empty and not (effects or decision.num_wanted or load.num_waiting or load.num_in_flight):
            self._resting[model_key] = now_s + self._params.rest_s
        else:
            self._resting.pop(model_key, None)
        return effects

    def _add(self, model: Model, decision: ScaleDecision, num: int, load: ModelLoad, now_s: float) -> list[Effect]:
        if num <= 0 or now_s < self._failures.get(model.key, (0, 0.0))[1]:
            return []
        cause = self._waiting.get(model.key)
        if cause and load.num_waiting and now_s - cause.data.waiting_since < self._params.gather_s:
            return []
        policy = operator.POLICY if decision.reason == self._asked.get(model.key) else self._policy
        effects: list[Effect] = []
        while num > 0:
            instance_id, num_required = self._ids.next(model.key), min(num, max(1, decision.group_size))
            num -= num_required
            wanted_at = cause.data.waiting_since if cause and load.num_waiting else now_s
            self._pending[instance_id] = Pending(model.key, wanted_at, now_s, decision.reason, cause, num_required)
            effects += [
                Record(self._records.of(decision, instance_id, "start", now_s, cause, policy), cause),
                self._place(instance_id, self._pending[instance_id], model),
            ]
        return effects

    def _place(self, instance_id: str, pending: Pending, model: Model) -> Publish:
        command = PlaceInstance(
            instance_id=instance_id,
            model=model,
            reason=pending.reason,
            wanted_at=pending.wanted_at,
            num_required=pending.num_required,
        )
        return Publish(command, pending.cause)

    def _repeat(self, model_key: str, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for instance_id, pending in self._pending.items():
            if pending.model_key == model_key and now_s - pending.sent_at >= self._params.repeat_s:
                pending.sent_at = now_s
                effects.append(self._place(instance_id, pending, self.models[model_key]))
        return effects

    def _cancel(self, instance_id: str, reason: str) -> list[Effect]:
        del self._pending[instance_id]
        return [Publish(CancelPlacement(instance_id=instance_id, reason=reason))]

    def _drain(self, decision: ScaleDecision, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if not decision.drain:
            return []
        if not self.loads.is_fresh(now_s) and not self.models[decision.model_key].suspended:
            return []  # no router speaks: nothing may be called idle
        becomes = "stopped" if self.models[decision.model_key].suspended else self._params.stop_becomes
        for instance_id in decision.drain:
            if now_s - self._resumed.get(instance_id, float("-inf")) < self._params.repeat_s:
                continue  # told to come back a moment ago: no two words at once
            first = instance_id not in self._stopping
            stop = self._stop(self.instances.by_id[instance_id], decision.reason, now_s, becomes)
            if stop and first:
                effects.append(Record(self._records.of(decision, instance_id, "drain", now_s)))
            effects += stop
        return effects

    def _stop(self, instance: Instance, reason: str, now_s: float, becomes: str = "stopped") -> list[Effect]:
        if now_s - self._stopping.get(instance.instance_id, -1e9) < self._params.repeat_s:
            return []
        self._stopping[instance.instance_id] = now_s
        self._resumed.pop(instance.instance_id, None)
        command = StopInstance(
            target=instance.node_id,
            instance_id=instance.instance_id,
            reason=reason,
            grace_s=0.0 if instance.state.is_dormant else self._params.drain_grace_s,
            becomes=becomes,
        )
        return [Publish(command)]

    def _resume(self, decision: ScaleDecision, instance_ids: list[str], now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for instance_id in instance_ids:
            del self._stopping[instance_id]
            self._resumed[instance_id] = now_s
            instance = self.instances.by_id[instance_id]
            effects.append(Record(self._records.of(decision, instance_id, "resume", now_s)))
            effects.append(
                Publish(ResumeInstance(target=instance.node_id, instance_id=instance_id, reason=decision.reason))
            )
        return effects

    def _orphans(self, model_key: str, now_s: float) -> list[Effect]:
        """Instances of a model that is not deployed are stopped, but not before the models have had time to load."""
        since = self._unknown_since.setdefault(model_key, now_s)
        if now_s - since < self._params.orphan_s:
            return []
        return self._stop_all(model_key, "its model is not deployed", "stop", now_s, policy="deployed_only")
