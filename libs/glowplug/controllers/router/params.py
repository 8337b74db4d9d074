"""The bounds of the router's decisions."""

from dataclasses import dataclass, field

from glowplug.domain.bounds import check_bounds
from glowplug.policies.prediction.response_length import LengthParams
from glowplug.policies.routing.port import BalancerParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParams:
    """Times are seconds. Raises OutOfBounds naming the field."""

    router_id: str = "router-1"
    policy: str = "least_loaded"
    fairness: str = "vtc"
    waiting_every_s: float = 0.5  # request.waiting, per model
    max_dispatches: int = 2  # engines one request may bring down before it is rejected; 2: one retry
    max_continuations: int = 3  # engines that may continue one stream after losses; 0: none
    continue_within_s: float = 60.0  # longest wait of such a stream for an instance
    move_within_s: float = 0.0  # longest move of a stream off a draining instance; 0: none moves
    quarantine_s: float = 1.0
    failure_memory_s: float = 5.0  # a hopeless failure rejects new requests this long
    bus_grace_s: float = 5.0  # held requests wait this long for a bus that stores nothing
    default_start_s: float = 5.0
    late_ratio: float = 1.2  # refuse when the estimated wait exceeds the remaining time by this factor; 0: never
    balancer: BalancerParams = field(default_factory=BalancerParams)
    lengths: LengthParams = field(default_factory=LengthParams)

    def __post_init__(self) -> None:
        check_bounds(self, max_dispatches=1, max_continuations=0)
