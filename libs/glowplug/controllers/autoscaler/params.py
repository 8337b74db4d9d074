"""Bounds of the autoscaler."""

from dataclasses import dataclass
from typing import Annotated

from glowplug.domain.bounds import Bounded
from glowplug.domain.instance import Becomes
from glowplug.domain.reading import SETTING


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerParams(Bounded):
    """Times in seconds."""

    repeat_s: float = 2.0  # between repeats of a command
    drain_grace_s: float = 300.0  # longest drain: it ends hung engines, not slow answers
    backoff_s: float = 0.5  # after a failed start; doubles with each, up to max_backoff_s
    max_backoff_s: float = 30.0
    orphan_s: float = 10.0  # before instances of an unknown model are stopped
    absent_s: float = 30.0  # for a standby to keep a model whose row alone is missing
    consolidate: bool = True  # pipelines (HydraServe section 6)
    stop_becomes: Annotated[Becomes, SETTING] = "stopped"  # an idle instance becomes this where its engine can
    rest_s: float = 5.0  # between looks at a model without instances or load
    gather_s: float = 0.0  # queue age before starts, to see a burst whole (HydraServe's window)
    lead_s: float = 0.0  # from now to the policy's forecast window
