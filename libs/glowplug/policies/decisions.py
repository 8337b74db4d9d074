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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecision:
    """Where one instance goes. `gpu_id` "" means nowhere now; `possible` False means no GPU could ever hold it."""

    node_id: str = ""
    gpu_id: str = ""
    num_bytes: int = 0
    possible: bool = True
    reason: str = ""
    rivals: tuple[Rival, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictDecision:
    """Which holders give their bytes back, in order. Empty when what may go is not enough."""

    victims: tuple[str, ...] = ()
    freed_bytes: int = 0
    reason: str = ""
    rivals: tuple[Rival, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastDecision:
    """Expected concurrency of one model over the coming window."""

    model_key: str
    concurrency_mean: float
    concurrency_peak: float
    reason: str = ""
