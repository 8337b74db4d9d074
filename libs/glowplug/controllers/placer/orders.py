"""One instance being placed, and what is written about it: its decision record, its commands, its refusal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glowplug.domain.decision import DecisionRecord, Rival
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName, Worker
from glowplug.domain.phrasing import listed
from glowplug.domain.units import show_bytes
from glowplug.events.commands import FetchWeights, PlaceInstance, StartInstance, StopInstance
from glowplug.events.envelope import Event
from glowplug.policies.decisions import EvictDecision, PlaceDecision, StageDecision
from glowplug.policies.placement.expect import Expected

NEVER = float("-inf")
_UNASKED = PlaceDecision()


@dataclass(slots=True, eq=False)
class Placement:
    """One instance being placed. `stages` set: bytes are reserved there. `sent_at` set: its starts have been sent."""

    event: Event
    received_at: float
    asked_at: float  # when it was last asked for
    stages: tuple[StageDecision, ...] = ()
    source: str = ""  # the dormant row it grows from
    drops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # node_id -> replicas that give way there
    decision_id: str = ""
    victims: tuple[str, ...] = ()
    asked_victims_at: float = NEVER
    lacked_at: float = 0.0  # when it was first found that there is no room for it; 0: there was room at once
    started_at: float = 0.0
    sent_at: float = 0.0
    silent: tuple[str, ...] = ()  # nodes whose agents did not answer a start of it
    tried_version: int = -1  # of the books, when its policy found no room
    tried_at: float = NEVER
    answer: PlaceDecision = _UNASKED  # what it said
    expected: Expected | None = None  # of its start

    @property
    def command(self) -> PlaceInstance:
        command: PlaceInstance = self.event.data
        return command

    @property
    def instance_id(self) -> str:
        return self.command.instance_id

    @property
    def urgency(self) -> tuple[int, float, str]:
        """Sorts the most urgent first."""
        return (-self.command.model.priority, self.received_at, self.instance_id)

    @property
    def node_id(self) -> str:
        return self.stages[0].node_id if self.stages else ""

    @property
    def gpu_id(self) -> str:
        return self.stages[0].gpu_ids[0] if self.stages else ""

    def stage_id(self, stage: int) -> str:
        """The row that stands for one of its stages."""
        return f"{self.instance_id}.{stage}" if stage else self.instance_id

    def shift(self, by_s: float) -> None:
        """Move every wait by a jump of the clock."""
        self.received_at += by_s
        self.asked_at += by_s
        self.asked_victims_at += by_s
        self.tried_at += by_s
        if self.sent_at:
            self.sent_at += by_s
            self.started_at += by_s

    def start_over(self) -> None:
        """Its agent does not answer: forget the place, and remember whose silence it was."""
        self.silent += (self.node_id,)
        self.stages, self.source, self.drops = (), "", {}
        self.sent_at = self.started_at = 0.0
        self.expected = None
        self.victims = ()
        self.tried_version = -1


def makes_room(placement: Placement, eviction: EvictDecision, leaving: Sequence[str]) -> str:
    """Why others leave for it, as a sentence; `leaving`: who they are, as a reader is told."""
    model = placement.command.model
    if not leaving:
        return f"{model.name} waits for room on {', '.join(placement.stages[0].gpu_ids)}: {eviction.reason}"
    leave = "leaves" if len(leaving) == 1 else "leave"
    lacks = f"which lacks {show_bytes(eviction.need_bytes)}"
    return f"{listed(leaving)} {leave} {placement.node_id} for {model.name}, {lacks}: {eviction.reason}"


def stop(node_id: str, instance_id: str, reason: str, grace_s: float, becomes: str = "stopped") -> StopInstance:
    """What ends an instance, drained for at most `grace_s`."""
    return StopInstance(target=node_id, instance_id=instance_id, reason=reason, grace_s=grace_s, becomes=becomes)


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
    figures: Mapping[str, int] | None = None,
) -> DecisionRecord:
    """The decision as `why` prints it, at the GPU the placement has now. `figures`: inputs beside the usual ones."""
    command, expected = placement.command, placement.expected
    inputs: dict[str, float | int | str] = {
        "need_bytes": command.model.memory_bytes,
        "waited_s": round(now_s - command.wanted_at, 4),
        "engine": command.model.engine,
        "asked_because": command.reason,
        **(figures or {}),
    }
    if expected is not None:
        inputs["start_kind"] = expected.kind.value
        inputs["predicted_start_s"] = round(expected.start_s, 4)
        inputs["predicted_ttft_s"] = round(expected.ttft_s, 4)
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


def start_commands(placement: Placement, stages: range | None = None) -> list[Any]:
    """What brings a placed instance up: for each stage the fetch of its weights (if it has any) and its start, side by
    side. The first stage's start names a worker of every stage; `stages` picks some of them."""
    command, model, num_stages = placement.command, placement.command.model, len(placement.stages)
    told: list[Any] = []
    for number in stages if stages is not None else range(num_stages):
        stage, own = placement.stages[number], workers(placement, number)
        start = StartInstance(
            target=stage.node_id,
            instance_id=placement.stage_id(number),
            model=model,
            workers=own if number else sum((workers(placement, n) for n in range(num_stages)), ()),
            decision_id=placement.decision_id,
            phases=_waits(placement),
            source="" if number else placement.source,
            drops=placement.drops.get(stage.node_id, ()) if _is_first_there(placement, number) else (),
            part_of=command.instance_id if number else "",
            num_stages=num_stages,
            stage=number,
            predicted=placement.expected.by_phase[number] if placement.expected else {},
            predicted_s=placement.expected.start_s if placement.expected else 0.0,
        )
        if model.weights.uri and not placement.source:
            told.append(_fetch(placement, number))
        told.append(start)
    return told


def _waits(placement: Placement) -> tuple[Phase, ...]:
    """What was waited for before the start: the decision, and then room where there was none."""
    wanted_at, lacked_at, started_at = placement.command.wanted_at, placement.lacked_at, placement.started_at
    decided_at = min(max(lacked_at, wanted_at), started_at) if lacked_at else started_at
    decide = Phase(name=PhaseName.DECIDE, started_at=wanted_at, ended_at=decided_at)
    if decided_at >= started_at:
        return (decide,)
    return (decide, Phase(name=PhaseName.ROOM, started_at=decided_at, ended_at=started_at))


def _is_first_there(placement: Placement, number: int) -> bool:
    return all(stage.node_id != placement.stages[number].node_id for stage in placement.stages[:number])


def _fetch(placement: Placement, number: int) -> FetchWeights:
    """A stage's own bytes; all of them where it has no range of its own."""
    stage, model = placement.stages[number], placement.command.model
    is_last = number == len(placement.stages) - 1
    last_byte = 0 if is_last or not stage.fetch_bytes else stage.first_byte + stage.fetch_bytes
    return FetchWeights(
        target=stage.node_id,
        model_key=model.key,
        weights=model.weights,
        instance_id=placement.stage_id(number),
        priority=model.priority,
        first_byte=stage.first_byte,
        last_byte=last_byte,
    )


def refused(placement: Placement, reason: str, decision_id: str, now_s: float) -> Instance:
    """An instance that failed before it was anywhere, so that whoever waits for it is answered."""
    command = placement.command
    return Instance(
        instance_id=command.instance_id,
        model_key=command.model.key,
        engine=command.model.engine,
        state=InstanceState.FAILED,
        workers=workers(placement, 0) if placement.stages else (_nowhere(placement),),
        created_at=command.wanted_at,
        changed_at=now_s,
        reason=reason,
        decision_id=decision_id,
    )


def workers(placement: Placement, number: int) -> tuple[Worker, ...]:
    """The GPU processes of one stage: one, or a tensor group."""
    stage = placement.stages[number]
    return tuple(
        Worker(
            worker_id=f"{placement.stage_id(number)}-{rank}",
            node_id=stage.node_id,
            gpu_id=gpu_id,
            num_bytes=stage.bytes_per_gpu,
            rank=rank,
        )
        for rank, gpu_id in enumerate(stage.gpu_ids)
    )


def _nowhere(placement: Placement) -> Worker:
    num_bytes = placement.command.model.memory_bytes
    return Worker(worker_id=f"{placement.instance_id}-0", node_id="", gpu_id="", num_bytes=num_bytes)
