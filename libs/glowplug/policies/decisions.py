"""The decisions of all policies, with their reasons and mostly the rivals' scores."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.decision import Rival


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The instance for one request; "" holds it."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    model_key: str
    num_wanted: int
    drain: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    reason: str = ""
    inputs: Mapping[str, float | int | str] = field(default_factory=dict)
    group_size: int = 1  # supplied by one start (HydraServe section 6.1)
    num_required: int = 0  # by demand, without those kept
    stands_until: float = 0.0  # epoch s, unless the model changes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDecision:
    """One pipeline stage: GPUs of one node (several: a tensor group), and bytes on each. It fetches `fetch_bytes` from
    `first_byte` first (0: the whole model); `part_bytes`: the same by the reported cut of the layers, else 0."""

    node_id: str
    gpu_ids: tuple[str, ...]
    bytes_per_gpu: int
    first_byte: int = 0
    fetch_bytes: int = 0
    part_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecision:
    """Empty `stages` means nowhere now; `possible` False means no GPU could ever hold it. `source` is the dormant
    instance to grow from, `drops` the replicas evicted at once, both on the only stage's node."""

    stages: tuple[StageDecision, ...] = ()
    source: str = ""
    drops: tuple[str, ...] = ()
    possible: bool = True
    reason: str = ""
    rivals: tuple[Rival, ...] = ()
    whole_gpus: bool = False  # wants GPUs that serve no other
    is_late: bool = False  # the bytes would fit, but too late

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
    """The holders to evict, in order; empty if they would not free enough."""

    victims: tuple[str, ...] = ()
    freed_bytes: int = 0
    need_bytes: int = 0  # bytes that were lacking
    reason: str = ""
    rivals: tuple[Rival, ...] = ()
