"""Commands: requests of one service to another to act. Imperative, one reader. `TYPE` is `<service>.<verb>`.

`target` names the reader: a node id for agents and prefetchers, "any" for services that run once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from glowplug.domain.instance import Phase, StageAddress, Worker, check_num_stages
from glowplug.domain.model import Model, WeightsRef
from glowplug.domain.moment import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInstance:
    """Autoscaler to placer: find GPUs for one instance and start it. Idempotent by instance_id."""

    TYPE: ClassVar[str] = "placer.place"
    instance_id: str
    model: Model
    reason: str
    wanted_at: Moment
    deadline_at: Moment = 0.0
    target: str = "any"
    num_required: int = 1  # instances the model should have in the end, for which a pipeline is laid out
    waits: bool = False  # until memory is free: evicts no serving instance, and instances that will serve go first
    node_id: str = ""  # the only node allowed; "" any
    is_awaited: bool = False  # a request or an operator waits for the instance
    is_batch: bool = False  # only batch requests do: nothing leaves that others are expected to ask for
    replaces: str = ""  # outdated instance


def as_if_asked(model: Model, now_s: float, *, waits: bool, node_id: str) -> PlaceInstance:
    """The command for a hypothetical instance, to ask for its fate. It is never sent."""
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
    """Placer to agent: grant the bytes of the instance's `workers` on this node and start the engine. Idempotent by
    instance_id.

    A pipeline takes one command for each stage; a later stage is an instance of its own that is `part_of` the first.
    """

    TYPE: ClassVar[str] = "agent.start"
    target: str  # node_id
    instance_id: str
    model: Model
    workers: tuple[Worker, ...]
    decision_id: str
    phases: tuple[Phase, ...] = ()  # phases that are over already (decide)
    source: str = ""  # dormant instance of this node that the new one grows from, and that ends STOPPED
    drops: tuple[str, ...] = ()  # replicas of this node to drop at once for their bytes
    replica: bool = False  # end PREWARMED: weights only
    part_of: str = ""
    num_stages: int = 1
    stage: int = 0  # number of the stage, from 0
    predicted: Mapping[str, float] = field(default_factory=dict)  # phase -> expected seconds
    predicted_s: float = 0.0  # expected seconds from this command to READY; 0: unknown
    slowdown: float = 1.0  # by the load of the node's cores (Node), part of what is expected
    rendezvous: str = ""  # "host:port" on the first stage's node, where the stages of a pipeline find one another
    tries_left: int = 0  # other nodes to try if this one cannot get the weights
    host_id: str = ""  # of an adapter: the READY instance of its base, on this node, whose engine takes it
    adapter_slots: int = 0  # of a base: adapters that its engine holds at once; 0: none
    adapter_rank: int = 0  # of a base: the largest rank of those adapters

    def __post_init__(self) -> None:
        check_num_stages(self.num_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopInstance:
    """Placer or autoscaler to agent: drain, then stop. `grace_s` bounds the drain; 0 stops at once.

    `becomes` "prewarmed" keeps the weights on the GPUs, "swapped_out" the engine outside them, where the engine can.
    """

    TYPE: ClassVar[str] = "agent.stop"
    target: str
    instance_id: str
    reason: str
    grace_s: float = 30.0
    becomes: str = "stopped"  # stopped | prewarmed | swapped_out
    predicted_s: float = 0.0  # expected seconds until `becomes` if it runs no request; 0: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinStages:
    """Placer to the agent of a pipeline's first stage: every later stage is READY, so serve. Repeated until the
    pipeline does."""

    TYPE: ClassVar[str] = "agent.join"
    target: str
    instance_id: str
    stages: tuple[StageAddress, ...] = ()  # the later stages, in the order of the model's layers


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateInstance:
    """Autoscaler to agent: load the rest of the model while the pipeline serves, then serve alone (HydraServe 6).

    Sent for the first stage alone (the later ones stop once it is whole) or for every stage (each becomes an instance
    of its own).
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
    """Placer to prefetcher: fetch weights into host memory. `last_byte` 0 means to the end; higher priority first.

    For a stage of a pipeline the prefetcher fetches what the stage reads, or bytes [first_byte, last_byte) where the
    weights have no order of tensors. `background`: the instance serves already and loads the rest of the model, so
    that fetches for waiting requests go first.
    """

    TYPE: ClassVar[str] = "prefetcher.fetch"
    target: str
    model_key: str
    weights: WeightsRef
    instance_id: str = ""  # "" for a prefetch that no instance waits for
    priority: int = 0
    first_byte: int = 0
    last_byte: int = 0
    stage: int = 0  # number of the stage, from 0
    num_stages: int = 1
    peers: tuple[str, ...] = ()  # addresses of prefetchers that hold or fetch these weights, the best first
    background: bool = False
    drops: tuple[str, ...] = ()  # instance ids of copies on this node's GPUs that are dropped for the instance

    def __post_init__(self) -> None:
        check_num_stages(self.num_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropWeights:
    """Placer or operator to prefetcher: evict weights, unless an engine is reading them."""

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
