"""Record decisions: outcome, policy, inputs and rivals."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.moment import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """An option. `why`: the reason it lost or won. `unit` of the score: "bytes..." a size, "s..." a time, "at..." a
    moment in epoch seconds ("at last use"), '' a plain number."""

    name: str
    score: float
    why: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A controller's decision, for `glowplug why`. `inputs`: numbers and strings only."""

    decision_id: str
    kind: str  # scale | place | evict | refuse | drain | expire | prewarm
    policy: str  # "first_fit"
    service: str
    reason: str  # one readable sentence
    made_at: Moment
    model_key: str = ""
    instance_id: str = ""
    node_id: str = ""
    gpu_id: str = ""
    request_id: str = ""
    chosen: str = ""
    inputs: Mapping[str, float | int | str] = field(default_factory=dict)
    rivals: tuple[Rival, ...] = ()
    cause_id: str = ""
    traceparent: str = ""
