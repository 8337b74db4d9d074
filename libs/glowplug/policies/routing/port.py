"""The shape of a routing policy: one stateful `Balancer` per model, so that a choice among a thousand instances costs
no more than among four. Times are seconds on a monotonic clock; tickets are the router's own.
"""

from dataclasses import dataclass
from typing import Protocol

from glowplug.domain.bounds import Bounded, Count, Positive
from glowplug.domain.snapshot import Outlook, Target
from glowplug.fleet.throughput import MEMORY_RATIO
from glowplug.policies.decisions import RouteDecision
from glowplug.policies.prediction.preserve_anticipator import NUM_STEPS, OVERLOAD_RATIO, OVERLOAD_SHARE
from glowplug.policies.routing.prefix_index import Prefix

NONE_FREE = RouteDecision("", "every instance runs as many requests as it may")


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerParams(Bounded):
    """Constants of the look-ahead policies (PreServe section 4.3)."""

    memory_ratio: float = MEMORY_RATIO  # KV use penalised above this
    penalty: float = 1.0  # beta
    num_steps: Count = NUM_STEPS
    extend_ratio: float = 0.2  # of the expected response
    overload_ratio: float = OVERLOAD_RATIO
    overload_share: float = OVERLOAD_SHARE
    learn_lengths: bool = False  # use actual lengths; False: expected, as printed
    decode_horizon: int = 0  # steps ahead in L_d; 0: all, as printed
    hold_overloaded: bool = False  # requests wait while all instances are overloaded
    hold_ratio: float = OVERLOAD_RATIO  # as `overload_ratio`, but for `hold_overloaded`
    tpot_s: Positive = 0.05  # seconds of an engine step, until measured
    tpot_slo_s: float = 0.0  # the model's objective for a token; 0: none
    stall_ratio: float = 0.0  # of `tpot_slo_s`: longest uninterrupted prefill; 0: no limit
    num_refreshed: int = 4  # instances updated per choice
    most_visited: int = 8  # per choice; 0: no limit
    block_tokens: Count = 64  # of a prompt, per hash
    most_blocks: int = 100_000  # of prompts, tracked per model


class Balancer(Protocol):
    """One model's instances and this router's requests. Unknown ids and tickets are ignored."""

    @property
    def tracks_tokens(self) -> bool:
        """Whether token counts and first tokens are used."""

    @property
    def reads_prefixes(self) -> bool:
        """Whether the blocks of prompts are used."""

    @property
    def num_blocks(self) -> int:
        """Tracked blocks, once per instance."""

    def put(self, target: Target, now_s: float) -> None:
        """Add or update an instance."""

    def filled(self, instance_id: str, num_in_flight: int) -> None:
        """Set an instance's requests, of all routers."""

    def others(self, instance_id: str, outlook: Outlook | None) -> None:
        """Set other routers' last report."""

    def gone(self, instance_id: str) -> None:
        """Exclude an instance; its requests may still end, and it may return."""

    def sent(
        self,
        ticket: int,
        instance_id: str,
        prompt_tokens: int,
        expected_tokens: int,
        now_s: float,
        prefix: Prefix = (),
    ) -> None:
        """Add a request, with its prompt and expected response tokens and known prompt blocks."""

    def expect(self, ticket: int, expected_tokens: int, now_s: float) -> None:
        """Update a request's expected response tokens."""

    def first_token(self, ticket: int, now_s: float) -> None:
        """Note that a request's prompt was read."""

    def ended(self, ticket: int, response_tokens: int, now_s: float, cached_tokens: int = -1) -> None:
        """Remove a request: `response_tokens` is 0 if lost, `cached_tokens` of its prompt -1 if unknown."""

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float, prefix: Prefix = ()) -> RouteDecision:
        """Choose without a change of state; `instance_id` is "" to wait."""

    def outlook(self, instance_id: str, now_s: float) -> Outlook | None:
        """Return the expected load; None without look-ahead."""
