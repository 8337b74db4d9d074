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
    max_dispatches: int = 2  # engines one request may bring down before the router rejects it; 2: one retry
    max_continuations: int = 3  # engines that may go on with one stream after others were lost; 0: none
    continue_within_s: float = 60.0  # how long such a stream may wait for an instance
    move_within_s: float = 0.0  # how long moving a stream off a draining instance may take; 0: none is moved
    quarantine_s: float = 1.0
    failure_memory_s: float = 5.0  # how long a hopeless failure rejects new requests at once
    bus_grace_s: float = 5.0  # how long held requests wait for a bus that stores nothing
    default_start_s: float = 5.0
    late_ratio: float = 1.2  # refuse a request whose estimated wait is so many times what it may still wait; 0: never
    balancer: BalancerParams = field(default_factory=BalancerParams)
    lengths: LengthParams = field(default_factory=LengthParams)

    def __post_init__(self) -> None:
        check_bounds(self, max_dispatches=1, max_continuations=0)
