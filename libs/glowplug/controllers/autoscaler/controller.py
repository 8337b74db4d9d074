"""The autoscaler: the only writer of the table of models and of each model's number of instances.

    request.waiting | load report | forecast | instance fact | operator | tick
        ──▶ policy `scaling` per model ──▶ placer.place · placer.cancel · agent.stop · agent.resume · agent.consolidate

What it is notified of (reads.py)
  - `model.keep_alive_asked` overrides the model's own keep-alive until none of its instances serves.
  - Operators, over REST or model files (operator.py). Errors: ModelNotFound if not deployed; Conflict for Deploy with a
    taken name, or Load on one node while another has an equally near copy; EngineMisconfigured where no node's engine
    can sleep as asked. Tenants and keys are in access.py.
  - Ticks balance every model: an idle one every `rest_s`, and one whose policy answer still holds (`stands_until`) only
    on a change.

What it asks
  - The commands above; unanswered ones again after `repeat_s`. Each decision is recorded once, with its figures.
  - Rows of `models`, with `model.deployed` and `model.undeployed`, and of `scaling_learned`.

What it promises
  - It meets the policy's number within the model's bounds: asks for missing instances (taking back draining ones
    first), cancels unwanted starts, drains spare instances.
  - A model deployed or pinned asleep gets a serving instance or a sleeping engine once memory is free: keeping.py.
  - Outdated instances are replaced: replacing.py.
  - After a failed start the next one waits, longer each time, up to `max_backoff_s`, until one is READY. A start that
    may be tried on another node (`Instance.tries_left`) is tried there at once.
  - No instance gets a stop and a resume within `repeat_s`, and none unloaded by an operator is taken back.
  - Instances of models not deployed are stopped after `orphan_s`.
  - A deployed model's lost row is written again, an undeployed one's removed.

What it never does
  - It chooses no GPU and no victim (the placer does) and starts no engine (the agent does).
  - It drains nothing as idle while no router reports its load.
  - It does not change the policy's number; only an operator's order overrides it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, get_args

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.access import AccessRows
from glowplug.controllers.autoscaler.adapting import on_base
from glowplug.controllers.autoscaler.decisions import Decisions, figures
from glowplug.controllers.autoscaler.keeping import BECOMES, check_able, why_unable
from glowplug.controllers.autoscaler.learned import SCALING_LEARNED, Learned
from glowplug.controllers.autoscaler.models import ModelRecord, ModelRecords, Order, OrderKind, Start
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.autoscaler.replacing import ends_at_once, outdated_of
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save, Tick
from glowplug.controllers.naming import Ids
from glowplug.controllers.port import Handlers, dispatch
from glowplug.domain.access import KEYS, TENANTS, Priority
from glowplug.domain.errors import Conflict, InvalidModelFile, NotFound
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Becomes, Instance, InstanceState
from glowplug.domain.model import KeptAt, Model, Rung
from glowplug.domain.phrasing import OUTDATED
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import facts
from glowplug.events.commands import CancelPlacement, ConsolidateInstance, PlaceInstance, ResumeInstance, StopInstance
from glowplug.events.envelope import Event
from glowplug.fleet.adapters import with_adapters
from glowplug.fleet.demand import Demand
from glowplug.fleet.status import is_ready, lacks_one_asleep
from glowplug.fleet.tables import InstanceTable, find_model
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.hydraserve import ConsolidationDecision, ConsolidationKind, consolidate
from glowplug.policies.scaling.port import ScalingView, needed_by_pipeline, without_load, worths

# Adapters: a base runs its adapters' requests, so its demand includes theirs. An adapter needs at most as many
# instances as its base has READY, or one, waiting for the first. While its requests wait, all load of its hosts counts
# as its own: it spreads to another host once its hosts are full, whatever fills them.

MOST_NAMED = 3


def load_of(record: ModelRecord, models: ModelRecords, loads: Demand, instances: InstanceTable) -> ModelLoad:
    load, model = loads.of(record.key), record.model
    if model is not None and model.base:
        return _crowded(load, record, models, loads, instances) if load.num_waiting else load
    return with_adapters(record.key, loads, instances) if models.adapters_of(record.key) else load


def _crowded(
    load: ModelLoad, record: ModelRecord, models: ModelRecords, loads: Demand, instances: InstanceTable
) -> ModelLoad:
    hosts = {row.host_id for row in instances.living(record.key).values() if is_ready(row)}
    if not hosts or record.model is None:
        return load
    together = load_of(models.of(record.model.base), models, loads, instances).in_flight_by_instance
    return replace(load, num_in_flight=max(load.num_in_flight, sum(together.get(host, 0) for host in hosts)))


def as_hosted(model: Model, models: ModelRecords, instances: InstanceTable) -> Model:
    """Bound an adapter by its number of hosts, and suspend it with its base."""
    base = models.find(model.base)
    num_hosts = sum(row.is_whole and is_ready(row) for row in instances.living(model.base).values())
    most = min(model.max_instances, max(1, num_hosts))
    return replace(
        model,
        suspended=model.suspended or (base is not None and base.suspended),
        max_instances=most,
        min_instances=min(model.min_instances, most),
    )


def following(base: Model, models: ModelRecords, nodes: Iterable[Node]) -> list[Model]:
    """Adapt a base's adapters to its new declaration. Raises Conflict where one cannot follow."""
    found, nodes = [], list(nodes)
    for adapter in models.adapters_of(base.key).values():
        try:
            found.append(on_base(adapter, {base.key: base}, nodes))
        except InvalidModelFile as error:
            why = f"its adapter {adapter.name} cannot follow: {error.message}; undeploy it first"
            raise Conflict(why, param=error.param) from error
    return found


def check_no_adapters_of(model: Model, models: ModelRecords) -> None:
    """Raise Conflict where an adapter to deploy has adapters itself."""
    if model.base and models.adapters_of(model.key):
        raise Conflict(f"{model.name} has adapters, and so becomes no adapter itself", param="base")


def check_no_adapters(model: Model, models: ModelRecords) -> None:
    """Raise Conflict where a model to undeploy has adapters."""
    names = sorted(one.name for one in models.adapters_of(model.key).values())
    if names:
        shown = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else "")
        raise Conflict(f"{model.name} is the base of {shown}: undeploy its adapters first", param="model")


def check_base_runs(model: Model, models: ModelRecords) -> None:
    """Raise Conflict where an operator has drained the base of an adapter to load."""
    base = models.find(model.base) if model.base else None
    if base is not None and base.suspended:
        raise Conflict(f"its base {base.name} has been drained by its operator: load {base.name} first", param="model")


# Consolidation of pipelines into one-stage instances, all at once and level by level (HydraServe section 6). A scale
# down commands the first stage, and the placer ends the others when it is whole; a scale up commands the later stages
# first, because the placer ends those of an instance that is no longer a pipeline. Departures: the paper converts all
# stages at once; here a stage that fails to become whole in time is recorded and asked again until it is.

POLICY = "hydraserve_consolidation"


@dataclass(slots=True)
class _Stage:
    """A stage not yet whole. Its decision is final: loading cannot be taken back."""

    decided: ConsolidationDecision | None = None  # of the pipeline, kept with its first stage
    asked_at: float = float("-inf")
    is_growing: bool = False  # as its row has shown


class Consolidations:
    def __init__(self, decisions: Decisions, repeat_s: float) -> None:
        self._decisions, self._repeat_s = decisions, repeat_s
        self._stages: dict[str, _Stage] = {}

    def of_model(self, rows: Mapping[str, Instance], decision: ScaleDecision, now_s: float) -> list[Effect]:
        """Decide on pipelines and command their stages. `rows`: every living row of the model; `decision`: the scaling
        policy's answer now."""
        pipelines = [i for i in rows.values() if not i.is_whole and i.serves and i.state is InstanceState.READY]
        if not pipelines:
            return []
        pipelines.sort(key=lambda i: (i.created_at, i.instance_id))
        effects = self._unconsolidated(rows, decision, now_s)
        effects += self._decide(pipelines, rows, decision, now_s)
        for instance in pipelines:
            decided = self._decided(instance)
            assert decided is not None
            for target in _targets(instance, decided, rows):
                stage = self._stage(target)
                if not target.consolidating and now_s - stage.asked_at >= self._repeat_s:
                    stage.asked_at = now_s
                    command = ConsolidateInstance(
                        target=target.node_id, instance_id=target.instance_id, reason=decided.reason
                    )
                    effects.append(Publish(command))
        return effects

    def expire(self, known: Mapping[str, Instance]) -> None:
        self._stages = {i: stage for i, stage in self._stages.items() if i in known and not known[i].is_whole}

    def _stage(self, instance: Instance) -> _Stage:
        return self._stages.setdefault(instance.instance_id, _Stage())

    def _decided(self, instance: Instance) -> ConsolidationDecision | None:
        stage = self._stages.get(instance.instance_id)
        return stage.decided if stage is not None else None

    def _unconsolidated(self, rows: Mapping[str, Instance], decision: ScaleDecision, now_s: float) -> list[Effect]:
        """Record stages that failed to become whole: their pipelines serve on."""
        effects: list[Effect] = []
        for instance_id, row in rows.items():
            if row.consolidating:
                self._stage(row).is_growing = True
            elif (stage := self._stages.get(instance_id)) is not None and stage.is_growing:
                stage.is_growing = False
                if not row.is_whole and row.state is InstanceState.READY:
                    effects.append(self._record(row, decision, row.reason, "unconsolidated", now_s))
        return effects

    def _decide(
        self, pipelines: list[Instance], rows: Mapping[str, Instance], decision: ScaleDecision, now_s: float
    ) -> list[Effect]:
        new = [i for i in pipelines if self._decided(i) is None]
        effects: list[Effect] = []
        for made in consolidate(new, self._num_sure(rows), decision.num_required) if new else ():
            row = rows[made.instance_id]
            self._stage(row).decided = made
            effects.append(self._record(row, decision, made.reason, made.becomes.value, now_s))
        return effects

    def _record(self, row: Instance, decision: ScaleDecision, reason: str, chosen: str, now_s: float) -> Effect:
        made = ScaleDecision(
            model_key=decision.model_key,
            num_wanted=decision.num_required,
            reason=reason,
            inputs={**decision.inputs, "stages": row.num_stages},
        )
        return self._decisions.record(made, row.instance_id, chosen, now_s, policy=POLICY)

    def _num_sure(self, rows: Mapping[str, Instance]) -> int:
        """Count instances there or coming, less undecided pipelines."""
        num = 0
        there = [i for i in rows.values() if i.serves and not i.state.is_gone and i.state is not InstanceState.DRAINING]
        worth = worths(there)
        for instance in there:
            decided = self._decided(instance)
            if instance.is_whole or (decided is not None and decided.becomes is ConsolidationKind.DOWN):
                num += 1
            elif decided is not None:
                num += worth[instance.instance_id]
        return num


def _targets(instance: Instance, decided: ConsolidationDecision, rows: Mapping[str, Instance]) -> list[Instance]:
    if decided.becomes is ConsolidationKind.DOWN:
        return [instance]
    later = [i for i in rows.values() if i.part_of == instance.instance_id and not i.is_whole and not i.state.is_gone]
    return later or [instance]


# Starts asked of the placer. A start is batch's (`PlaceInstance.is_batch`) while batch requests wait and all others
# have enough instances without it; otherwise it is asked for again as any other.


def _is_for_batch(view: ScalingView, num_there: int) -> bool:
    load = view.load
    if not load.of_class(Priority.BATCH).num_waiting:
        return False
    num_urgent = load.num_urgent_waiting + load.num_urgent_in_flight
    return num_there >= max(view.floor, math.ceil(num_urgent / view.per_instance))


KEPT: Final = "kept"  # decision rule for a copy below READY
REPLACE: Final = "declared"  # ... and for outdated instances
_STAYS: Final = {Rung.ASLEEP: "asleep at least", Rung.HOST: "in host memory at least"}


class AutoscalerController:
    """State machine of the autoscaler. `scale`: the "scaling" policy; `epoch` makes ids unique over restarts."""

    def __init__(
        self,
        scale: Callable[..., tuple[ScaleDecision, Any]],
        policy: str,
        epoch: int,
        params: AutoscalerParams = AutoscalerParams(),
    ) -> None:
        self._scale, self._policy, self._params = scale, policy, params
        self._ids, self._learned = Ids(epoch), Learned(scale)
        self._decisions = Decisions(self._ids, policy)
        self._consolidations = Consolidations(self._decisions, params.repeat_s)
        self.access = AccessRows()
        self._ticked_at = 0.0
        self._models = ModelRecords()
        self.instances, self.loads = InstanceTable(), Demand()
        self.loads.of_models(self._models, self._models.bases)
        self.nodes: dict[str, Node] = {}
        self.handlers: Handlers = {
            Tick: self._on_tick,
            facts.RouterLoadReported: self._on_load,
            facts.ForecastMade: self._on_forecast,
            facts.RequestWaiting: self._on_waiting,
            facts.ModelUndeployed: self._on_undeployed,
            facts.ModelKeepAliveAsked: self._on_keep_alive,
            **dict.fromkeys(get_args(facts.InstanceChange), self._on_instance),
            operator.Deploy: self._deploy,
            operator.Undeploy: self._undeploy,
            operator.Load: self._load,
            operator.Unload: self._unload,
            operator.Sleep: self._sleep,
            operator.Suspend: self._suspend,
            operator.Pin: self._pin,
            **self.access.handlers,
        }

    @property
    def models(self) -> dict[str, Model]:
        return {model.key: model for model in self._models.deployed()}

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        """Handle a fact, telemetry, a tick or an operator's request (raises ModelNotFound, Conflict)."""
        return dispatch(self.handlers, stimulus, now_s)

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        """Take a table: its own (lost rows are written again, those of undeployed models removed), `nodes`, or
        `instances`, where a failure may show before its fact arrives."""
        if table in (KEYS, TENANTS):
            return self.access.restore(table, rows, now_s)
        self._wake_all(now_s)
        if table == "models":
            return self._models.restore(rows, now_s)
        if table == SCALING_LEARNED:
            return self._learned.restore(rows, self._models, now_s)
        if table == "nodes":
            self.nodes = rows
            return []
        wanted = {i for i, row in self.instances.by_id.items() if not (row.state.is_gone or row.state.is_dormant)}
        for instance in self.instances.restore(rows, now_s):
            record = self._note(instance, now_s)
            if instance.state is InstanceState.FAILED and instance.instance_id in wanted:
                self._start_failed(record, instance, now_s)
        return []

    def inherit(self, earlier: "AutoscalerController", now_s: float) -> None:
        self.instances, self.loads = earlier.instances, earlier.loads
        self.loads.of_models(self._models, self._models.bases)
        self._models.inherit(earlier._models, now_s, self._params.absent_s)
        self._learned.inherit(earlier._learned, self._models, now_s)
        self.access.inherit(earlier.access, now_s, self._params.absent_s)

    def is_put_away(self, model_key: str) -> bool:
        """Return whether an instance starts or drains only to end below READY."""
        return bool(self._models.of(model_key).kept.put_away)

    # facts and time

    def _on_tick(self, _: Tick, now_s: float) -> list[Effect]:
        if self.loads.expire(now_s):
            self._wake_all(now_s)
        self._consolidations.expire(self.instances.by_id)
        effects = self.access.tick(now_s)
        for key in sorted({*self._models.records, *self.instances.model_keys}):
            record = self._models.of(key)
            if now_s < record.rest_until or self._stands(record, now_s):
                continue
            rows = self.instances.of(key)
            record.expire(rows, now_s, self._params.repeat_s)
            if record.model is not None or rows:
                effects += self._balance(record, now_s, is_tick=True)
            elif record.is_empty:
                del self._models.records[key]
        self._ticked_at = now_s
        return effects

    def _stands(self, record: ModelRecord, now_s: float) -> bool:
        return now_s < record.stands_until and not self._models.is_short_elsewhere(record.key, now_s)

    def _wake_all(self, now_s: float) -> None:
        for key in self._models.records:
            self._models.wake(key, now_s)

    def _on_load(self, event: Event, now_s: float) -> list[Effect]:
        for key, is_active in self.loads.apply(event.data, now_s, event.occurred_at).items():
            self._models.wake(key, now_s, has_work=is_active)
            if (model := self._models.find(key)) is not None and model.base:
                self._models.wake(model.base, now_s, has_work=is_active)
        return []

    def _on_forecast(self, event: Event, now_s: float) -> list[Effect]:
        made: facts.ForecastMade = event.data
        record = self._models.of(made.model_key)
        record.ahead = record.ahead.after(made, now_s)
        self._models.wake(made.model_key, now_s)
        return []

    def _on_waiting(self, event: Event, now_s: float) -> list[Effect]:
        key = event.data.model_key
        if (model := self._models.find(key)) is None:
            return []
        if not self.loads.wait(event.data, now_s, event.occurred_at) and not self.loads.of(key).num_waiting:
            return []  # late: newer reports show no waiting request
        record = self._models.of(key)
        record.waiting = event
        self.loads.touch(key, now_s)  # the load report may follow half a second later
        effects: list[Effect] = []
        if model.base:
            base = self._models.of(model.base)
            base.waiting = base.waiting or event
            effects = self._balance(base, now_s)
        return [*effects, *self._balance(record, now_s)]

    def _on_keep_alive(self, event: Event, now_s: float) -> list[Effect]:
        self._models.keep_alive(event.data.model_key, event.data.keep_alive_s, now_s)
        return []

    def _on_undeployed(self, event: Event, now_s: float) -> list[Effect]:
        model = self._models.find(event.data.model_key)
        if model is not None and model.revision <= event.data.revision:  # undeployed by another leader
            self._forget(model.key)
        return []

    def _on_instance(self, event: Event, now_s: float) -> list[Effect]:
        instance: Instance = event.data.instance
        before = self.instances.by_id.get(instance.instance_id)
        if not self.instances.apply(instance, now_s):
            return []
        record = self._note(instance, now_s)
        was_dormant = before is not None and before.state.is_dormant
        if isinstance(event.data, facts.InstanceFailed) and not was_dormant:  # no request waits for a dead sleeper
            self._start_failed(record, instance, now_s)
        return self._balance(record, now_s)

    def _start_failed(self, record: ModelRecord, instance: Instance, now_s: float) -> None:
        """Pause starts, except after a replica, a copy meant to sleep, or a stage, whose pipeline ends too."""
        if not (instance.replica or instance.part_of or record.kept.last_lost == instance.instance_id):
            record.failed(now_s, self._params.backoff_s, self._params.max_backoff_s, instance.tries_left)

    def _note(self, instance: Instance, now_s: float) -> ModelRecord:
        """Drop starts, orders and operators' wishes answered by an instance's new state."""
        record = self._models.of(instance.model_key)
        self._models.started(record, instance.instance_id)
        others = self.instances.living(record.key).values()
        is_replaced = bool(record.starts) or any(row.serves and row is not instance for row in others)
        record.kept.saw(instance, is_replaced, now_s, self._params.backoff_s, self._params.max_backoff_s)
        is_outdated = record.model is not None and instance.is_outdated(record.model)
        if instance.state is InstanceState.READY and instance.serves and not is_outdated:
            record.may_try_again()
            record.asked, record.waiting = "", None
        if instance.state.is_gone or instance.state.is_dormant:
            record.orders.pop(instance.instance_id, None)
        return record

    # operators

    def _deployed(self, model_key: str) -> tuple[ModelRecord, Model]:
        model = find_model(self.models, model_key)
        record = self._models.of(model.key)
        record.stands_until = 0.0
        return record, model

    def _deploy(self, request: operator.Deploy, now_s: float) -> list[Effect]:
        model = on_base(request.model, {one.key: one for one in self._models.deployed()}, self.nodes.values())
        key = model.key
        known = self._models.find(key)
        check_no_adapters_of(model, self._models)
        adapters = following(model, self._models, self.nodes.values())
        if model.asleep:
            check_able(model, Rung.ASLEEP, self.nodes, "asleep")
        if not self._models.deploy(model, create=request.create, now_s=now_s):
            return []
        record, model = self._deployed(key)
        record.unknown_since = None
        if model.preload and known is None:
            record.asked = "its deployment asks for one at once"
            self.loads.touch(key, now_s)
        record.may_try_again()
        record.kept.may_try_again()
        effects = [Save("models", key, model), Publish(facts.ModelDeployed(model=model))]
        if known is not None and known.engine_digest != model.engine_digest:
            effects += self._call_off(record, f"{model.name} is declared anew", now_s)
        effects += self._balance(record, now_s)
        return [*effects, *(e for one in adapters for e in self._deploy(operator.Deploy(model=one), now_s))]

    def _call_off(self, record: ModelRecord, reason: str, now_s: float) -> list[Effect]:
        """Cancel every start."""
        effects: list[Effect] = []
        for instance_id in list(record.starts):
            effects.append(self._without_policy(record, reason, "cancel", now_s, REPLACE, instance_id))
            effects.append(self._cancel(record, instance_id, reason))
        return effects

    def _undeploy(self, request: operator.Undeploy, now_s: float) -> list[Effect]:
        _, model = self._deployed(request.model_key)
        check_no_adapters(model, self._models)
        record = self._forget(model.key)
        stops = self._stop_all(record, "an operator has undeployed it", "undeploy", now_s)
        fact = facts.ModelUndeployed(model_key=model.key, revision=model.revision)
        return [*stops, Remove("models", model.key), Publish(fact)]

    def _load(self, request: operator.Load, now_s: float) -> list[Effect]:
        record, model = self._deployed(request.model_key)
        if request.node_id and self.nodes and request.node_id not in self.nodes:
            raise NotFound(f"no node {request.node_id!r}", param="node")
        check_base_runs(model, self._models)
        check_able(model, request.to, self.nodes, "to", request.node_id)
        record.check_node(request.to, request.node_id, self.instances.living(record.key).values())
        if request.to is Rung.READY:
            record.asked, record.asked_node = "an operator has loaded it", request.node_id
        else:
            record.kept.asked, record.kept.node_id = request.to, request.node_id
        record.may_try_again()
        record.kept.may_try_again()
        for order in record.orders.values():
            if order.kind is OrderKind.UNLOAD:
                order.kind = OrderKind.STOP
        self.loads.touch(model.key, now_s)
        lifted = self._models.change(record, now_s, suspended=False) if model.suspended else []
        return [*lifted, *self._balance(record, now_s)]

    def _unload(self, request: operator.Unload, now_s: float) -> list[Effect]:
        record, _ = self._deployed(request.model_key)
        if request.rung in (None, Rung.READY, record.kept.asked):
            record.kept.asked = None
        why = f"an operator has unloaded {f'what is {request.rung.value}' if request.rung else 'it'}"
        return self._leave(request.model_key, why, "unload", now_s, only=request.rung)

    def _sleep(self, request: operator.Sleep, now_s: float) -> list[Effect]:
        return self._leave(request.model_key, "an operator has put it to sleep", "sleep", now_s, "swapped_out")

    def _leave(
        self, key: str, reason: str, chosen: str, now_s: float, becomes: Becomes = "stopped", only: Rung | None = None
    ) -> list[Effect]:
        record, _ = self._deployed(key)
        if only in (None, Rung.READY):
            record.asked = ""
            record.policy_state = without_load(record.policy_state)  # the last seconds are no demand either
        effects = self._stop_all(record, reason, chosen, now_s, becomes=becomes, only=only)
        for instance_id, row in self.instances.living(record.key).items():
            if instance_id in record.orders and record.kept.is_at(row, only):
                record.orders[instance_id].kind = OrderKind.UNLOAD
        return effects

    def _suspend(self, request: operator.Suspend, now_s: float) -> list[Effect]:
        record, model = self._deployed(request.model_key)
        record.asked = ""
        why = f"an operator has drained {model.name}, and no instance of it starts until it is loaded again"
        return [
            self._without_policy(record, why, "suspend", now_s),
            *self._models.change(record, now_s, suspended=True),
            *self._stop_all(record, "an operator has drained the model", "drain", now_s),
        ]

    def _pin(self, request: operator.Pin, now_s: float) -> list[Effect]:
        record, model = self._deployed(request.model_key)
        kept_at = KeptAt.NOWHERE
        if not request.pinned:
            chosen, why = "unpin", f"an operator has unpinned {model.name}, and its last instance may leave"
        elif request.at is Rung.READY:
            chosen, why = "pin", f"an operator has pinned {model.name}, and one instance stays"
        else:
            check_able(model, request.at, self.nodes, "at")
            chosen, why = "pin", f"an operator has pinned {model.name}, and one copy stays {_STAYS[request.at]}"
            kept_at = KeptAt(request.at.value)
        is_pinned = request.pinned and request.at is Rung.READY
        record.kept.may_try_again()
        return [
            self._without_policy(record, why, chosen, now_s),
            *self._models.change(record, now_s, pinned=is_pinned, kept_at=kept_at),
            *self._balance(record, now_s),
        ]

    def _forget(self, model_key: str) -> ModelRecord:
        self.loads.forget(model_key)
        self._learned.forget(model_key)
        return self._models.undeploy(self._models.of(model_key))

    def _stop_all(
        self,
        record: ModelRecord,
        reason: str,
        chosen: str,
        now_s: float,
        policy: str = operator.POLICY,
        becomes: Becomes = "stopped",
        only: Rung | None = None,
    ) -> list[Effect]:
        """Cancel starts and drain instances, with one decision each, recorded when first carried out. Where `becomes`
        is a dormant state, dormant instances stay. `only`: those on that rung, or started for it."""
        effects: list[Effect] = []
        put_away = record.kept.put_away
        for instance_id in [i for i in record.starts if only in (None, Rung.READY, put_away.get(i))]:
            effects.append(self._without_policy(record, reason, "cancel", now_s, policy, instance_id))
            effects.append(self._cancel(record, instance_id, reason))
        for instance in self.instances.living(record.key).values():
            if (becomes != "stopped" and instance.state.is_dormant) or not record.kept.is_at(instance, only):
                continue
            if needed_by_pipeline(instance.instance_id, self.instances.by_id):  # it ends after that pipeline
                continue
            order = record.orders.get(instance.instance_id)
            if becomes == "stopped" and (instance.instance_id in put_away or (order and order.becomes != becomes)):
                record.orders.pop(instance.instance_id, None)  # it stops instead of sleeping
            if not record.is_leaving(instance.instance_id):
                effects.append(self._without_policy(record, reason, chosen, now_s, policy, instance.instance_id))
            effects += self._stop(record, instance, reason, now_s, becomes)
        return effects

    def _without_policy(
        self, record: ModelRecord, reason: str, chosen: str, now_s: float, rule: str = operator.POLICY, about: str = ""
    ) -> Record:
        """`about`: an instance."""
        known = figures(self.loads.of(record.key), self.instances.of(record.key), about)
        decision = ScaleDecision(model_key=record.key, num_wanted=0, reason=reason, inputs=known)
        return self._decisions.record(decision, about, chosen, now_s, policy=rule)

    # balance

    def _balance(self, record: ModelRecord, now_s: float, *, is_tick: bool = False) -> list[Effect]:
        """Move one model towards the policy's number:

        1. Not deployed: stop its instances.
        2. End outdated instances that do not serve, or have been replaced; keep a copy below READY (_keep).
        3. Starts for batch that others need by now are asked for as any other.
        4. Too few: take draining instances back, then ask for starts.
        5. Too many, and no request waits: call starts off.
        6. Drain idle instances, make pipelines whole, and replace an outdated instance.
        7. Ask again where the placer has not answered, and where an agent has not carried out an operator's order.
        8. Until something changes, rest or let the answer stand (_rest); only a tick's may hold for later ticks.
        """
        model = record.model
        if model is None:  # 1
            return self._orphans(record, now_s)
        rows = self.instances.living(record.key)
        if record.asked and any(i.state is InstanceState.READY and i.serves for i in rows.values()):
            record.asked = ""
        bounded = as_hosted(model, self._models, self.instances) if model.base else model
        reported = load_of(record, self._models, self.loads, self.instances)
        load = record.demand(reported, self.instances.of(record.key))
        has_starts = bool(record.starts)
        outdated = outdated_of(model, rows)
        effects: list[Effect] = []
        if outdated or record.replacing.of:  # 2
            effects += self._end_outdated(record, model, outdated, rows, now_s)
        effects += self._keep(record, model, load, rows, now_s)
        view = self._view(record, bounded, load, rows, now_s)
        effects += self._as_urgent(record, model, view, now_s)  # 3
        decision, record.policy_state = self._scale(view, record.policy_state)
        if record.asked and not reported.num_waiting:
            decision = replace(decision, reason=record.asked)
        missing = decision.num_wanted - view.num_coming_or_there
        if missing > 0:  # 4
            resumed = [i for i in decision.resume if record.may_resume(i, rows) and not bounded.suspended]
            resumed = resumed[:missing]
            effects += self._resume(record, decision, resumed, now_s)
            effects += self._start(record, model, decision, missing - len(resumed), reported, view, now_s)
        elif missing < 0 and not load.num_waiting:  # 5
            effects += self._cancel_spare(record, decision, missing, now_s)
        effects += self._drain(record, bounded, decision, now_s)  # 6
        if self._params.consolidate:
            effects += self._consolidations.of_model(rows, decision, now_s)
        if outdated:
            effects += self._replace(record, model, decision, view, outdated, now_s)
        effects += record.ask_again(model, now_s, self._params.repeat_s)  # 7
        effects += self._unload_again(record, rows, now_s)
        is_idle = not (has_starts or effects or decision.num_wanted or load.num_waiting or load.num_in_flight)
        may_stand = is_tick and not (effects or outdated)
        self._rest(record, decision, rows, now_s, is_idle=is_idle, may_stand=may_stand)  # 8
        return [*effects, *self._learned.noted(record)]

    def _rest(
        self,
        record: ModelRecord,
        decision: ScaleDecision,
        rows: Mapping[str, Instance],
        now_s: float,
        *,
        is_idle: bool,
        may_stand: bool,
    ) -> None:
        """Set until when no tick need look at the model: without requests and with dormant instances alone it rests;
        with nothing under way, the policy's answer stands for as long as the policy says and the forecast holds."""
        record.rest_until = record.stands_until = 0.0
        if is_idle and all(i.state.is_dormant for i in rows.values()):
            record.rest_until = record.kept.rest_until(now_s, self._params.rest_s)
            return
        is_settled = not (record.starts or record.orders or record.kept.put_away)
        if may_stand and is_settled and decision.stands_until > now_s and all(i.is_whole for i in rows.values()):
            lead_s = self._params.lead_s
            record.stands_until = min(decision.stands_until, record.ahead.changes_at(now_s + lead_s) - lead_s)

    def _view(
        self, record: ModelRecord, model: Model, load: ModelLoad, rows: dict[str, Instance], now_s: float
    ) -> ScalingView:
        forecast, next_forecast = record.forecast_at(now_s + self._params.lead_s)
        return ScalingView(
            now_s=now_s,
            model=record.kept_as_asked(model, rows),
            instances=record.as_ordered(record.replacing.without_new(rows), now_s, self._params.repeat_s),
            load=load,
            forecast=forecast,
            next_forecast=next_forecast,
            windows=record.ahead.windows_from(now_s + self._params.lead_s),
            start_s=record.ahead.horizon_s,
            num_pending=record.num_pending,
            short_elsewhere=not model.base and self._models.is_short_elsewhere(record.key, now_s),
            unchanged_until=self._ticked_at if record.stands_until else 0.0,
        )

    def _keep(
        self, record: ModelRecord, model: Model, load: ModelLoad, rows: dict[str, Instance], now_s: float
    ) -> list[Effect]:
        """Keep a copy below READY. Take the first that applies:

        1. None is wanted, and none was started for it: nothing.
        2. None is wanted any more, or the model has requests: such a start counts as any other.
        3. A copy is there, or an instance that becomes one: cancel starts for another.
        4. A start is under way, cannot be, or has just failed: wait.
        5. Start one.

        Before 3, put away those that are READY and were started to be copies.
        """
        kept = record.kept
        rung = kept.wanted(model)
        if rung is None and not kept.put_away:  # 1
            return []
        if rung is None or load.num_waiting or load.num_in_flight:  # 2
            kept.put_away.clear()
            return self._wait_no_more(record, model, load, now_s)
        effects: list[Effect] = []
        for instance_id, to in list(kept.put_away.items()):
            row = rows.get(instance_id)
            if row is None and instance_id not in record.starts:
                del kept.put_away[instance_id]
            elif row is None or record.is_leaving(instance_id, OrderKind.UNLOAD):
                continue
            elif row.state is InstanceState.READY and self.loads.is_fresh(now_s):
                why = f"{model.name} has been started, no request waits for it, and it should be {to.value}"
                if not record.is_leaving(instance_id):
                    effects.append(self._without_policy(record, why, "sleep", now_s, KEPT, instance_id))
                effects += self._stop(record, row, why, now_s, BECOMES[to])
        if kept.is_there(rung, rows, record.is_leaving):  # 3
            kept.asked = None
            return [*effects, *self._wait_no_more(record, model, load, now_s)]
        node_id = kept.node_id if kept.asked else ""
        is_able = not why_unable(model, rung, self.nodes, node_id)
        is_coming = bool(record.starts) or kept.is_coming(rows, record.is_leaving)
        if is_coming or not is_able or now_s < max(record.not_before, kept.not_before):
            return effects  # 4
        why = f"an operator wants it {rung.value}" if kept.asked else f"it is kept {rung.value}, and no copy is"
        instance_id = self._ids.next(model.key)  # 5
        command = PlaceInstance(
            instance_id=instance_id, model=model, reason=why, wanted_at=now_s, waits=True, node_id=node_id
        )
        self._models.start(record, Start(command, now_s, None))
        kept.put_away[instance_id] = rung
        rule = operator.POLICY if kept.asked else KEPT
        return [*effects, self._without_policy(record, why, "start", now_s, rule, instance_id), Publish(command)]

    def _end_outdated(
        self,
        record: ModelRecord,
        model: Model,
        outdated: Mapping[str, Instance],
        rows: dict[str, Instance],
        now_s: float,
    ) -> list[Effect]:
        """Stop outdated instances that do not serve, and those whose replacement is READY."""
        effects: list[Effect] = []
        replaced, ordinary = record.replacing.settle(rows, record.starts, record.is_leaving)
        for instance_id in ordinary:
            self._models.changed()
            effects.append(record.starts[instance_id].again(model, now_s, wanted_at=now_s, waits=False, replaces=""))
        for instance_id, row in outdated.items():
            is_draining = row.state is InstanceState.READY and record.is_leaving(instance_id)
            if ends_at_once(row, self.instances.by_id) or is_draining or instance_id in replaced:
                effects += self._leaves(record, row, now_s)
        return effects

    def _leaves(self, record: ModelRecord, row: Instance, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        if not record.is_leaving(row.instance_id):
            effects.append(self._without_policy(record, OUTDATED, "drain", now_s, REPLACE, row.instance_id))
        return [*effects, *self._stop(record, row, OUTDATED, now_s)]

    def _replace(
        self,
        record: ModelRecord,
        model: Model,
        decision: ScaleDecision,
        view: ScalingView,
        outdated: Mapping[str, Instance],
        now_s: float,
    ) -> list[Effect]:
        """Begin the next replacement, unless a start has just failed or that instance drains anyhow."""
        asked_at = max((s.command.wanted_at for s in record.starts.values() if not s.command.waits), default=None)
        old = record.replacing.next(view, outdated, asked_at)
        if old is None or old.instance_id in decision.drain or now_s < record.not_before:
            return []
        if model.base:
            return self._leaves(record, old, now_s)
        instance_id = self._ids.next(model.key)
        why = f"{model.name} has been declared anew, and it replaces {old.instance_id}"
        command = PlaceInstance(
            instance_id=instance_id, model=model, reason=why, wanted_at=now_s, waits=True,
            replaces="" if record.num_failures else old.instance_id,
        )  # fmt: skip
        self._models.start(record, Start(command, now_s, None))
        record.replacing.of[instance_id] = old.instance_id
        return [self._without_policy(record, why, "start", now_s, REPLACE, instance_id), Publish(command)]

    def _wait_no_more(self, record: ModelRecord, model: Model, load: ModelLoad, now_s: float) -> list[Effect]:
        """Once a request waits, turn starts that wait for free memory into ordinary ones; else cancel them."""
        effects: list[Effect] = []
        for instance_id, start in list(record.starts.items()):
            if not start.command.waits or instance_id in record.replacing.of:
                continue
            if not load.num_waiting:
                why = f"{model.name} has a copy as near, or is no longer kept asleep"
                effects.append(self._without_policy(record, why, "cancel", now_s, KEPT, instance_id))
                effects.append(self._cancel(record, instance_id, why))
                continue
            start.cause, why = (
                record.waiting,
                record.asked or "a request waits for the instance that was started to sleep",
            )
            command = start.again(
                model,
                now_s,
                reason=why,
                wanted_at=record.waiting.data.waiting_since if record.waiting else now_s,
                waits=False,
                node_id=record.asked_node if record.asked else start.command.node_id,
                is_awaited=True,
            )
            self._models.changed()
            effects += [self._without_policy(record, why, "start", now_s, KEPT, instance_id), command]
        return effects

    def _start(
        self,
        record: ModelRecord,
        model: Model,
        decision: ScaleDecision,
        num: int,
        load: ModelLoad,
        view: ScalingView,
        now_s: float,
    ) -> list[Effect]:
        """Ask for `num` instances. `load`: as the routers report it."""
        cause = record.waiting if load.num_waiting else None
        wanted_at = cause.data.waiting_since if cause else now_s
        if num <= 0 or now_s < record.not_before or (cause and now_s - wanted_at < self._params.gather_s):
            return []
        is_asked = bool(record.asked) and decision.reason == record.asked
        policy = operator.POLICY if is_asked else self._policy
        effects: list[Effect] = []
        num_there = view.num_coming_or_there
        while num > 0:
            num_required = min(num, max(1, decision.group_size))
            command = PlaceInstance(
                instance_id=self._ids.next(model.key),
                model=model,
                reason=decision.reason,
                wanted_at=wanted_at,
                num_required=num_required,
                node_id=record.asked_node if is_asked else "",
                is_awaited=is_asked or load.num_waiting > 0,
                is_batch=not is_asked and _is_for_batch(view, num_there),
            )
            num -= num_required
            num_there += num_required
            self._models.start(record, Start(command, now_s, cause))
            decided = self._decisions.record(decision, command.instance_id, "start", now_s, policy=policy, cause=cause)
            effects += [decided, Publish(command, cause)]
        return effects

    def _as_urgent(self, record: ModelRecord, model: Model, view: ScalingView, now_s: float) -> list[Effect]:
        """Turn batch's starts into ordinary ones once other requests need them."""
        effects: list[Effect] = []
        num_there = view.num_coming_or_there - record.num_pending
        for start in record.starts.values():
            if start.command.is_batch and not _is_for_batch(view, num_there):
                effects.append(start.again(model, now_s, is_batch=False))
            num_there += 0 if start.command.waits else start.command.num_required
        if effects:
            self._models.changed()
        return effects

    def _cancel_spare(self, record: ModelRecord, decision: ScaleDecision, missing: int, now_s: float) -> list[Effect]:
        """Cancel at most -`missing` spare instances."""
        effects: list[Effect] = []
        for instance_id, start in list(record.starts.items()):
            if not start.command.waits and missing + start.command.num_required <= 0:
                missing += start.command.num_required
                effects.append(self._decisions.record(decision, instance_id, "cancel", now_s))
                effects.append(self._cancel(record, instance_id, "it is no longer wanted"))
        return effects

    def _cancel(self, record: ModelRecord, instance_id: str, reason: str) -> Publish:
        self._models.started(record, instance_id)
        return Publish(CancelPlacement(instance_id=instance_id, reason=reason))

    def _drain(self, record: ModelRecord, model: Model, decision: ScaleDecision, now_s: float) -> list[Effect]:
        if not decision.drain or not (self.loads.is_fresh(now_s) or model.suspended):
            return []  # without reports no instance counts as idle
        becomes: Becomes = "stopped" if model.suspended else self._params.stop_becomes
        rows = self.instances.living(record.key).values()
        lacks_sleeper = becomes != "swapped_out" and lacks_one_asleep(model, rows)
        effects: list[Effect] = []
        for instance_id in [i for i in decision.drain if not needed_by_pipeline(i, self.instances.by_id)]:
            order = record.orders.get(instance_id)
            if order and order.kind is OrderKind.RESUME and now_s - order.sent_at < self._params.repeat_s:
                continue  # just resumed
            is_first = not record.is_leaving(instance_id)
            to: Becomes = "swapped_out" if lacks_sleeper else becomes
            lacks_sleeper = False  # one sleeper is enough
            if order and order.kind is OrderKind.UNLOAD:
                to = order.becomes
            row = self.instances.by_id[instance_id]
            stop = self._stop(record, row, decision.reason, now_s, "stopped" if row.is_outdated(model) else to)
            if stop and is_first:
                effects.append(self._decisions.record(decision, instance_id, "drain", now_s))
            effects += stop
        return effects

    def _stop(
        self, record: ModelRecord, instance: Instance, reason: str, now_s: float, becomes: Becomes = "stopped"
    ) -> list[Effect]:
        if not record.is_leaving(instance.instance_id):
            record.orders[instance.instance_id] = Order(OrderKind.STOP, now_s, becomes, reason)
        elif now_s - record.orders[instance.instance_id].sent_at < self._params.repeat_s:
            return []
        record.orders[instance.instance_id].sent_at = now_s
        command = StopInstance(
            target=instance.node_id,
            instance_id=instance.instance_id,
            reason=reason,
            grace_s=0.0 if instance.state.is_dormant else self._params.drain_grace_s,
            becomes="stopped" if instance.host_id else becomes,
        )
        return [Publish(command)]

    def _unload_again(self, record: ModelRecord, rows: Mapping[str, Instance], now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for instance_id, order in record.orders.items():
            row = rows.get(instance_id)
            if order.kind is OrderKind.UNLOAD and row is not None and row.state is not InstanceState.DRAINING:
                effects += self._stop(record, row, order.reason, now_s, order.becomes)
        return effects

    def _resume(
        self, record: ModelRecord, decision: ScaleDecision, instance_ids: list[str], now_s: float
    ) -> list[Effect]:
        effects: list[Effect] = []
        for instance_id in instance_ids:
            record.orders[instance_id] = Order(OrderKind.RESUME, now_s)
            node_id = self.instances.by_id[instance_id].node_id
            effects.append(self._decisions.record(decision, instance_id, "resume", now_s))
            effects.append(Publish(ResumeInstance(target=node_id, instance_id=instance_id, reason=decision.reason)))
        return effects

    def _orphans(self, record: ModelRecord, now_s: float) -> list[Effect]:
        """Stop instances of an undeployed model, once the table has had time to load; invented ones are forgotten."""
        rows = self.instances.living(record.key)
        if rows and rows.keys() <= self.instances.unstored.lacked:
            return []
        record.unknown_since = now_s if record.unknown_since is None else record.unknown_since
        if now_s - record.unknown_since < self._params.orphan_s:
            return []
        return self._stop_all(record, "its model is not deployed", "stop", now_s, policy="deployed_only")
