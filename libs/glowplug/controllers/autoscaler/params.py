"""Bounds and times of the autoscaler."""

from dataclasses import dataclass

from glowplug.domain.bounds import check_bounds
from glowplug.domain.instance import Becomes


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerParams:
    """How long things may take or stay, in seconds. Raises OutOfBounds naming the field."""

    repeat_s: float = 2.0  # an unanswered command is sent again after this
    drain_grace_s: float = 300.0  # longest drain: it ends hung engines, not slow answers
    backoff_s: float = 0.5  # after a failed start; doubles with each, up to max_backoff_s
    max_backoff_s: float = 30.0
    orphan_s: float = 10.0  # instances of an unknown model are stopped after this
    absent_s: float = 30.0  # how long a standby keeps a model whose row is missing, unless all rows are
    consolidate: bool = True  # pipelines become single instances (HydraServe section 6); False leaves them as they are
    stop_becomes: Becomes = "stopped"  # what an instance drained by the policy becomes, if it can
    rest_s: float = 5.0  # a model without instances or load is looked at again after this, or when an event names it
    gather_s: float = 0.0  # age of a queue before it starts instances, to see a burst whole (HydraServe's window)
    lead_s: float = 0.0  # how far ahead the window lies whose forecast a policy sees

    def __post_init__(self) -> None:
        check_bounds(self)
