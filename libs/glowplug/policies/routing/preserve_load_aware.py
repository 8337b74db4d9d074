"""Load-aware routing: the instance with the least to prefill, to generate, and to fear for its KV cache.

Paper: PreServe section 4.3.3. For a request of P prompt tokens and an expected response of D, and each instance i with
`queued` tokens to prefill, `current` tokens to generate, KV capacity M and anticipated peak U over the next l steps if
the request went there:

    L_i = (queued_i + P) + (current_i + D) + beta max(0, U_i - T_mem) M_i,    the least L_i is chosen

beta = 1, T_mem = 0.8, l = 100 (erratum E35: the penalty is in tokens, so it adds; M is each instance's own).

Departure: P and D are the same for every instance, so instances are visited in the order of what is certain of their
load (`floor_of`: queued + current, and the penalty for what is in the cache now), and the search ends at the first
whose floor with P and D exceeds the best load found. The choice is the paper's. `LoadOrder.route` may be told to look
at so many instances at most: where a thousand are all nearly full, floors differ by less than the request brings, and
the best of the lowest few is within that of the best of all. Ties go to the lower floor, then to the lower id.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from glowplug.policies.decisions import RouteDecision
from glowplug.policies.prediction.preserve_anticipator import LookAhead
from glowplug.policies.routing.port import BalancerParams


@dataclass(slots=True)
class InstanceLoad:
    """What one instance has to do. `tokens` = queued to prefill + still to generate."""

    instance_id: str
    look_ahead: LookAhead
    queued_tokens: int = 0
    current_tokens: int = 0
    has_room: bool = True  # False: at its max_concurrency, or not serving
    other_kv_tokens: int = 0  # of its cache, the most that requests of other routers are to take

    @property
    def tokens(self) -> int:
        return self.queued_tokens + self.current_tokens


def load_of(
    target: InstanceLoad,
    prompt_tokens: int,
    expected_tokens: int,
    params: BalancerParams,
    enough: float = math.inf,
) -> float:
    """L_i, in tokens; or `enough` or more, once it is known to be that. The steps ahead are only looked at where they
    could cost a penalty."""
    look = target.look_ahead
    load = float(target.queued_tokens + target.current_tokens + prompt_tokens + expected_tokens)
    newcomer = prompt_tokens + min(expected_tokens, params.num_steps) - 1
    room = params.memory_ratio * look.kv_tokens - target.other_kv_tokens
    if look.at_most(params.num_steps) + newcomer <= room:
        return load
    if expected_tokens:
        at_once = load + params.penalty * (look.at_most(1) + prompt_tokens - room)
        if at_once >= enough:
            return at_once
    peak = look.peak_ratio(params.num_steps, prompt_tokens, expected_tokens)
    return load + params.penalty * max(0.0, peak * look.kv_tokens - room)


def floor_of(target: InstanceLoad, params: BalancerParams) -> float:
    """What L_i is at least beside P and D: the cache is as full as now in the first step ahead already."""
    look = target.look_ahead
    tokens = target.queued_tokens + target.current_tokens
    over = look.at_most(1) + target.other_kv_tokens - params.memory_ratio * look.kv_tokens
    return tokens + params.penalty * over if over > 0 else float(tokens)


def route(
    targets: Iterable[InstanceLoad],
    prompt_tokens: int,
    expected_tokens: int,
    params: BalancerParams = BalancerParams(),
) -> RouteDecision:
    """The instance with the least load; `instance_id` is "" when none has room. `targets` in any order."""
    ordered = sorted((floor_of(load, params), load.instance_id, load) for load in targets)
    return _least(((floor, load) for floor, _, load in ordered), prompt_tokens, expected_tokens, params)


class LoadOrder:
    """Instances kept in the order of their load while requests come and go: what `route` sorts, kept sorted."""

    def __init__(self, params: BalancerParams = BalancerParams()) -> None:
        self.params = params
        self._order: list[tuple[float, str]] = []
        self._floors: dict[str, float] = {}
        self._loads: dict[str, InstanceLoad] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def of(self, instance_id: str) -> InstanceLoad | None:
        """That instance, if it is in the order. Whoever changes it says so with `put`."""
        return self._loads.get(instance_id)

    def put(self, load: InstanceLoad) -> None:
        """Add an instance, or take in what changed of it."""
        instance_id, floor = load.instance_id, floor_of(load, self.params)
        self._loads[instance_id] = load
        old = self._floors.get(instance_id)
        if old == floor:
            return
        if old is not None:
            del self._order[bisect_left(self._order, (old, instance_id))]
        self._floors[instance_id] = floor
        insort(self._order, (floor, instance_id))

    def drop(self, instance_id: str) -> None:
        """Forget an instance. Unknown ids are none of ours."""
        if self._loads.pop(instance_id, None) is not None:
            del self._order[bisect_left(self._order, (self._floors.pop(instance_id), instance_id))]

    def route(self, prompt_tokens: int, expected_tokens: int, most: int = 0) -> RouteDecision:
        """As `route` over every instance, or over the `most` of them with room that have the lowest floors."""
        ordered = ((floor, self._loads[name]) for floor, name in self._order)
        return _least(ordered, prompt_tokens, expected_tokens, self.params, most)


def _least(
    ordered: Iterable[tuple[float, InstanceLoad]],
    prompt: int,
    expected: int,
    params: BalancerParams,
    most: int = 0,
) -> RouteDecision:
    best: InstanceLoad | None = None
    least, num_seen = 0.0, 0
    for floor, target in ordered:
        if not target.has_room:
            continue
        if best is not None and floor + prompt + expected >= least:
            break
        load = load_of(target, prompt, expected, params, math.inf if best is None else least)
        if best is None or load < least:
            best, least = target, load
        num_seen += 1
        if num_seen == most:
            break
    if best is None:
        return RouteDecision("", "every instance runs as many requests as it may")
    return RouteDecision(best.instance_id, f"it has the fewest tokens yet to compute: {least:.0f} are expected")
