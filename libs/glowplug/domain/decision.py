"""The record of one decision: what was decided, by which policy, on which inputs, against which rivals."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One option that was considered. `why` says what it lacked, or why it won.

    `unit` follows the score: one that begins with "bytes" or "s" is a size or a time, one that begins with "at" a
    moment in epoch seconds ("at last use"). '' is a plain number.
    """

    name: str
    score: float
    why: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One decision of one controller, kept so that `glowplug why` can explain it. `inputs` holds numbers and strings
    only."""

    decision_id: str
    kind: str  # scale | place | evict | refuse | drain | expire | prewarm
    policy: str  # "first_fit"
    service: str
    reason: str  # one sentence a person can read
    made_at: float
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
