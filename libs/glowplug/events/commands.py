"""Commands: what one service asks of another. Imperative, one reader. `TYPE` is `<service>.<verb>`.

`target` names the reader: a node id for agents and prefetchers, "any" for services that run once.
"""

from dataclasses import dataclass
from typing import ClassVar

from glowplug.domain.instance import Phase, Worker
from glowplug.domain.model import Model, WeightsRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInstance:
    """Autoscaler to placer: find room for one instance and start it. Idempotent by instance_id."""

    TYPE: ClassVar[str] = "placer.place"
    instance_id: str
    model: Model
    reason: str
    wanted_at: float
    deadline_at: float = 0.0
    target: str = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelPlacement:
    """Autoscaler to placer: the instance is no longer wanted, if it has not been placed."""

    TYPE: ClassVar[str] = "placer.cancel"
    instance_id: str
    reason: str
    target: str = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartInstance:
    """Placer to agent: grant the bytes of `worker` and start the engine. Idempotent by instance_id."""

    TYPE: ClassVar[str] = "agent.start"
    target: str  # node_id
    instance_id: str
    model: Model
    workers: tuple[Worker, ...]
    decision_id: str
    phases: tuple[Phase, ...] = ()  # phases already over (decide)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopInstance:
    """Placer or autoscaler to agent: drain, then stop. `grace_s` bounds the drain; 0 stops at once."""

    TYPE: ClassVar[str] = "agent.stop"
    target: str
    instance_id: str
    reason: str
    grace_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeInstance:
    """Autoscaler to agent: end a drain that is no longer wanted."""

    TYPE: ClassVar[str] = "agent.resume"
    target: str
    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchWeights:
    """Placer to prefetcher: bring weights into host memory. `last_byte` 0 means to the end; higher priority first."""

    TYPE: ClassVar[str] = "prefetcher.fetch"
    target: str
    model_key: str
    weights: WeightsRef
    instance_id: str = ""  # "" for a prefetch nobody waits for
    priority: int = 0
    first_byte: int = 0
    last_byte: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DropWeights:
    """Placer or operator to prefetcher: let weights go, unless an engine is reading them."""

    TYPE: ClassVar[str] = "prefetcher.drop"
    target: str
    digest: str
    reason: str


Command = PlaceInstance | CancelPlacement | StartInstance | StopInstance | ResumeInstance | FetchWeights | DropWeights
