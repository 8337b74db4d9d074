"""What a router asks of a routing policy: one `Balancer` per model, which learns of every event and chooses an
instance for each request.

A balancer keeps what it needs between two questions, so that a choice among a thousand instances costs no more than
one among four. Times are seconds on one clock that does not go back; tickets are the router's own.
"""

from dataclasses import dataclass
from typing import Protocol

from glowplug.domain.bounds import check_bounds
from glowplug.domain.snapshot import Outlook, Target
from glowplug.policies.decisions import RouteDecision
from glowplug.policies.prediction.preserve_anticipator import MEMORY_RATIO, NUM_STEPS, OVERLOAD_RATIO, OVERLOAD_SHARE

NONE_FREE = RouteDecision("", "every instance runs as many requests as it may")


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerParams:
    """Constants of the policies that look ahead (PreServe section 4.3); the others have none."""

    memory_ratio: float = MEMORY_RATIO  # KV use above this is penalised
    penalty: float = 1.0  # beta
    num_steps: int = NUM_STEPS
    extend_ratio: float = 0.2  # of the expected response, for who goes on beyond it
    overload_ratio: float = OVERLOAD_RATIO
    overload_share: float = OVERLOAD_SHARE
    decode_horizon: int = 0  # L_d counts the tokens of so many steps ahead; 0: all still to come, as printed
    hold_overloaded: bool = False  # a request waits while every instance is overloaded, whatever max_concurrency allows
    hold_ratio: float = OVERLOAD_RATIO  # of the KV cache: what `overload_ratio` is to an outlook, for `hold_overloaded`
    tpot_s: float = 0.05  # seconds an engine step takes, until engines or answers have shown
    tpot_slo_s: float = 0.0  # the model's objective for a token; 0: none
    stall_ratio: float = 0.0  # of that objective: an instance reads prompts no longer at a stretch; 0: as they come
    num_refreshed: int = 4  # instances brought up to date before each choice, those first that were longest ago
    most_visited: int = 8  # instances looked at for one choice, the least loaded first; 0: as many as it takes

    def __post_init__(self) -> None:
        check_bounds(self, num_steps=1, above_0=("tpot_s",))


class Balancer(Protocol):
    """One model's instances and what one router has sent them. Unknown ids and tickets are none of its own."""

    @property
    def tracks_tokens(self) -> bool:
        """Whether token counts and first tokens are of use to it: a shell may spare itself the counting if not."""

    def put(self, target: Target, now_s: float) -> None:
        """An instance may be chosen, or what is known of it has changed."""

    def filled(self, instance_id: str, num_in_flight: int) -> None:
        """So many requests run there now, those of other routers included."""

    def others(self, instance_id: str, outlook: Outlook | None) -> None:
        """What other routers have sent there and expect of it, as they last said."""

    def gone(self, instance_id: str) -> None:
        """It may not be chosen any more. What runs there may still end, and the instance may come back."""

    def sent(self, ticket: int, instance_id: str, prompt_tokens: int, expected_tokens: int, now_s: float) -> None:
        """A request goes there now, with so many prompt tokens and an expected response of so many."""

    def first_token(self, ticket: int, now_s: float) -> None:
        """Its prompt has been read, its answer begins."""

    def ended(self, ticket: int, response_tokens: int, now_s: float) -> None:
        """It is there no more: answered with so many tokens, lost or left (0)."""

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float) -> RouteDecision:
        """Where such a request should go; `instance_id` is "" when it has to wait. Nothing is sent by asking."""

    def outlook(self, instance_id: str, now_s: float) -> Outlook | None:
        """What is ahead of one instance; None from a policy that does not look ahead."""
