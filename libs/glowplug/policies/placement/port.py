"""The shape of every placement policy, and its view.

place(request: PlaceRequest, view: PlacementView) -> PlaceDecision
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from glowplug.domain.model import Model
from glowplug.fleet.node_index import FleetView
from glowplug.fleet.start_times import StartTimes
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.placement.links import LinkLedger
from glowplug.policies.placement.shape import parts_of

NO_STAGES = StageSeconds()
_READS_SECONDS = "reads_seconds"
_Place = TypeVar("_Place", bound=Callable[..., Any])


def reads_seconds(place: _Place) -> _Place:
    """Mark a policy as reading `seconds`, so that the placer learns them."""
    setattr(place, _READS_SECONDS, True)
    return place


def wants_seconds(place: Callable[..., Any]) -> bool:
    return bool(getattr(place, _READS_SECONDS, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest:
    instance_id: str
    model: Model
    waited_s: float = 0.0
    num_required: int = 1  # instances wanted in the end
    is_to_sleep: bool = False  # after its start: one worker, since no pipeline sleeps
    is_awaited: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView(FleetView):
    links: Mapping[str, LinkLedger] = field(default_factory=dict)  # node_id -> fetches on its network card
    times: StartTimes = field(default_factory=lambda: StartTimes(priors={}))  # durations of starts; read-only
    seconds: Mapping[str, StageSeconds] = field(default_factory=dict)  # model_key -> measured warm inference
    first_token_s: Mapping[str, float] = field(default_factory=dict)  # model_key -> measured s from READY to the first
    # token of a request that waited for the start
    stage_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # digest -> CachedWeights.stage_bytes
    start_stages: StageSeconds = NO_STAGES  # of models that have not served yet

    def warm(self, model: Model) -> StageSeconds | None:
        return self.seconds.get(model.key)

    def parts(self, model: Model, num_stages: int) -> tuple[int, ...]:
        """Return bytes fetched by each of `num_stages` stages, or () if unknown."""
        known = self.stage_bytes.get(model.weights.digest, ()) if self.stage_bytes else ()
        return parts_of(known, num_stages)

    def first_tokens(self, model: Model, otherwise_s: float) -> float:
        return self.first_token_s.get(model.key, otherwise_s)
