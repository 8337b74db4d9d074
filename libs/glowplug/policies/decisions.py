"""The decisions of all policies. Each carries its reason, and most carry the scores of the rivals."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.decision import Rival


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The instance that one request goes to; "" holds the request. Made per request, so it carries no rivals."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """The number of instances one model should have, and which to drain when there are more."""

    model_key: str
    num_wanted: int
    drain: tuple[str, ...] = ()  # instance ids
    resume: tuple[str, ...] = ()  # draining instances to take back
    reason: str = ""
    inputs: Mapping[str, float | int | str] = field(default_factory=dict)
    group_size: int = 1  # missing instances that one start may supply (HydraServe section 6.1)
    num_required: int = 0  # instances that demand needs; `num_wanted` may also keep some that are not released yet
    stands_until: float = 0.0  # epoch s until which this decision holds unless something about the model changes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDecision:
    """One pipeline stage of an instance: the GPUs of one node that it takes (several: a tensor group), and the bytes on
    each. The stage fetches `fetch_bytes` of the model first, starting at `first_byte`; 0 means the whole model.
    `part_bytes`: what the stage fetches where a node has reported how the layers are cut, else 0."""

    node_id: str
    gpu_ids: tuple[str, ...]
    bytes_per_gpu: int
    first_byte: int = 0
    fetch_bytes: int = 0
    part_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecision:
    """The place of one instance. `stages` empty means nowhere now; `possible` False means no GPU could ever hold it.

    `source` is the dormant instance that the new one grows from, `drops` the replicas evicted at once; both are on the
    node of the (then only) stage.
    """

    stages: tuple[StageDecision, ...] = ()
    source: str = ""
    drops: tuple[str, ...] = ()
    possible: bool = True
    reason: str = ""
    rivals: tuple[Rival, ...] = ()
    whole_gpus: bool = False  # the instance wants GPUs that serve no other
    is_late: bool = False  # the bytes would fit, but the start would be too late for the objectives

    @property
    def node_id(self) -> str:
        return self.stages[0].node_id if self.stages else ""

    @property
    def gpu_id(self) -> str:
        return self.stages[0].gpu_ids[0] if self.stages else ""

    @property
    def num_bytes(self) -> int:
        return sum(stage.bytes_per_gpu * len(stage.gpu_ids) for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictDecision:
    """The holders that give their bytes back, in order. Empty when all that may be evicted would not free enough."""

    victims: tuple[str, ...] = ()
    freed_bytes: int = 0
    need_bytes: int = 0  # bytes that were lacking
    reason: str = ""
    rivals: tuple[Rival, ...] = ()
