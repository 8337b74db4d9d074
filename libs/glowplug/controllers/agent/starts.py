"""A start: refused, overtaken, or granted, from scratch or grown from what lies dormant.

An instance that grows from another (`StartInstance.source`) takes its bytes and its engine; the other one ends STOPPED
in the same turn. Whatever that command finds is used as far as it goes: a source that is loading is activated and
streams on, one that has not begun to load is begun under its own id (`Holding.engine_id`) and activated then, and one
that is gone, or holds other weights or other GPUs, leaves a start from scratch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from glowplug.controllers.agent.dormant import Dormancy
from glowplug.controllers.agent.grants import own_workers
from glowplug.controllers.agent.lifecycle import Lifecycle
from glowplug.controllers.agent.messages import AgentParams, EngineKind, Holding
from glowplug.controllers.agent.transaction import Turn
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.events import Event
from glowplug.events.commands import StartInstance


@dataclass(slots=True)
class Starts:
    """Takes starts. `overtaken`: stops that came before their start: id -> when, why."""

    life: Lifecycle
    dormant: Dormancy
    engines: Mapping[str, EngineKind]
    params: AgentParams
    overtaken: dict[str, tuple[float, str]] = field(default_factory=dict)

    def start(self, turn: Turn, event: Event, command: StartInstance, stopping: str) -> None:
        """Grant the bytes, then launch and fetch side by side, or activate. A start known already changes nothing.

        `stopping`: why this node ends, or "".
        """
        if command.instance_id in turn.holdings:
            return
        holding = self._new(turn, event, command)
        overtaken = self.overtaken.pop(command.instance_id, None)
        if overtaken is not None:
            turn.tell(holding, state=InstanceState.STOPPED, reason=overtaken[1])
            return
        refusal = self._refusal(command, holding.instance, stopping)
        if refusal is not None:
            self.life.fail(turn, holding, *refusal)
            return
        source = self._source(turn, command)
        drops = [turn.holdings[i] for i in dict.fromkeys(command.drops) if self._is_replica(turn, i, command)]
        gives = [h.instance.instance_id for h in (*drops, *([source] if source else ()))]
        try:
            holding = self.life.grant(holding, gives)
        except OutOfMemory as error:
            self.life.fail(turn, holding, error.code, error.message)
            return
        for unknown in {command.source, *command.drops} - {""} - turn.holdings.keys():
            self.overtaken[unknown] = (turn.now_s, f"given to {command.instance_id} before it came")
        for drop in drops:
            self.life.drop(turn, drop, f"gives way to {command.instance_id}")
        if source is not None:
            self._grow(turn, holding, source)
            return
        holding = turn.tell(holding, reason="its memory is granted, its engine starts and its weights are on their way")
        self.life.begin(turn, holding)

    def _new(self, turn: Turn, event: Event, command: StartInstance) -> Holding:
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
            created_at=turn.now_s,
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
        deadline_at = turn.now_s + self.params.start_deadline_s
        cause = replace(event, data=None)
        return Holding(
            instance=instance,
            model=model,
            cause=cause,
            deadline_at=deadline_at,
            stage=command.stage,
            predicted=command.predicted,
        )

    def _gpu_kind(self, command: StartInstance) -> str:
        mine = {worker.gpu_id for worker in command.workers}
        return next((gpu.kind for gpu in self.life.ledger.gpus if gpu.gpu_id in mine), "")

    def _refusal(self, command: StartInstance, instance: Instance, stopping: str) -> tuple[str, str] | None:
        """(code, reason) of a start that this node cannot take at all."""
        node_id, engine = self.life.node_id, command.model.engine
        if stopping:
            return "node_stopping", f"node {node_id} is stopping: {stopping}"
        mine = [w for w in own_workers(instance) if w.node_id == node_id]
        gpu_ids = {gpu.gpu_id for gpu in self.life.ledger.gpus}
        if not mine or any(w.gpu_id not in gpu_ids or w.num_bytes < 0 for w in mine):
            return "bad_request", f"node {node_id} has the GPUs {sorted(gpu_ids)}, and {mine} were asked for"
        kind = self.engines.get(engine)
        if kind is None or kind.unavailable:
            why = kind.unavailable if kind else "no driver has this name"
            return "engine_unavailable", f"{engine} cannot start on {node_id}: {why}"
        needs = {"prewarm": command.replica, "stages": command.num_stages > 1}
        lacks = [ability for ability, is_needed in needs.items() if is_needed and not self.dormant.can(engine, ability)]
        if lacks:
            return "engine_unavailable", f"{engine} on {node_id} cannot do {', '.join(lacks)}"
        return None

    def _is_replica(self, turn: Turn, instance_id: str, command: StartInstance) -> bool:
        """Whether it is one that gives way: never what serves, never the source."""
        holding = turn.holdings.get(instance_id)
        if holding is None or holding.instance.state.is_gone or instance_id == command.source:
            return False
        state = holding.instance.state
        return holding.instance.replica and (state.is_coming or state is InstanceState.PREWARMED)

    def _source(self, turn: Turn, command: StartInstance) -> Holding | None:
        """The dormant instance that it grows from, if that is still there, and the same engine of the same model."""
        holding = turn.holdings.get(command.source)
        if holding is None or holding.is_stopping or command.replica or command.num_stages > 1:
            return None
        state = holding.instance.state
        if not (state.is_dormant or (holding.instance.replica and state.is_coming)):
            return None
        if _engine_of(holding.model) != _engine_of(command.model):
            return None
        places = {w.gpu_id for w in own_workers(holding.instance)}, {w.gpu_id for w in command.workers}
        return holding if state is InstanceState.SWAPPED_OUT or places[0] == places[1] else None

    def _grow(self, turn: Turn, holding: Holding, source: Holding) -> None:
        """`source` ends; its engine and what it has of a start go on as `holding`, which holds the bytes already."""
        from_id, new_id, was = source.instance.instance_id, holding.instance.instance_id, source.instance.state
        holding = replace(
            holding,
            instance=replace(holding.instance, source=from_id),
            past_ids=(*source.past_ids, from_id),
            warmth=was.value,
            is_launched=source.is_launched,
            weights_path=source.weights_path,
            is_cached=source.is_cached,
        )
        if was is InstanceState.STARTING:
            turn.tell(replace(holding, engine_id=from_id), reason=f"it takes over the start of {from_id}")
        else:
            holding = self.life.activate(turn, holding, from_id)
            turn.tell(holding, state=InstanceState.LOADING, reason=f"it grows from {from_id}, which was {was.value}")
        # told last: whoever keeps weights for it has heard by then who needs them now
        ended = replace(source, is_granted=False, shares={}, snapshot_bytes=0)
        turn.tell(ended, state=InstanceState.STOPPED, reason=f"it goes on as {new_id}")


def _engine_of(model: Model) -> tuple[object, ...]:
    """What of a model a running process cannot change any more."""
    return model.key, model.engine, model.weights, model.num_gpus, model.context_tokens, dict(model.engine_args)
