"""Policies that only count requests, choosing among all instances with a free slot."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from glowplug.domain.snapshot import Outlook, Target
from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing.port import NONE_FREE, Balancer, BalancerParams
from glowplug.policies.routing.prefix_index import Prefix

Pick = Callable[[Sequence[Target], str], Target]
"""Choose from instances with a free slot (longest known first, never none), given the last choice."""


class Counted:
    tracks_tokens = False
    reads_prefixes = False
    num_blocks = 0

    def __init__(self, pick: Pick, reason: str) -> None:
        self._pick, self._reason = pick, reason
        self._targets: dict[str, Target] = {}
        self._last = ""

    def put(self, target: Target, now_s: float) -> None:
        self._targets[target.instance_id] = target

    def filled(self, instance_id: str, num_in_flight: int) -> None:
        if target := self._targets.get(instance_id):
            self._targets[instance_id] = Target(instance_id, num_in_flight, target.max_concurrency, target.kv_tokens)

    def others(self, instance_id: str, outlook: Outlook | None) -> None:
        """Do nothing: `filled` counts them."""

    def gone(self, instance_id: str) -> None:
        self._targets.pop(instance_id, None)

    def sent(
        self,
        ticket: int,
        instance_id: str,
        prompt_tokens: int,
        expected_tokens: int,
        now_s: float,
        prefix: Prefix = (),
    ) -> None:
        self._last = instance_id

    def expect(self, ticket: int, expected_tokens: int, now_s: float) -> None:
        """Do nothing."""

    def first_token(self, ticket: int, now_s: float) -> None:
        """Do nothing."""

    def ended(self, ticket: int, response_tokens: int, now_s: float, cached_tokens: int = -1) -> None:
        """Do nothing: `filled` counts it."""

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float, prefix: Prefix = ()) -> RouteDecision:
        free = [t for t in self._targets.values() if t.num_in_flight < t.max_concurrency]
        return RouteDecision(self._pick(free, self._last).instance_id, self._reason) if free else NONE_FREE

    def outlook(self, instance_id: str, now_s: float) -> Outlook | None:
        return None


def least_loaded(_: BalancerParams) -> Balancer:
    """Choose the fewest requests in flight (PreServe section 3.2.2, "LR"; WarmServe's router)."""
    requests = attrgetter("num_in_flight", "instance_id")
    return Counted(lambda free, last: min(free, key=requests), "it has the fewest requests in flight")


def round_robin(_: BalancerParams) -> Balancer:
    """Choose the next instance by id (PreServe section 3.2.2, a baseline)."""

    def following(free: Sequence[Target], last: str) -> Target:
        ordered = sorted(free, key=attrgetter("instance_id"))
        return next((target for target in ordered if target.instance_id > last), ordered[0])

    return Counted(following, "its turn is next")


def minimum_use(_: BalancerParams) -> Balancer:
    """Choose the least used capacity (PreServe section 3.2.2, "MU").

    Departure: the paper weighs GPU utilization and memory usage; a Target carries neither, so use is the occupied share
    of its slots. On instances of one size this equals least request, on unequal ones it does not."""

    def use(target: Target) -> tuple[float, str]:
        return target.num_in_flight / target.max_concurrency, target.instance_id

    return Counted(lambda free, last: min(free, key=use), "it uses the smallest share of its slots")


def first_room(_: BalancerParams) -> Balancer:
    """Choose the longest known instance with a free slot, as HydraServe's published code does (the paper does not say):
    one added for a burst runs out of requests soonest and ends by its keep-alive (section 8.1)."""
    return Counted(lambda free, last: free[0], "it is the first that may run another request")
