"""The policies that only count requests, as balancers: they are asked anew each time, over every instance."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glowplug.domain.snapshot import Outlook, Target
from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing import first_room as first_with_room
from glowplug.policies.routing import least_loaded as least_request
from glowplug.policies.routing import minimum_use as least_used
from glowplug.policies.routing import round_robin as in_turn
from glowplug.policies.routing.port import Balancer, BalancerParams

Route = Callable[[Sequence[Target], Mapping[str, Any] | None, str], RouteDecision]


class Counted:
    """A Balancer around a pure `route(targets, params, last chosen)`."""

    tracks_tokens = False

    def __init__(self, route: Route) -> None:
        self._route = route
        self._targets: dict[str, Target] = {}
        self._last = ""

    def put(self, target: Target, now_s: float) -> None:
        self._targets[target.instance_id] = target

    def filled(self, instance_id: str, num_in_flight: int) -> None:
        target = self._targets.get(instance_id)
        if target is not None:
            self._targets[instance_id] = Target(instance_id, num_in_flight, target.max_concurrency, target.kv_tokens)

    def others(self, instance_id: str, outlook: Outlook | None) -> None:
        """`filled` tells."""

    def gone(self, instance_id: str) -> None:
        self._targets.pop(instance_id, None)

    def sent(self, ticket: int, instance_id: str, prompt_tokens: int, expected_tokens: int, now_s: float) -> None:
        self._last = instance_id

    def first_token(self, ticket: int, now_s: float) -> None:
        """Only the number of requests counts."""

    def ended(self, ticket: int, response_tokens: int, now_s: float) -> None:
        """`filled` tells."""

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float) -> RouteDecision:
        return self._route(list(self._targets.values()), None, self._last)

    def outlook(self, instance_id: str, now_s: float) -> Outlook | None:
        return None


def least_loaded(params: BalancerParams) -> Balancer:
    return Counted(least_request.route)


def first_room(params: BalancerParams) -> Balancer:
    return Counted(first_with_room.route)


def round_robin(params: BalancerParams) -> Balancer:
    return Counted(in_turn.route)


def minimum_use(params: BalancerParams) -> Balancer:
    return Counted(least_used.route)
