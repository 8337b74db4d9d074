"""Like Llumnix (OSDI 2024), without live migration: route and scale by freeness, the decode steps left before an
instance's KV cache is full. Baseline of PreServe (sections 5 and 5.3).

Routing (Llumnix section 4.4) takes the instance with the highest

    F = (M - sum of V) / B

where M is its KV capacity in tokens, V a request's tokens (held, or asked for if queued) and B its batch size. F is
negative when more is queued than fits. Scaling adds an instance when the average stays below `low_steps` for `hold_s`,
and drains the one with the fewest requests when it stays above `high_steps`.

Departures: routing counts all queued requests, not only the first; ties go to fewer requests, then the lower id. In
scaling V is the peak that the router's look-ahead expects, not blocks counted inside the engine; where the KV size is
unknown or no router looks ahead, the batch's share in use is compared with `high_ratio` and `low_ratio`.
"""

import math
from dataclasses import dataclass

from glowplug.domain.bounds import Positive
from glowplug.domain.instance import Instance
from glowplug.domain.phrasing import counted
from glowplug.policies.decisions import RouteDecision, ScaleDecision
from glowplug.policies.routing.port import NONE_FREE, Balancer, BalancerParams
from glowplug.policies.routing.prefix_index import Prefix
from glowplug.policies.routing.tracked import Tracked, Tracker
from glowplug.policies.scaling.port import ScalingView, settle


def freeness(kv_tokens: int, tokens_used: int, num_requests: int) -> float:
    """F, in steps; without requests, all tokens."""
    return (kv_tokens - tokens_used) / max(1, num_requests)


class Freest(Tracker):
    """The Balancer `llumnix_like`, which compares all instances at each choice."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LlumnixParams:
    low_steps: Positive = 10.0
    high_steps: Positive = 60.0
    high_ratio: Positive = 0.9  # share in use of a full instance, if steps are unknown
    low_ratio: Positive = 0.4
    hold_s: Positive = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LlumnixState:
    """Epoch seconds."""

    tight_since: float | None = None
    loose_since: float | None = None


def scale(
    view: ScalingView, state: LlumnixState | None = None, params: LlumnixParams = LlumnixParams()
) -> tuple[ScaleDecision, LlumnixState]:
    """Add or drain an instance when average freeness stays out of range."""
    state = state or LlumnixState()
    ready, there = view.ready, view.num_coming_or_there
    if not ready:
        wanted = max(there, 1 if view.demand else 0)
        return settle(view, wanted if view.demand else 0, "no instance is ready yet"), LlumnixState()
    spaces = [_free(view, i, params) for i in ready]
    tight, loose = sum(s[0] for s in spaces) / len(ready) < 0, sum(s[1] for s in spaces) / len(ready) > 0
    tight = tight or view.load.num_waiting > 0
    since = LlumnixState(
        tight_since=(view.now_s if state.tight_since is None else state.tight_since) if tight else None,
        loose_since=(view.now_s if state.loose_since is None else state.loose_since) if loose and not tight else None,
    )
    is_coming = there > len(ready)
    if since.tight_since is not None and view.now_s - since.tight_since >= params.hold_s and not is_coming:
        reason = f"{counted(len(ready), 'instance')} had too little free on average for {params.hold_s:g} s"
        return settle(view, there + 1, reason), LlumnixState()
    if since.loose_since is not None and view.now_s - since.loose_since >= params.hold_s:
        reason = f"{counted(len(ready), 'instance')} had much free on average for {params.hold_s:g} s"
        decision = settle(view, there - 1 if there > 1 or not view.demand else there, reason)
        return decision, LlumnixState() if decision.drain else since
    return settle(view, there, f"{counted(len(ready), 'instance')} had neither too little free nor much"), since


def _free(view: ScalingView, instance: Instance, params: LlumnixParams) -> tuple[float, float]:
    outlook = view.load.outlook_by_instance.get(instance.instance_id)
    batch = view.in_flight(instance)
    if outlook is not None and instance.kv_tokens > 0:
        steps = (1 - outlook.peak_ratio) * instance.kv_tokens / batch if batch else math.inf
        steps = min(steps, 2 * params.high_steps)  # an empty instance must not outweigh the others
        return steps - params.low_steps, steps - params.high_steps
    used = outlook.peak_ratio if outlook is not None else batch / max(1, instance.max_concurrency)
    return params.high_ratio - used, params.low_ratio - used
