"""One instance being placed, and what is written about it: its decision record, its commands, its refusal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName, Worker
from glowplug.events.commands import FetchWeights, PlaceInstance, StartInstance
from glowplug.events.envelope import Event


@dataclass(slots=True)
class Placement:
    """One instance being placed. `gpu_id` set: bytes are reserved there. `sent_at` set: the start has been sent."""

    event: Event
    received_at: float
    asked_at: float  # when it was last asked for
    gpu_id: str = ""
    node_id: str = ""
    decision_id: str = ""
    victims: tuple[str, ...] = ()
    asked_victims_at: float = float("-inf")
    started_at: float = 0.0
    sent_at: float = 0.0
    silent: tuple[str, ...] = ()  # nodes whose agents did not answer a start of it

    @property
    def command(self) -> PlaceInstance:
        command: PlaceInstance = self.event.data
        return command

    def shift(self, by_s: float) -> None:
        """Move every wait by a jump of the clock."""
        self.received_at += by_s
        self.asked_at += by_s
        self.asked_victims_at += by_s
        if self.sent_at:
            self.sent_at += by_s
            self.started_at += by_s

    def start_over(self) -> None:
        """Its agent does not answer: forget the place, and remember whose silence it was."""
        self.silent += (self.node_id,)
        self.gpu_id = self.node_id = ""
        self.sent_at = self.started_at = 0.0
        self.victims = ()


def record(
    placement: Placement,
    decision_id: str,
    kind: str,
    policy: str,
    reason: str,
    now_s: float,
    *,
    rivals: tuple[Rival, ...] = (),
    chosen: str = "",
) -> DecisionRecord:
    """The decision as `why` prints it, at the GPU the placement has now."""
    command = placement.command
    inputs: Mapping[str, float | int | str] = {
        "need_bytes": command.model.memory_bytes,
        "waited_s": round(now_s - command.wanted_at, 4),
        "engine": command.model.engine,
        "asked_because": command.reason,
    }
    return DecisionRecord(
        decision_id=decision_id,
        kind=kind,
        policy=policy,
        service="placer",
        reason=reason,
        made_at=now_s,
        model_key=command.model.key,
        instance_id=command.instance_id,
        node_id=placement.node_id,
        gpu_id=placement.gpu_id,
        chosen=chosen,
        inputs=inputs,
        rivals=rivals,
        cause_id=placement.event.event_id,
        traceparent=placement.event.traceparent,
    )


def record_of_node(
    node_id: str,
    decision_id: str,
    kind: str,
    policy: str,
    reason: str,
    chosen: str,
    inputs: Mapping[str, float | int | str],
    now_s: float,
    instance: Instance | None = None,
) -> DecisionRecord:
    """What was decided about a node, or for its sake about one `instance` on it."""
    return DecisionRecord(
        decision_id=decision_id,
        kind=kind,
        policy=policy,
        service="placer",
        reason=reason,
        made_at=now_s,
        model_key=instance.model_key if instance else "",
        instance_id=instance.instance_id if instance else "",
        node_id=node_id,
        gpu_id=instance.gpu_id if instance else "",
        chosen=chosen,
        inputs=inputs,
    )


def start_commands(placement: Placement) -> list[Any]:
    """What brings a placed instance up: the fetch of its weights (if it has any) and its start, side by side."""
    command, model = placement.command, placement.command.model
    start = StartInstance(
        target=placement.node_id,
        instance_id=command.instance_id,
        model=model,
        workers=(_worker(placement),),
        decision_id=placement.decision_id,
        phases=(Phase(name=PhaseName.DECIDE, started_at=command.wanted_at, ended_at=placement.started_at),),
    )
    if not model.weights.uri:
        return [start]
    fetch = FetchWeights(
        target=placement.node_id,
        model_key=model.key,
        weights=model.weights,
        instance_id=command.instance_id,
        priority=model.priority,
    )
    return [fetch, start]


def refused(placement: Placement, reason: str, decision_id: str, now_s: float) -> Instance:
    """An instance that failed before it was anywhere, so that whoever waits for it is answered."""
    command = placement.command
    return Instance(
        instance_id=command.instance_id,
        model_key=command.model.key,
        engine=command.model.engine,
        state=InstanceState.FAILED,
        workers=(_worker(placement),),
        created_at=command.wanted_at,
        changed_at=now_s,
        reason=reason,
        decision_id=decision_id,
    )


def _worker(placement: Placement) -> Worker:
    return Worker(
        worker_id=f"{placement.command.instance_id}-0",
        node_id=placement.node_id,
        gpu_id=placement.gpu_id,
        num_bytes=placement.command.model.memory_bytes,
    )
