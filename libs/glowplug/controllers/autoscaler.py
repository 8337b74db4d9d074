"""The autoscaler: owns the table of models and the number of instances of each. Nobody else changes either.

request.waiting | load report | tick ──▶ policy scaling ──▶ placer.place · agent.stop · agent.resume
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from glowplug.controllers import operator
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save, Tick
from glowplug.controllers.naming import Ids
from glowplug.controllers.views import InstanceView, LoadView
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.errors import Conflict, ModelNotFound
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.snapshot import FleetSnapshot, ModelLoad
from glowplug.events.commands import CancelPlacement, PlaceInstance, ResumeInstance, StopInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import InstanceFailed, ModelDeployed, ModelUndeployed, RequestWaiting, RouterLoadReported
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.reactive import ReactiveState


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerParams:
    repeat_s: float = 2.0  # an unanswered command is sent again after this
    drain_grace_s: float = 300.0  # longest drain: it ends hung engines, not slow answers
    backoff_s: float = 0.5  # after a failed start; doubles with each, up to max_backoff_s
    max_backoff_s: float = 30.0
    orphan_s: float = 10.0  # instances of an unknown model are stopped after this
    absent_s: float = 30.0  # a standby believes in a model without a row for so long, unless no model has one


@dataclass(slots=True)
class _Pending:
    """An instance asked for, of which no fact has come yet."""

    model_key: str
    wanted_at: float
    sent_at: float
    reason: str
    cause: Event | None


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
        self._state: Any = ReactiveState()
        self.models: dict[str, Model] = {}
        self.instances, self.loads = InstanceView(), LoadView()
        self._pending: dict[str, _Pending] = {}
        self._stopping: dict[str, float] = {}  # instance_id -> when its stop was last sent
        self._unloaded: set[str] = set()  # instance_ids an operator sent away: what they still stream is no demand
        self._asked: dict[str, str] = {}  # model_key -> who asked for an instance of it without a request
        self._waiting: dict[str, Event] = {}  # model_key -> the request that waits, for the trace
        self._unknown_since: dict[str, float] = {}  # model_key of instances without a model
        self._absent_since: dict[str, float] = {}  # model_key of models without a row
        self._undeployed: dict[str, int] = {}  # model_key -> revision it left with, until its row has left too
        self._failures: dict[str, tuple[int, float]] = {}  # model_key -> consecutive failures, not before

    # stimuli

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Facts, telemetry, operator requests (raise ModelNotFound, Conflict) and ticks."""
        if isinstance(stimulus, Tick):
            self.loads.expire(now_s)
            self._unknown_since = {k: at for k, at in self._unknown_since.items() if self.instances.of(k)}
            self._stopping = {i: at for i, at in self._stopping.items() if i in self.instances.by_id}
            keys = sorted({*self.models, *self.instances.model_keys})
            return [effect for key in keys for effect in self._balance(key, now_s)]
        if isinstance(stimulus, Event):
            return self._on_event(stimulus, now_s)
        return self._on_operator(stimulus, now_s)

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Tables `models` (ours: a lost row is written again, one of an undeployed model removed) and `instances`."""
        if table == "models":
            return self._restore_models(rows, now_s)
        for instance in self.instances.restore(rows, now_s):
            self._noticed(instance, now_s)
        return []

    def inherit(self, earlier: "AutoscalerController", now_s: float) -> None:
        """Demand, and models: a store that came back empty gets them from us. One that the leader has undeployed is
        known by the fact, or by its row having gone alone."""
        self.instances, self.loads = earlier.instances, earlier.loads
        absent = {k for k, since in earlier._absent_since.items() if now_s - since > self._params.absent_s}
        self.models = {key: model for key, model in earlier.models.items() if key not in absent}
        self._absent_since = {k: since for k, since in earlier._absent_since.items() if k in self.models}

    def _restore_models(self, rows: dict[str, Model], now_s: float) -> list[Effect]:
        """`rows` may have been read before the latest change here was written."""
        absent = [key for key in self.models if rows and key not in rows]
        self._absent_since = {key: self._absent_since.get(key, now_s) for key in absent}
        self._undeployed = {key: revision for key, revision in self._undeployed.items() if key in rows}
        left = [key for key, revision in self._undeployed.items() if rows[key].revision <= revision]
        for key, model in rows.items():
            if key not in left and (key not in self.models or model.revision > self.models[key].revision):
                self.models[key] = model
        lost = [Save("models", key, model) for key, model in self.models.items() if key not in rows]
        return [*lost, *(Remove("models", key) for key in left if key not in self.models)]

    def _on_event(self, event: Event, now_s: float) -> list[Effect]:
        data = event.data
        if isinstance(data, RouterLoadReported):
            self.loads.apply(data, now_s)
            return []
        if isinstance(data, RequestWaiting):
            if data.model_key not in self.models or now_s > data.deadline_at:
                return []  # a late fact: that request has been answered long ago
            self._waiting[data.model_key] = event
            return self._balance(data.model_key, now_s, waiting=data.num_waiting)
        if isinstance(data, ModelUndeployed):
            model = self.models.get(data.model_key)
            if model is not None and model.revision <= event.occurred_at * 1000:  # another led, and has let it go
                self._forget(model)
            return []
        instance = getattr(data, "instance", None)
        if isinstance(instance, Instance) and self.instances.apply(instance, now_s):
            self._noticed(instance, now_s)
            if isinstance(data, InstanceFailed):
                self._failed(instance, now_s)
            return self._balance(instance.model_key, now_s)
        return []

    def _noticed(self, instance: Instance, now_s: float) -> None:
        self._pending.pop(instance.instance_id, None)
        if instance.state is InstanceState.READY:
            self._failures.pop(instance.model_key, None)
            self._asked.pop(instance.model_key, None)
            self._waiting.pop(instance.model_key, None)
        if instance.state.is_gone:
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
            stops = self._stop_all(model.key, "undeployed by its operator", "undeploy", now_s)
            return [*stops, Remove("models", model.key), Publish(ModelUndeployed(model_key=model.key))]
        if isinstance(request, operator.Load):
            self._asked[model.key] = "loaded by its operator"
            self._failures.pop(model.key, None)
            self._unloaded -= set(self.instances.of(model.key))
            self.loads.touch(model.key, now_s)
            lifted = self._change(model, now_s, suspended=False) if model.suspended else []
            return [*lifted, *self._balance(model.key, now_s)]
        if isinstance(request, operator.Unload):
            self._asked.pop(model.key, None)
            self._unloaded |= {i for i, row in self.instances.of(model.key).items() if not row.state.is_gone}
            return self._stop_all(model.key, "unloaded by its operator", "unload", now_s)
        if isinstance(request, operator.Suspend):
            self._asked.pop(model.key, None)
            why = "drained by its operator: no instance of it starts until it is loaded again"
            return [
                self._by_operator(model.key, why, "suspend", now_s),
                *self._change(model, now_s, suspended=True),
                *self._stop_all(model.key, "drained by its operator", "drain", now_s),
            ]
        if isinstance(request, operator.Pin):
            why = "pinned by its operator: one instance stays" if request.pinned else "unpinned by its operator"
            pinned = self._by_operator(model.key, why, "pin" if request.pinned else "unpin", now_s)
            return [pinned, *self._change(model, now_s, pinned=request.pinned), *self._balance(model.key, now_s)]
        raise TypeError(f"not a stimulus of the autoscaler: {request!r}")

    def _deploy(self, request: operator.Deploy, now_s: float) -> list[Effect]:
        model, known = request.model, self.models.get(request.model.key)
        if known is not None and request.create:
            raise Conflict(f"model {model.name!r} exists (its key is {model.key!r})", param="name")
        for other in self.models.values():
            clash = set(model.names) & set(other.names) if other.key != model.key else set()
            if clash:
                raise Conflict(f"the name {min(clash)!r} belongs to model {other.name!r}", param="aliases")
        if known is not None:
            model = replace(model, suspended=known.suspended, pinned=model.pinned or known.pinned)
            if replace(model, revision=known.revision) == known:
                return []
        last = known.revision if known else self._undeployed.pop(model.key, -1)
        model = replace(model, revision=max(int(now_s * 1000), last + 1))
        self.models[model.key] = model
        self._unknown_since.pop(model.key, None)
        if model.preload and known is None:
            self._asked[model.key] = "preloaded, as its deployment asks"
            self.loads.touch(model.key, now_s)
        self._failures.pop(model.key, None)
        return [Save("models", model.key, model), Publish(ModelDeployed(model=model)), *self._balance(model.key, now_s)]

    def _change(self, model: Model, now_s: float, **fields: Any) -> list[Effect]:
        changed = replace(model, revision=max(int(now_s * 1000), model.revision + 1), **fields)
        self.models[model.key] = changed
        return [Save("models", model.key, changed), Publish(ModelDeployed(model=changed))]

    def _forget(self, model: Model) -> None:
        del self.models[model.key]
        self._undeployed[model.key] = model.revision
        for kept in (self._asked, self._waiting, self._failures):
            kept.pop(model.key, None)
        self.loads.forget(model.key)

    def _stop_all(
        self, model_key: str, reason: str, chosen: str, now_s: float, policy: str = operator.POLICY
    ) -> list[Effect]:
        """Cancel what is coming and drain what is there; one decision each, written when it is first carried out."""
        effects: list[Effect] = []

        def decide(instance_id: str) -> None:
            decision = ScaleDecision(
                model_key=model_key, num_wanted=0, reason=reason, inputs=self._figures(model_key, instance_id)
            )
            effects.append(Record(self._record(decision, instance_id, chosen, now_s, None, policy)))

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
        decision = ScaleDecision(model_key=model_key, num_wanted=0, reason=reason, inputs=self._figures(model_key))
        return Record(self._record(decision, "", chosen, now_s, None, operator.POLICY))

    def _figures(self, model_key: str, instance_id: str = "") -> dict[str, float | int | str]:
        """What the autoscaler knew of the load when somebody else decided."""
        load = self.loads.of(model_key)
        running = [i for i in self.instances.of(model_key).values() if not i.state.is_gone]
        figures: dict[str, float | int | str] = {
            "waiting": load.num_waiting,
            "in_flight": load.num_in_flight,
            "running": len(running),
        }
        if instance_id:
            figures["in_flight_here"] = load.in_flight_by_instance.get(instance_id, 0)
        return figures

    # balance

    def _balance(self, model_key: str, now_s: float, waiting: int = 0) -> list[Effect]:
        """Bring one model towards what the policy wants. Level-triggered: asks again what was not answered."""
        model = self.models.get(model_key)
        if model is None:
            return self._orphans(model_key, now_s)
        load = self.loads.of(model_key)
        load = replace(load, num_waiting=waiting, last_active_at=now_s) if waiting > load.num_waiting else load
        mine = self.instances.of(model_key)
        if any(i.state is InstanceState.READY for i in mine.values()):
            self._asked.pop(model_key, None)
        if asked := model_key in self._asked and not load.num_waiting:
            load = replace(load, num_waiting=1)
        gone = [i for i in load.in_flight_by_instance if i in self._unloaded or (i in mine and mine[i].state.is_gone)]
        if leaving := sum(load.in_flight_by_instance[i] for i in gone):
            load = replace(load, num_in_flight=max(0, load.num_in_flight - leaving))
        coming = [i for i, pending in self._pending.items() if pending.model_key == model_key]
        snapshot = FleetSnapshot(now_s=now_s, models=self.models, nodes={}, instances=mine, loads={model_key: load})
        decision, self._state = self._scale(snapshot, model, self._state)
        if asked:
            decision = replace(decision, reason=self._asked[model_key])
        num_running = len([i for i in snapshot.instances_of(model_key) if i.state is not InstanceState.DRAINING])
        missing = decision.num_wanted - num_running - len(coming)
        back = [i for i in decision.resume if i in self._stopping and i not in self._unloaded and not model.suspended]
        resume = back[: max(0, missing)]
        effects = self._resume(decision, resume, now_s)
        effects += self._add(model, decision, missing - len(resume), load, now_s)
        if missing < 0 and not load.num_waiting:
            for instance_id in coming[:-missing]:
                effects.append(Record(self._record(decision, instance_id, "cancel", now_s, None)))
                effects += self._cancel(instance_id, "no longer wanted")
        effects += self._drain(decision, now_s)
        return effects + self._repeat(model_key, now_s)

    def _add(self, model: Model, decision: ScaleDecision, num: int, load: ModelLoad, now_s: float) -> list[Effect]:
        if num <= 0 or now_s < self._failures.get(model.key, (0, 0.0))[1]:
            return []
        cause = self._waiting.get(model.key)
        policy = operator.POLICY if decision.reason == self._asked.get(model.key) else self._policy
        effects: list[Effect] = []
        for _ in range(num):
            instance_id = self._ids.next(model.key)
            wanted_at = cause.data.waiting_since if cause and load.num_waiting else now_s
            self._pending[instance_id] = _Pending(model.key, wanted_at, now_s, decision.reason, cause)
            effects += [
                Record(self._record(decision, instance_id, "start", now_s, cause, policy), cause),
                self._place(instance_id, self._pending[instance_id], model),
            ]
        return effects

    def _place(self, instance_id: str, pending: _Pending, model: Model) -> Publish:
        command = PlaceInstance(
            instance_id=instance_id, model=model, reason=pending.reason, wanted_at=pending.wanted_at
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
        if not self.loads.is_fresh(now_s) and not self.models[decision.model_key].suspended:
            return []  # no router speaks: nothing may be called idle
        for instance_id in decision.drain:
            first = instance_id not in self._stopping
            stop = self._stop(self.instances.by_id[instance_id], decision.reason, now_s)
            if stop and first:
                effects.append(Record(self._record(decision, instance_id, "drain", now_s, None)))
            effects += stop
        return effects

    def _stop(self, instance: Instance, reason: str, now_s: float) -> list[Effect]:
        if now_s - self._stopping.get(instance.instance_id, -1e9) < self._params.repeat_s:
            return []
        self._stopping[instance.instance_id] = now_s
        command = StopInstance(
            target=instance.node_id,
            instance_id=instance.instance_id,
            reason=reason,
            grace_s=self._params.drain_grace_s,
        )
        return [Publish(command)]

    def _resume(self, decision: ScaleDecision, instance_ids: list[str], now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for instance_id in instance_ids:
            del self._stopping[instance_id]
            instance = self.instances.by_id[instance_id]
            effects.append(Record(self._record(decision, instance_id, "resume", now_s, None)))
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

    def _record(
        self,
        decision: ScaleDecision,
        instance_id: str,
        chosen: str,
        now_s: float,
        cause: Event | None,
        policy: str = "",
    ) -> DecisionRecord:
        return DecisionRecord(
            decision_id=self._ids.next("d-s"),
            kind="scale",
            policy=policy or self._policy,
            service="autoscaler",
            reason=decision.reason,
            made_at=now_s,
            model_key=decision.model_key,
            instance_id=instance_id,
            request_id=cause.data.request_id if cause else "",
            chosen=chosen,
            inputs=decision.inputs,
            cause_id=cause.event_id if cause else "",
            traceparent=cause.traceparent if cause else "",
        )
