"""What becomes of a pipeline once it serves: one instance, or as many as it has stages.

Paper: HydraServe section 6.1. By default a group scales down: its first worker brings in the rest of the model and
serves alone, the others end. When as many workers are needed as a group has, it scales up instead: every worker brings
in the rest and becomes an instance. Several groups that serve at once are decided on together, oldest first.

Departure: the paper lets each worker decide for itself, so that a group may become fewer instances than it has workers;
here it is one or all. `up_share` below 1 scales up when that share of a group's workers would do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from glowplug.domain.instance import Instance


class Consolidation(StrEnum):
    """What a pipeline becomes."""

    DOWN = "consolidate_down"  # its first stage alone
    UP = "consolidate_up"  # an instance of each stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationParams:
    up_share: float = 1.0  # of a group's stages that must be needed for all of them to stay


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationDecision:
    """One pipeline's."""

    instance_id: str
    becomes: Consolidation
    reason: str


def consolidate(
    pipelines: Sequence[Instance],
    num_whole: int,
    num_required: int,
    params: ConsolidationParams = ConsolidationParams(),
) -> tuple[ConsolidationDecision, ...]:
    """A decision for each of one model's `pipelines`, oldest first. `num_required` instances are needed in all, of
    which `num_whole` (running or coming, those decided on before with what they become) are there."""
    decisions, left = [], num_required - num_whole
    for instance in pipelines:
        least = max(2, math.ceil(params.up_share * instance.num_stages - 1e-9))
        is_up = left >= least
        becomes = Consolidation.UP if is_up else Consolidation.DOWN
        need = f"{max(0, left) or 'none'} of {num_required} wanted instances {'are' if left > 1 else 'is'} missing"
        all_stages = f"so each of its {instance.num_stages} stages becomes an instance"
        reason = f"{need}, {all_stages if is_up else 'so one instance is made of its stages'}"
        decisions.append(ConsolidationDecision(instance_id=instance.instance_id, becomes=becomes, reason=reason))
        left -= instance.num_stages if is_up else 1
    return tuple(decisions)
