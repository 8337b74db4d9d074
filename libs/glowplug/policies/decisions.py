"""Every Decision on one page. A decision carries its reason and the scores of its rivals."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.decision import Rival


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The instance one request goes to; "" to hold it. Made per request, so it carries no rivals."""

    instance_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDecision:
    """How many instances one model should have, and which to drain when fewer."""

    model_key: str
    num_wanted: int
    drain: tuple[str, ...] = ()  # instance ids
    resume: tuple[str, ...] = ()  # draining instances to take back
    reason: str = ""
    inputs: Mapping[str, float | int | str] = field(default_factory=dict)
    group_size: int = 1  # of those missing, so many may come of one start (HydraServe section 6.1)
    num_required: int = 0  # instances needed, without those that are only not let go yet
    stands_until: float = 0.0  # a look before would give the same answer, if nothing about the model changes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDecision:
    """One pipeline stage of an instance: the GPUs of one node that it takes (several: a tensor group), and the bytes on
    each. `fetch_bytes` of the model come first, those from `first_byte` on; 0 means all of it. `part_bytes`: what it
    fetches where a node has seen how the layers are cut, else 0."""

    node_id: str
    gpu_ids: tuple[str, ...]
    bytes_per_gpu: int
    first_byte: int = 0
    fetch_bytes: int = 0
    part_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecision:
    """Where one instance goes. `stages` empty means nowhere now; `possible` False means no GPU could ever hold it.

    `source` is the dormant instance it grows from, `drops` the replicas that give way at once, both on the node of the
    (then only) stage.
    """

    stages: tuple[StageDecision, ...] = ()
    source: str = ""
    drops: tuple[str, ...] = ()
    possible: bool = True
    reason: str = ""
    rivals: tuple[Rival, ...] = ()
    whole_gpus: bool = False  # it wants GPUs that serve nobody
    is_late: bool = False  # its bytes would fit, but not in time: other seconds or objectives may be told otherwise

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
    """Which holders give their bytes back, in order. Empty when what may go is not enough."""

    victims: tuple[str, ...] = ()
    freed_bytes: int = 0
    need_bytes: int = 0  # that were lacking
    reason: str = ""
    rivals: tuple[Rival, ...] = ()
