"""One instance being placed: its state, commands and refusal."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName, Worker
from glowplug.domain.phrasing import listed
from glowplug.domain.units import show_bytes
from glowplug.events.commands import FetchWeights, PlaceInstance, StartInstance, StopInstance
from glowplug.events.envelope import Event
from glowplug.policies.decisions import EvictDecision, PlaceDecision, StageDecision
from glowplug.policies.placement.expect import Expected
from glowplug.policies.worth import batch_factor

NEVER = float("-inf")
LAST = 1 << 33  # urgency of a start that waits for free memory, behind every priority
BATCH = 1 << 32  # ... and of a start for batch requests alone


@dataclass(frozen=True, slots=True)
class Waiting:
    """State without a place."""


@dataclass(frozen=True, slots=True)
class Fetching:
    """State without a place, while its weights come to the node of the instance that it replaces."""

    node_id: str


@dataclass(frozen=True, slots=True)
class MakingSpace:
    """State with bytes claimed on GPUs that instances were asked to leave; no `victims` where drains under way
    suffice."""

    stage: StageDecision
    victims: tuple[str, ...]
    asked_at: float
    sent_at: float  # the stops, for the last time


@dataclass(slots=True)
class Sent:
    stages: tuple[StageDecision, ...]
    source: str  # dormant instance it grows from, or ""
    drops: Mapping[str, tuple[str, ...]]  # node_id -> replicas
    victims: tuple[str, ...]
    started_at: float
    sent_at: float
    expected: Expected | None = None
    decision_id: str = ""
    rendezvous: str = ""  # where several stages meet
    tries_left: int = 0  # nodes it may still be tried on if its weights cannot be had here
    host_id: str = ""  # of an adapter: its base's instance

    @property
    def promised(self) -> tuple[str, ...]:
        return tuple(name for name in (self.source, *(d for drops in self.drops.values() for d in drops)) if name)


@dataclass(frozen=True, slots=True)
class Refusal:
    version: int  # of the capacity
    at: float
    answer: PlaceDecision


@dataclass(slots=True, eq=False)
class Placement:
    """One instance being placed. A Sent one that no agent answers waits again."""

    event: Event
    received_at: float
    asked_at: float  # for the last time
    state: Waiting | Fetching | MakingSpace | Sent = Waiting()
    refusal: Refusal | None = None
    lacked_at: float = 0.0  # when bytes were first found lacking; 0: never
    is_patient: bool = False  # waits for space where an engine of its model sleeps
    silent: tuple[str, ...] = ()  # nodes whose agents did not answer
    said_why: bool = False

    @property
    def command(self) -> PlaceInstance:
        command: PlaceInstance = self.event.data
        return command

    @property
    def instance_id(self) -> str:
        return self.command.instance_id

    @property
    def urgency(self) -> tuple[int, float]:
        """Of equal ones the first that came goes first."""
        first = LAST if self.command.waits else BATCH if self.command.is_batch else 0
        return first - self.command.model.priority, self.received_at

    def batch_factor(self, now_s: float) -> float:
        """Return the factor of the batch requests that alone wait for it; 0 otherwise."""
        command = self.command
        if not command.is_batch:
            return 0.0
        return batch_factor(now_s - min(command.wanted_at, self.received_at), command.model.max_wait_s)

    @property
    def sent(self) -> Sent | None:
        return self.state if isinstance(self.state, Sent) else None

    @property
    def stages(self) -> tuple[StageDecision, ...]:
        match self.state:
            case Sent(stages=stages):
                return stages
            case MakingSpace(stage=stage):
                return (stage,)
        return ()

    @property
    def victims(self) -> tuple[str, ...]:
        return () if isinstance(self.state, Waiting | Fetching) else self.state.victims

    @property
    def node_id(self) -> str:
        return self.stages[0].node_id if self.stages else ""

    @property
    def gpu_id(self) -> str:
        return self.stages[0].gpu_ids[0] if self.stages else ""

    def stage_id(self, stage: int) -> str:
        return f"{self.instance_id}.{stage}" if stage else self.instance_id

    def start_over(self) -> None:
        self.silent += (self.node_id,)
        self.state, self.refusal = Waiting(), None


def why_they_leave(placement: Placement, eviction: EvictDecision, leaving: Sequence[str]) -> str:
    model = placement.command.model
    if not leaving:
        return f"{model.name} waits for free memory on {', '.join(placement.stages[0].gpu_ids)}: {eviction.reason}"
    leave = "leaves" if len(leaving) == 1 else "leave"
    lacks = f"which lacks {show_bytes(eviction.need_bytes)}"
    return f"{listed(leaving)} {leave} {placement.node_id} for {model.name}, {lacks}: {eviction.reason}"


def stop(
    node_id: str, instance_id: str, reason: str, grace_s: float, becomes: str = "stopped", predicted_s: float = 0.0
) -> StopInstance:
    return StopInstance(
        target=node_id,
        instance_id=instance_id,
        reason=reason,
        grace_s=grace_s,
        becomes=becomes,
        predicted_s=predicted_s,
    )


def start_commands(placement: Placement, sent: Sent, numbers: Iterable[int]) -> list[FetchWeights | StartInstance]:
    """Make the commands of the given stages: the fetch of each stage's weights (if any) and its start, side by side.
    The start of the first stage names the workers of all stages."""
    command, model, num_stages = placement.command, placement.command.model, len(sent.stages)
    commands: list[FetchWeights | StartInstance] = []
    for number in numbers:
        stage, own = sent.stages[number], workers(placement, number)
        start = StartInstance(
            target=stage.node_id,
            instance_id=placement.stage_id(number),
            model=model,
            workers=own if number else sum((workers(placement, n) for n in range(num_stages)), ()),
            decision_id=sent.decision_id,
            phases=_waits(placement, sent),
            source="" if number else sent.source,
            drops=_drops(sent, number),
            part_of=command.instance_id if number else "",
            num_stages=num_stages,
            stage=number,
            predicted=sent.expected.by_phase[number] if sent.expected else {},
            predicted_s=sent.expected.start_s if sent.expected else 0.0,
            slowdown=sent.expected.slowdown if sent.expected else 1.0,
            rendezvous=sent.rendezvous,
            tries_left=sent.tries_left,
            host_id=sent.host_id,
        )
        if model.weights.uri and not sent.source:
            commands.append(_fetch(placement, sent, number))
        commands.append(start)
    return commands


def _waits(placement: Placement, sent: Sent) -> tuple[Phase, ...]:
    """Return the phases before a start: the decision and, where bytes were lacking, the wait for them."""
    wanted_at, lacked_at, started_at = placement.command.wanted_at, placement.lacked_at, sent.started_at
    decided_at = min(max(lacked_at, wanted_at), started_at) if lacked_at else started_at
    decide = Phase(name=PhaseName.DECIDE, started_at=wanted_at, ended_at=decided_at)
    if decided_at >= started_at:
        return (decide,)
    return (decide, Phase(name=PhaseName.ROOM, started_at=decided_at, ended_at=started_at))


def _drops(sent: Sent, number: int) -> tuple[str, ...]:
    """Return replicas to drop on a stage's node; only the first stage on each node names them."""
    node_id = sent.stages[number].node_id
    is_first_there = all(stage.node_id != node_id for stage in sent.stages[:number])
    return sent.drops.get(node_id, ()) if is_first_there else ()


def _fetch(placement: Placement, sent: Sent, number: int) -> FetchWeights:
    """Fetch a stage's own bytes, or all bytes where it has no range of its own."""
    stage, model = sent.stages[number], placement.command.model
    is_last = number == len(sent.stages) - 1
    last_byte = 0 if is_last or not stage.fetch_bytes else stage.first_byte + stage.fetch_bytes
    return FetchWeights(
        target=stage.node_id,
        model_key=model.key,
        weights=model.weights,
        instance_id=placement.stage_id(number),
        priority=model.priority,
        first_byte=stage.first_byte,
        last_byte=last_byte,
        stage=number,
        num_stages=len(sent.stages),
        drops=_drops(sent, number),
    )


def refused(placement: Placement, reason: str, decision_id: str, now_s: float) -> Instance:
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
