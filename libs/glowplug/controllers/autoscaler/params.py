"""The autoscaler's bounds."""

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
    absent_s: float = 30.0  # a standby believes in a model without a row for so long, unless no model has one
    consolidate: bool = True  # pipelines become single instances (HydraServe section 6); False leaves them as they are
    stop_becomes: Becomes = "stopped"  # what an instance becomes that the policy drains, if it can
    rest_s: float = 5.0  # a model without instances or load is looked at again after this, or when it is spoken of
    gather_s: float = 0.0  # a queue is so old before it starts anything: a burst is seen whole (HydraServe's window)
    lead_s: float = 0.0  # a policy sees the forecast of the window that holds the time so far ahead

    def __post_init__(self) -> None:
        check_bounds(self)
