"""Like Llumnix: the instance with the most freeness, the number of steps that its batch could still run.

Baseline of PreServe (section 5). Llumnix (OSDI 2024, section 4.4) dispatches to the instance with the highest

    F = (M - sum of V) / B

where M is its KV capacity in tokens, V what each of its requests holds (a queued one: what it asks for) and B the
requests in its batch. F is negative when more is queued than fits. It considers the present load, not the load to come.

Departures: Llumnix itself is live migration between instances; here no request moves once it has been sent. All queued
requests count, not the first of the queue alone. Equal freeness goes to fewer requests, then to the lower id.
"""

from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing.port import NONE_FREE, Balancer, BalancerParams
from glowplug.policies.routing.prefix_index import Prefix
from glowplug.policies.routing.tracked import Tracked, Tracker


def freeness(kv_tokens: int, tokens_used: int, num_requests: int) -> float:
    """F, in steps; for an instance without requests, all of its tokens."""
    return (kv_tokens - tokens_used) / max(1, num_requests)


class Freest(Tracker):
    """The Balancer `llumnix_like`: it compares every instance at each choice."""

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float, prefix: Prefix = ()) -> RouteDecision:
        free: list[tuple[float, int, str]] = []
        for here in self.instances.values():
            self._settle(here, now_s)
            if self._may_take_one(here):
                free.append((-_steps_left(here), here.num_in_flight, here.instance_id))
        if not free:
            return NONE_FREE
        steps, _, instance_id = min(free)
        return RouteDecision(instance_id, f"its KV cache holds {-steps:.0f} more steps of its batch, the most of all")


def _steps_left(here: Tracked) -> float:
    used = here.look.at_most(1) + here.other_kv_tokens
    return freeness(here.look.kv_tokens, used, here.num_in_flight)


def llumnix_like(params: BalancerParams) -> Balancer:
    return Freest(params)
