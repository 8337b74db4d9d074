"""The shape of a routing policy: one `Balancer` per model, which learns of every event and chooses an instance for each
request.

A balancer keeps its state between two choices, so that a choice among a thousand instances costs no more than one among
four. Times are seconds on one clock that does not go back; tickets are the router's own.
"""

from dataclasses import dataclass
from typing import Protocol

from glowplug.domain.bounds import check_bounds
from glowplug.domain.snapshot import Outlook, Target
from glowplug.fleet.throughput import MEMORY_RATIO
from glowplug.policies.decisions import RouteDecision
from glowplug.policies.prediction.preserve_anticipator import NUM_STEPS, OVERLOAD_RATIO, OVERLOAD_SHARE
from glowplug.policies.routing.prefix_index import Prefix

NONE_FREE = RouteDecision("", "every instance runs as many requests as it may")


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerParams:
    """Constants of the policies that look ahead (PreServe section 4.3); the others have none."""

    memory_ratio: float = MEMORY_RATIO  # KV use above this is penalised
    penalty: float = 1.0  # beta
    num_steps: int = NUM_STEPS
    extend_ratio: float = 0.2  # of the expected response, by which a longer answer is extended
    overload_ratio: float = OVERLOAD_RATIO
    overload_share: float = OVERLOAD_SHARE
    learn_lengths: bool = False  # use actual lengths of past answers; False: expected lengths, as printed
    decode_horizon: int = 0  # L_d counts the tokens of so many steps ahead; 0: all of them, as printed
    hold_overloaded: bool = False  # a request waits while all instances are overloaded, even with free slots
    hold_ratio: float = OVERLOAD_RATIO  # of the KV cache: as `overload_ratio`, but for `hold_overloaded`
    tpot_s: float = 0.05  # seconds of an engine step, until engines or answers show it
    tpot_slo_s: float = 0.0  # the model's objective for a token; 0: none
    stall_ratio: float = 0.0  # of `tpot_slo_s`: longest uninterrupted prefill; 0: no limit
    num_refreshed: int = 4  # instances updated before each choice, the longest out of date first
    most_visited: int = 8  # instances visited per choice, the least loaded first; 0: no limit
    block_tokens: int = 64  # of a prompt, that have a hash of their own
    most_blocks: int = 100_000  # of prompts, tracked for all instances of a model

    def __post_init__(self) -> None:
        check_bounds(self, num_steps=1, block_tokens=1, above_0=("tpot_s",))


class Balancer(Protocol):
    """One model's instances and the requests that one router has sent them. Unknown ids and tickets are ignored."""

    @property
    def tracks_tokens(self) -> bool:
        """Whether the balancer uses token counts and first tokens: if not, a shell need not count them."""

    @property
    def reads_prefixes(self) -> bool:
        """Whether the balancer uses the blocks of prompts: if not, a shell need not hash them."""

    @property
    def num_blocks(self) -> int:
        """Blocks of prompts that it keeps track of, each once for each instance."""

    def put(self, target: Target, now_s: float) -> None:
        """Add an instance that may be chosen, or update what is known of it."""

    def filled(self, instance_id: str, num_in_flight: int) -> None:
        """Set the number of requests at an instance, those of other routers included."""

    def others(self, instance_id: str, outlook: Outlook | None) -> None:
        """Set what other routers last reported of the requests they sent to an instance."""

    def gone(self, instance_id: str) -> None:
        """Exclude an instance from further choices. Its requests may still end, and it may come back."""

    def sent(
        self,
        ticket: int,
        instance_id: str,
        prompt_tokens: int,
        expected_tokens: int,
        now_s: float,
        prefix: Prefix = (),
    ) -> None:
        """Add a request sent to an instance, with the tokens of its prompt and the expected tokens of its response, and
        the blocks of its prompt where they are known."""

    def expect(self, ticket: int, expected_tokens: int, now_s: float) -> None:
        """Update the expected response of a request that was sent: its tokens in all."""

    def first_token(self, ticket: int, now_s: float) -> None:
        """Note that a request's prompt has been read and its answer begins."""

    def ended(self, ticket: int, response_tokens: int, now_s: float, cached_tokens: int = -1) -> None:
        """Remove a request from its instance: answered with `response_tokens`, or lost or left (0). `cached_tokens`: of
        its prompt, those that its engine had in its cache; -1: unknown."""

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float, prefix: Prefix = ()) -> RouteDecision:
        """Choose an instance for such a request; `instance_id` is "" when it has to wait. The choice changes no
        state."""

    def outlook(self, instance_id: str, now_s: float) -> Outlook | None:
        """Return the expected load of one instance; None from a policy that does not look ahead."""
