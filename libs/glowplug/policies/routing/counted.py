"""The policies that only count requests, as balancers: they are asked anew each time, over every instance.

- `least_loaded`: the instance with the fewest requests in flight (PreServe section 3.2.2, "LR"; WarmServe's router).
- `round_robin`: the next instance by id after the one chosen last (PreServe section 3.2.2, a baseline).
- `minimum_use`: the instance whose capacity is used least (PreServe section 3.2.2, "MU").
- `first_room`: the first instance with a free slot, of those a router has known longest. HydraServe's published code
  sends a request so (the paper does not say): what came first is filled first, and what a burst added runs out of work
  soonest and goes by its keep-alive (section 8.1).

Departure: for `minimum_use` the paper weighs GPU utilization and memory usage; a Target carries neither, so use is the
share of its concurrent requests that is taken. On instances of one size this is least request; on unequal ones not.
"""

from collections.abc import Callable, Sequence

from glowplug.domain.snapshot import Outlook, Target
from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing.port import Balancer, BalancerParams

Choose = Callable[[Sequence[Target], str], RouteDecision]  # (instances, the id chosen last)
NONE_FREE = RouteDecision("", "every instance runs as many requests as it may")


def fewest(targets: Sequence[Target], last: str = "") -> RouteDecision:
    """The fewest requests in flight."""
    best: Target | None = None
    for target in targets:
        if target.num_in_flight >= target.max_concurrency:
            continue
        if best is None or (target.num_in_flight, target.instance_id) < (best.num_in_flight, best.instance_id):
            best = target
    return NONE_FREE if best is None else RouteDecision(best.instance_id, "it has the fewest requests in flight")


def least_used(targets: Sequence[Target], last: str = "") -> RouteDecision:
    """The lowest `num_in_flight / max_concurrency`."""
    free = [t for t in targets if t.num_in_flight < t.max_concurrency]
    if not free:
        return NONE_FREE
    best = min(free, key=lambda t: (t.num_in_flight / t.max_concurrency, t.instance_id))
    return RouteDecision(best.instance_id, "it uses the smallest share of its slots")


def next_by_id(targets: Sequence[Target], last: str = "") -> RouteDecision:
    """The first whose id follows `last`, from the lowest id again after the highest."""
    free = sorted(t.instance_id for t in targets if t.num_in_flight < t.max_concurrency)
    if not free:
        return NONE_FREE
    return RouteDecision(next((instance_id for instance_id in free if instance_id > last), free[0]), "its turn is next")


def first_known(targets: Sequence[Target], last: str = "") -> RouteDecision:
    """The first, in the order given."""
    for target in targets:
        if target.num_in_flight < target.max_concurrency:
            return RouteDecision(target.instance_id, "it is the first that may run another request")
    return NONE_FREE


class Counted:
    """A Balancer around one of these choices."""

    tracks_tokens = False

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._targets: dict[str, Target] = {}
        self._last = ""

    def put(self, target: Target, now_s: float) -> None:
        self._targets[target.instance_id] = target

    def filled(self, instance_id: str, num_in_flight: int) -> None:
        target = self._targets.get(instance_id)
        if target is not None:
            self._targets[instance_id] = Target(instance_id, num_in_flight, target.max_concurrency, target.kv_tokens)

    def others(self, instance_id: str, outlook: Outlook | None) -> None:
        """`filled` counts them."""

    def gone(self, instance_id: str) -> None:
        self._targets.pop(instance_id, None)

    def sent(self, ticket: int, instance_id: str, prompt_tokens: int, expected_tokens: int, now_s: float) -> None:
        self._last = instance_id

    def first_token(self, ticket: int, now_s: float) -> None:
        """Only the number of requests counts."""

    def ended(self, ticket: int, response_tokens: int, now_s: float) -> None:
        """`filled` counts it."""

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float) -> RouteDecision:
        return self._choose(list(self._targets.values()), self._last)

    def outlook(self, instance_id: str, now_s: float) -> Outlook | None:
        return None


def least_loaded(params: BalancerParams) -> Balancer:
    return Counted(fewest)


def round_robin(params: BalancerParams) -> Balancer:
    return Counted(next_by_id)


def minimum_use(params: BalancerParams) -> Balancer:
    return Counted(least_used)


def first_room(params: BalancerParams) -> Balancer:
    return Counted(first_known)
