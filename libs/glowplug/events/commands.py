"""Commands: what one service asks of another. Imperative, one reader. `TYPE` is `<service>.<verb>`.

`target` names the reader: a node id for agents and prefetchers, "any" for services that run once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from glowplug.domain.instance import Phase, StageAddress, Worker, check_num_stages
from glowplug.domain.model import Model, WeightsRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInstance:
    """Autoscaler to placer: find GPUs for one instance and start it. Idempotent by instance_id."""

    TYPE: ClassVar[str] = "placer.place"
    instance_id: str
    model: Model
    reason: str
    wanted_at: float
    deadline_at: float = 0.0
    target: str = "any"
    num_required: int = 1  # instances the model is to have in the end: what a pipeline is laid out for
    waits: bool = False  # for free memory: no instance that serves leaves for it, and whoever serves goes first
    node_id: str = ""  # on that node alone; "" anywhere
    is_awaited: bool = False  # a request or an operator waits for it


def as_if_asked(model: Model, now_s: float, *, waits: bool, node_id: str) -> PlaceInstance:
    """The command for an instance that nobody has asked for: what would become of it is looked up. It is not sent."""
    return PlaceInstance(instance_id="", model=model, reason="", wanted_at=now_s, waits=waits, node_id=node_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelPlacement:
    """Autoscaler to placer: the instance is no longer wanted, if it has not been placed."""

    TYPE: ClassVar[str] = "placer.cancel"
    instance_id: str
    reason: str
    target: str = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartInstance:
    """Placer to agent: grant the bytes of its `workers` on this node and start the engine. Idempotent by instance_id.

    A pipeline of s stages takes s commands: one for the instance itself (its first stage, with every worker) and one
    for each later stage, an instance of its own that is `part_of` it.
    """

    TYPE: ClassVar[str] = "agent.start"
    target: str  # node_id
    instance_id: str
    model: Model
    workers: tuple[Worker, ...]
    decision_id: str
    phases: tuple[Phase, ...] = ()  # phases already over (decide)
    source: str = ""  # dormant instance of this node that it grows from; that one ends STOPPED
    drops: tuple[str, ...] = ()  # replicas of this node that give their bytes up for it, at once
    replica: bool = False  # end PREWARMED: weights only
    part_of: str = ""
    num_stages: int = 1
    stage: int = 0  # which of them, from 0
    predicted: Mapping[str, float] = field(default_factory=dict)  # phase -> seconds it is expected to take
    predicted_s: float = 0.0  # the whole start, from this command to READY; 0: not known
    rendezvous: str = ""  # "host:port" on the first stage's node, where the stages of a pipeline find one another
    tries_left: int = 0  # other nodes on which it may be tried, should its weights not be had on this one

    def __post_init__(self) -> None:
        check_num_stages(self.num_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopInstance:
    """Placer or autoscaler to agent: drain, then stop. `grace_s` bounds the drain; 0 stops at once.

    `becomes` "prewarmed" keeps the weights on the GPUs as a replica, "swapped_out" the engine outside them, where the
    engine can; else it stops.
    """

    TYPE: ClassVar[str] = "agent.stop"
    target: str
    instance_id: str
    reason: str
    grace_s: float = 30.0
    becomes: str = "stopped"  # stopped | prewarmed | swapped_out
    predicted_s: float = 0.0  # until it is that, if it runs nothing; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinStages:
    """Placer to the agent of a pipeline's first stage: every later stage is READY, serve. Repeated until it is."""

    TYPE: ClassVar[str] = "agent.join"
    target: str
    instance_id: str
    stages: tuple[StageAddress, ...] = ()  # the later ones, in the order of the model's layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateInstance:
    """Autoscaler to agent: bring the rest of the model in behind the pipeline's back and serve alone from then on, with
    `model.memory_bytes` of memory (HydraServe section 6).

    Sent for the first stage alone (scale down: the later ones are stopped once it is whole, and their KV has moved to
    it) or for every stage (scale up: each becomes an instance of its own).
    """

    TYPE: ClassVar[str] = "agent.consolidate"
    target: str
    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeInstance:
    """Autoscaler to agent: end a drain that is no longer wanted."""

    TYPE: ClassVar[str] = "agent.resume"
    target: str
    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchWeights:
    """Placer to prefetcher: bring weights into host memory. `last_byte` 0 means to the end; higher priority first.

    For a stage of a pipeline what it reads is brought, by the order of the weights' tensors; bytes [first_byte,
    last_byte) where they have no such order. `peers` are prefetchers of other nodes that hold these weights, or are
    bringing them. `background`: the instance serves already and is to have all of the model (consolidation): whatever
    a request waits for goes first. `drops`: copies on this node's GPUs that give way to the instance: host memory does
    not count on them any more.
    """

    TYPE: ClassVar[str] = "prefetcher.fetch"
    target: str
    model_key: str
    weights: WeightsRef
    instance_id: str = ""  # "" for a prefetch that no instance waits for
    priority: int = 0
    first_byte: int = 0
    last_byte: int = 0
    stage: int = 0  # which of `num_stages`, from 0
    num_stages: int = 1
    peers: tuple[str, ...] = ()  # their addresses, the best first
    background: bool = False
    drops: tuple[str, ...] = ()  # their instance ids

    def __post_init__(self) -> None:
        check_num_stages(self.num_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropWeights:
    """Placer or operator to prefetcher: let weights go, unless an engine is reading them."""

    TYPE: ClassVar[str] = "prefetcher.drop"
    target: str
    digest: str
    reason: str


Command = (
    PlaceInstance
    | CancelPlacement
    | StartInstance
    | StopInstance
    | ResumeInstance
    | FetchWeights
    | DropWeights
    | JoinStages
    | ConsolidateInstance
)
