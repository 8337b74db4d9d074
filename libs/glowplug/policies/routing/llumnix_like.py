"""Like Llumnix: the instance with the most freeness, which is how many more steps its batch could go on for.

Baseline of PreServe (section 5). Llumnix (OSDI 2024, section 4.4) dispatches to the instance with the highest

    F = (M - sum of V) / B

where M is its KV capacity in tokens, V what each of its requests holds (for one in the queue: what it asks for) and B
the requests in its batch. F is negative when more is queued than fits. It looks at what is, not at what is to come.

Departures: Llumnix itself is live migration between instances; nothing is moved here once it has been sent. All queued
requests count, not the first of the queue alone. Equal freeness goes to fewer requests, then to the lower id.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing.port import Balancer, BalancerParams
from glowplug.policies.routing.tracked import Tracker


@dataclass(frozen=True, slots=True)
class Use:
    """One instance. `tokens_used` of `kv_tokens` are held or asked for by its `num_requests`."""

    instance_id: str
    num_requests: int
    tokens_used: int
    kv_tokens: int


def freeness(use: Use) -> float:
    """F, in steps; of an instance without requests, all of its tokens."""
    return (use.kv_tokens - use.tokens_used) / max(1, use.num_requests)


def route(targets: Iterable[Use]) -> RouteDecision:
    """The freest of `targets`, each of which may run another request; `instance_id` is "" when there is none."""
    best = min(targets, key=lambda use: (-freeness(use), use.num_requests, use.instance_id), default=None)
    if best is None:
        return RouteDecision("", "every instance runs as many requests as it may")
    return RouteDecision(
        best.instance_id, f"its KV cache holds {freeness(best):.0f} more steps of its batch, the most of all"
    )


class Freest(Tracker):
    """The Balancer `llumnix_like`: it asks every instance each time."""

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float) -> RouteDecision:
        uses = []
        for here in self.instances.values():
            self._settle(here, now_s)
            if self._has_room(here):
                used = here.look.at_most(1) + here.other_kv_tokens
                uses.append(Use(here.instance_id, here.num_in_flight, used, here.look.kv_tokens))
        return route(uses)


def llumnix_like(params: BalancerParams) -> Balancer:
    return Freest(params)
