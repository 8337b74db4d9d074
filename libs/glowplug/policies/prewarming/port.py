"""The shape of every prewarming policy, and its view.

plan(view: PrewarmView) -> PrewarmPlan
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import Forecast
from glowplug.fleet.node_index import FleetView
from glowplug.policies.placement.warmserve_evict_aware import PrewarmStep
from glowplug.policies.worth import InMemory

_WEIGHS = "weighs_worth"
_Plan = TypeVar("_Plan", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmView(FleetView):
    """The fleet as prewarming sees it. `models` are those to plan for; `load_s` is T_c."""

    models: Mapping[str, Model]
    draining: frozenset[str] = frozenset()
    finishing: Mapping[str, Sequence[Instance]] = field(default_factory=dict)  # node_id -> rows of draining instances
    num_active: Mapping[str, int] = field(default_factory=dict)  # model_key -> instances that serve or will (K)
    num_leaving_copies: Mapping[str, int] = field(default_factory=dict)  # model_key -> idle ones that drain
    slots: Mapping[str, int] = field(default_factory=dict)  # concurrent requests; absent: as declared
    forecasts: Mapping[str, Forecast] = field(default_factory=dict)
    load_s: Mapping[str, float] = field(default_factory=dict)
    prefill_s: Mapping[str, float] = field(default_factory=dict)  # quickest seen; filled in if `reads_profile`
    growth_s: Mapping[str, float] = field(default_factory=dict)  # quickest start from a replica, likewise
    last_used_at: Mapping[str, float] = field(default_factory=dict)
    climb_s: Mapping[str, float] = field(default_factory=dict)  # seconds that a replica saves a start; for `weighing`
    holdings: Mapping[str, InMemory] = field(default_factory=dict)  # worth of each dormant copy, likewise

    def slots_of(self, model: Model) -> int:
        return self.slots.get(model.key, model.max_concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmPlan:
    """Replicas to make, most valuable first, and to drop. `scores`: worth of existing replicas; 0 if absent."""

    steps: tuple[PrewarmStep, ...] = ()
    drops: tuple[str, ...] = ()
    scores: Mapping[str, float] = field(default_factory=dict)
    inputs: Mapping[str, float | int | str] = field(default_factory=dict)
    unpaid: Mapping[str, str] = field(default_factory=dict)  # replica_id -> why it is not worth its GPUs


def reads_profile(plan: Callable[..., Any] | None) -> bool:
    """Return whether options need model profiles, which the placer then learns."""
    params = getattr(plan, "keywords", {}).get("params")
    return bool(getattr(getattr(params, "plan", params), "first_layers", False))


def weighing(plan: _Plan) -> _Plan:
    """Mark a policy as reading `holdings` and `climb_s`."""
    setattr(plan, _WEIGHS, True)
    return plan


def weighs_worth(plan: Callable[..., Any] | None) -> bool:
    return bool(getattr(plan, _WEIGHS, False))


def outdated(view: PrewarmView) -> tuple[str, ...]:
    return tuple(
        row.instance_id
        for rows in view.fleet.dormant.values()
        for row in rows
        if (model := view.models.get(row.model_key)) is None or row.is_outdated(model)
    )
