"""What a placement policy is asked, and what it may look at. Every policy of this kind has this shape:

place(request: PlaceRequest, view: PlacementView) -> PlaceDecision
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from glowplug.domain.model import Model
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.placement.links import LinkLedger
from glowplug.policies.placement.node_index import FleetView
from glowplug.policies.placement.shape import parts_of
from glowplug.policies.start_times import StartTimes

NO_STAGES = StageSeconds()
_READS_SECONDS = "reads_seconds"
_Place = TypeVar("_Place", bound=Callable[..., Any])


def reads_seconds(place: _Place) -> _Place:
    """Marks a policy that looks at its view's `seconds`: for it the placer learns from every start and warm request."""
    setattr(place, _READS_SECONDS, True)
    return place


def wants_seconds(place: Callable[..., Any]) -> bool:
    """Whether that policy is so marked."""
    return bool(getattr(place, _READS_SECONDS, False))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest:
    """One instance that needs a place."""

    instance_id: str
    model: Model
    waited_s: float = 0.0
    num_required: int = 1  # instances the model is to have in the end
    is_to_sleep: bool = False  # once it has started: it is one worker, since no pipeline sleeps
    is_awaited: bool = False  # a request waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView(FleetView):
    """The fleet as a placement sees it."""

    links: Mapping[str, LinkLedger] = field(default_factory=dict)  # node_id -> fetches under way on its network card
    times: StartTimes = field(default_factory=lambda: StartTimes(priors={}))  # what starts take; read only
    seconds: Mapping[str, StageSeconds] = field(default_factory=dict)  # model_key -> its warm inference, measured
    first_token_s: Mapping[str, float] = field(default_factory=dict)  # model_key -> from READY to the first token of
    # who waited for it, measured
    stage_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # digest -> CachedWeights.stage_bytes
    start_stages: StageSeconds = NO_STAGES  # warm inference of models that have not served yet

    def warm(self, model: Model) -> StageSeconds | None:
        """The model's warm inference; None where no request has shown it."""
        return self.seconds.get(model.key)

    def parts(self, model: Model, num_stages: int) -> tuple[int, ...]:
        """What each stage of a pipeline of so many fetches; () where no node has seen how its layers are cut."""
        known = self.stage_bytes.get(model.weights.digest, ()) if self.stage_bytes else ()
        return parts_of(known, num_stages)

    def first_tokens(self, model: Model, otherwise_s: float) -> float:
        """Seconds from READY to the first token of a request that waited for it."""
        return self.first_token_s.get(model.key, otherwise_s)
