"""The bounds of the router's decisions."""

from dataclasses import dataclass, field
from typing import Annotated

from glowplug.domain.bounds import Bounded, Count, Positive
from glowplug.domain.reading import ADVANCED, SETTING
from glowplug.policies.prediction.response_length import LengthParams
from glowplug.policies.routing.port import BalancerParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterParams(Bounded):
    """Times are seconds."""

    router_id: str = "router-1"
    policy: str = "least_loaded"
    fairness: str = "vtc"
    waiting_every_s: float = 0.5  # request.waiting, per model
    max_dispatches: Count = 2  # engines one request may bring down before it is rejected; 2: one retry
    max_continuations: Annotated[int, SETTING] = 3  # times a stream may go on after losing its engine; 0: never
    continue_within_s: Positive = 60.0  # longest wait of such a stream for an instance
    move_within_s: Annotated[float, ADVANCED] = 5.0  # longest move of a stream off a draining instance; 0: none moves
    quarantine_s: float = 1.0
    failure_memory_s: float = 5.0  # a hopeless failure rejects new requests this long
    bus_grace_s: float = 15.0  # wait for a bus that stores nothing; its elections take up to 9 s
    default_start_s: float = 5.0
    late_ratio: Annotated[float, SETTING] = 1.2  # estimated wait over the time left that is answered 429; 0: never
    balancer: BalancerParams = field(default_factory=BalancerParams)
    lengths: LengthParams = field(default_factory=LengthParams)
