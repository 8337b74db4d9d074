"""A start: refused, overtaken, or granted, from scratch or grown from what lies dormant.

An instance that grows from another (`StartInstance.source`) takes its bytes and its engine; the other one ends STOPPED
in the same transaction. Whatever that command finds is used as far as it goes: a source that is loading is activated
and streams on, one that has not begun to load is begun under its own id (`Holding.engine_id`) and activated then, and
one that is gone, or holds other weights or other GPUs, leaves a start from scratch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from glowplug.controllers.agent.drains import Drains
from glowplug.controllers.agent.lifecycle import Action, Lifecycle, Transaction
from glowplug.controllers.agent.messages import GivesWay, TakenOver
from glowplug.controllers.agent.params import AgentParams, EngineKind
from glowplug.controllers.agent.record import COMING, DORMANT, STARTING, Holding, Start, State, enter, own_workers
from glowplug.controllers.agent.stages import pipeline_of
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.commands import StartInstance


@dataclass(slots=True)
class Starts:
    """Takes starts. `overtaken`: stops that came before their start: id -> when, why."""

    life: Lifecycle
    drains: Drains
    engines: Mapping[str, EngineKind]
    params: AgentParams
    overtaken: dict[str, tuple[float, str]] = field(default_factory=dict)
    node_stops: str = ""  # why this node takes no start any more, or ""

    @property
    def actions(self) -> dict[str, Action]:
        return {"start": self.start, "taken_over": self.taken_over}

    def start(self, transaction: Transaction, _: None, command: StartInstance) -> None:
        """Grant the bytes, then launch and fetch side by side, or activate."""
        assert transaction.event is not None
        holding = self._new(transaction.now_s, transaction.event, command)
        overtaken = self.overtaken.pop(command.instance_id, None)
        if overtaken is not None:
            transaction.publish(enter(holding, State.STOPPED), reason=overtaken[1])
            return
        refusal = self._refusal(command, holding.instance)
        if refusal is not None:
            self.life.fail(transaction, holding, *refusal)
            return
        source = self._source(transaction, command)
        drops = [i for i in dict.fromkeys(command.drops) if self._is_replica(transaction, i, command)]
        try:
            holding = self.life.grant(holding, [*drops, *([source.instance.instance_id] if source else ())])
        except OutOfMemory as error:
            self.life.fail(transaction, holding, error.code, error.message)
            return
        for unknown in {command.source, *command.drops} - {""} - transaction.holdings.keys():
            self.overtaken[unknown] = (transaction.now_s, f"given to {command.instance_id} before it came")
        for drop in drops:
            transaction.step(drop, GivesWay(f"gives way to {command.instance_id}"))
        if source is not None:
            self._grow(transaction, holding, source)
            return
        why = "its memory is granted, its engine starts and its weights are on their way"
        self.life.begin(transaction, transaction.publish(holding, reason=why))

    def forget(self, now_s: float) -> None:
        """Drop what no start can come for any more."""
        for instance_id, (when, _) in list(self.overtaken.items()):
            if now_s - when >= self.params.keep_gone_s:
                del self.overtaken[instance_id]

    def _new(self, now_s: float, event: Event, command: StartInstance) -> Holding:
        model, kind = command.model, self.engines.get(command.model.engine)
        num_stages = 1 if command.part_of else max(1, command.num_stages)
        instance = Instance(
            instance_id=command.instance_id,
            model_key=model.key,
            engine=model.engine,
            state=InstanceState.STARTING,
            workers=command.workers,
            max_concurrency=model.max_concurrency * num_stages,
            model_revision=model.revision,
            created_at=now_s,
            phases=command.phases,
            emulated=bool(kind and kind.emulated),
            cause_id=event.event_id,
            decision_id=command.decision_id,
            replica=command.replica,
            part_of=command.part_of,
            num_stages=max(1, command.num_stages),
            gpu_kind=self._gpu_kind(command),
            predicted_s=command.predicted_s,
        )
        return Holding(
            state=State.LAUNCHING,
            instance=instance,
            model=model,
            cause=replace(event, data=None),
            start=Start(deadline_at=now_s + self.params.start_deadline_s, predicted=command.predicted),
            pipeline=pipeline_of(instance, command.stage),
        )

    def _gpu_kind(self, command: StartInstance) -> str:
        mine = {worker.gpu_id for worker in command.workers}
        return next((gpu.kind for gpu in self.life.ledger.gpus if gpu.gpu_id in mine), "")

    def _refusal(self, command: StartInstance, instance: Instance) -> tuple[str, str] | None:
        """(code, reason) of a start that this node cannot take at all."""
        node_id, engine = self.life.node_id, command.model.engine
        if self.node_stops:
            return "node_stopping", f"node {node_id} is stopping: {self.node_stops}"
        mine = self.life.workers_here(instance)
        gpu_ids = {gpu.gpu_id for gpu in self.life.ledger.gpus}
        if not mine or any(w.gpu_id not in gpu_ids or w.num_bytes < 0 for w in mine):
            return "bad_request", f"node {node_id} has the GPUs {sorted(gpu_ids)}, and {list(mine)} were asked for"
        kind = self.engines.get(engine)
        if kind is None or kind.unavailable:
            why = kind.unavailable if kind else "no driver has this name"
            return "engine_unavailable", f"{engine} cannot start on {node_id}: {why}"
        needs = {"prewarm": command.replica, "stages": command.num_stages > 1}
        lacks = [ability for ability, is_needed in needs.items() if is_needed and not self.drains.can(engine, ability)]
        if lacks:
            return "engine_unavailable", f"{engine} on {node_id} cannot do {', '.join(lacks)}"
        return None

    def _is_replica(self, transaction: Transaction, instance_id: str, command: StartInstance) -> bool:
        """Whether it is one that gives way: never what serves, never the source."""
        holding = transaction.holdings.get(instance_id)
        if holding is None or instance_id == command.source or not holding.instance.replica:
            return False
        return holding.instance.state.is_coming or holding.state is State.PREWARMED

    def _source(self, transaction: Transaction, command: StartInstance) -> Holding | None:
        """The dormant instance that it grows from, if that is still there, and the same engine of the same model."""
        holding = transaction.holdings.get(command.source)
        if holding is None or command.replica or command.num_stages > 1:
            return None
        if not (holding.state in DORMANT or (holding.instance.replica and holding.state in COMING)):
            return None
        if _engine_of(holding.model) != _engine_of(command.model):
            return None
        places = {w.gpu_id for w in own_workers(holding.instance)}, {w.gpu_id for w in command.workers}
        return holding if holding.state is State.SWAPPED_OUT or places[0] == places[1] else None

    def _grow(self, transaction: Transaction, holding: Holding, source: Holding) -> None:
        """`source` ends; its engine and what it has of a start go on as `holding`, which holds the bytes already."""
        from_id, was, start = source.instance.instance_id, source.instance.state, holding.start
        assert start is not None
        path = source.start.weights_path if source.start is not None else None
        holding = replace(
            holding,
            instance=replace(holding.instance, source=from_id),
            past_ids=(*source.past_ids, from_id),
            was_cached=source.was_cached,
            start=replace(start, grew_from=was, weights_path=path),
        )
        if source.state in STARTING:
            begun = enter(holding, source.state, engine_id=from_id)
            transaction.publish(begun, reason=f"it takes over the start of {from_id}")
        else:
            holding = self.life.activate(transaction, holding, from_id)
            transaction.publish(holding, reason=f"it grows from {from_id}, which was {was.value}")
        # published last: whoever keeps weights for it knows by then who needs them now
        transaction.step(from_id, TakenOver(holding.instance.instance_id))

    def taken_over(self, transaction: Transaction, holding: Holding, taker: TakenOver) -> None:
        """Its bytes are the other one's already."""
        ended = enter(holding, State.STOPPED, shares={}, snapshot_bytes=0)
        transaction.publish(ended, reason=f"it goes on as {taker.instance_id}")


def _engine_of(model: Model) -> tuple[object, ...]:
    """What of a model a running process cannot change any more."""
    return model.key, model.engine, model.weights, model.num_gpus, model.context_tokens, dict(model.engine_args)
