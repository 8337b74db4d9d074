"""Load-aware routing: the fewest tokens to prefill and generate, and the least risk to the KV cache.

Paper: PreServe section 4.3.3. For a request of P prompt tokens and an expected response of D, and each instance i with
`queued` tokens to prefill, `current` tokens to generate, KV capacity M and anticipated peak U over the next l steps if
the request went there:

    L_i = (queued_i + P) + (current_i + D) + beta max(0, U_i - T_mem) M_i,    the least L_i is chosen

beta = 1, T_mem = 0.8, l = 100 (erratum E35: the penalty is in tokens, so it adds; M is each instance's own).

Departures:
- P and D are the same everywhere, so instances are visited in the order of a lower bound (`floor_of`) until it exceeds
  the best load: the paper's choice. `most_visited` bounds the visits: where a thousand are nearly full, floors differ
  by less than the request adds. Ties: lower floor, then lower id.
- Tokens to generate shrink with every step. A choice updates instances with events since the last, then others in turn,
  up to `num_refreshed`: exact for so few; of a thousand, each is off by its tokens of some hundred choices.

Full instances, and overloaded ones where those are held, are not in the order. While it is empty the request waits.

Option `decode_horizon`: counts only tokens of the steps ahead instead of all left (current_d as printed). Of equal
sums, many short answers mean a larger batch, which is slower now.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from glowplug.policies.decisions import RouteDecision
from glowplug.policies.prediction.preserve_anticipator import LookAhead
from glowplug.policies.routing.port import NONE_FREE, Balancer, BalancerParams
from glowplug.policies.routing.prefix_index import Prefix
from glowplug.policies.routing.tracked import NOTHING, Tracked, Tracker


@dataclass(slots=True)
class InstanceLoad:
    instance_id: str
    look_ahead: LookAhead
    queued_tokens: int = 0
    current_tokens: int = 0
    other_kv_tokens: int = 0  # expected peak of other routers'


def load_of(
    target: InstanceLoad, prompt_tokens: int, expected_tokens: int, params: BalancerParams, enough: float = math.inf
) -> float:
    """Return L_i in tokens, or at least `enough` once it reaches that."""
    look = target.look_ahead
    load = float(target.queued_tokens + target.current_tokens + prompt_tokens + expected_tokens)
    newcomer = prompt_tokens + min(expected_tokens, params.num_steps) - 1
    unpunished = params.memory_ratio * look.kv_tokens - target.other_kv_tokens
    if look.at_most(params.num_steps) + newcomer <= unpunished:
        return load
    if expected_tokens:
        at_once = load + params.penalty * (look.at_most(1) + prompt_tokens - unpunished)
        if at_once >= enough:
            return at_once
    peak = look.peak_ratio(params.num_steps, prompt_tokens, expected_tokens)
    return load + params.penalty * max(0.0, peak * look.kv_tokens - unpunished)


def floor_of(target: InstanceLoad, params: BalancerParams) -> float:
    """Return a lower bound of L_i without P and D: the first step ahead is as full as now."""
    look = target.look_ahead
    tokens = target.queued_tokens + target.current_tokens
    over = look.at_most(1) + target.other_kv_tokens - params.memory_ratio * look.kv_tokens
    return tokens + params.penalty * over if over > 0 else float(tokens)


class LoadOrder:
    def __init__(self, params: BalancerParams = BalancerParams()) -> None:
        self.params = params
        self._order: list[tuple[float, str]] = []
        self._floors: dict[str, float] = {}
        self._loads: dict[str, InstanceLoad] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def of(self, instance_id: str) -> InstanceLoad | None:
        """Return an instance's load; call `put` after changing it."""
        return self._loads.get(instance_id)

    def put(self, load: InstanceLoad) -> None:
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
        if self._loads.pop(instance_id, None) is not None:
            del self._order[bisect_left(self._order, (self._floors.pop(instance_id), instance_id))]

    def lowest(self, num: int) -> Iterator[str]:
        return (instance_id for _, instance_id in islice(self._order, num or None))

    def route(self, prompt: int, expected: int) -> RouteDecision:
        """Choose the least load of all, or of the `most_visited` lowest floors."""
        best: InstanceLoad | None = None
        least = math.inf
        for num_seen, (floor, instance_id) in enumerate(self._order, 1):
            if floor + prompt + expected >= least:
                break
            target = self._loads[instance_id]
            load = load_of(target, prompt, expected, self.params, least)
            if load < least:
                best, least = target, load
            if num_seen == self.params.most_visited:
                break
        if best is None:
            return NONE_FREE
        return RouteDecision(best.instance_id, "it has the fewest tokens yet to compute")


class LoadAware(Tracker):
    def __init__(self, params: BalancerParams) -> None:
        super().__init__(params)
        self._order = LoadOrder(params)
        self._busy: OrderedDict[str, Tracked] = OrderedDict()  # longest out of date first

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float, prefix: Prefix = ()) -> RouteDecision:
        if len(self.instances) == 1:
            (here,) = self.instances.values()
            self._settle(here, now_s)
            return here.as_the_only_one if self._may_take_one(here) else NONE_FREE
        self._refresh(now_s)
        return self._order.route(prompt_tokens, expected_tokens)

    def _refresh(self, now_s: float) -> None:
        changed, self._changed = self._changed, {}
        for here in changed.values():
            self._bring_up(here, now_s)
        for _ in range(min(self.params.num_refreshed - len(changed), len(self._busy))):
            here = next(iter(self._busy.values()))
            self._busy.move_to_end(here.instance_id)
            if here.instance_id not in changed:
                self._bring_up(here, now_s)

    def _bring_up(self, here: Tracked, now_s: float) -> None:
        self._settle(here, now_s)
        instance_id, look = here.instance_id, here.look
        if not look.ramps:
            self._busy.pop(instance_id, None)
        elif self._busy.get(instance_id) is not here:
            self._busy[instance_id] = here
        if not self._may_take_one(here):
            self._order.drop(instance_id)
            return
        load = self._order.of(instance_id)
        if load is None or load.look_ahead is not look:
            load = InstanceLoad(instance_id, look)
        horizon, others = self.params.decode_horizon, here.others
        load.queued_tokens = here.queued_tokens
        load.current_tokens = look.tokens_left_within(horizon) if horizon else look.tokens_left
        load.other_kv_tokens = 0
        if others is not NOTHING:
            num_others = max(0, here.num_in_flight - len(look.ramps))
            load.queued_tokens += others.queued_tokens
            load.current_tokens += min(others.current_tokens, num_others * (horizon or others.current_tokens))
            load.other_kv_tokens = here.other_kv_tokens
        self._order.put(load)

    def _forget_if_over(self, here: Tracked) -> None:
        super()._forget_if_over(here)
        if here.instance_id not in self.instances:
            self._busy.pop(here.instance_id, None)
            self._order.drop(here.instance_id)


def preserve_load_aware(params: BalancerParams) -> Balancer:
    return LoadAware(params)


def union(params: BalancerParams) -> Balancer:
    """Build `preserve_load_aware` with four changes.

    - Answers are assumed as long as past ones, not as expected (answer_lengths.py).
    - Decode load counts only within the steps ahead: later tokens do not slow a request routed now.
    - A request that would overload every instance is held, and one step too full is an overload: a full cache makes an
      engine recompute prompts, which costs more than a wait.
    - Under a TPOT objective prompts are sent in stretches of half of it (`tracked.Reading`)."""
    return LoadAware(union_params(params))


def union_params(params: BalancerParams) -> BalancerParams:
    return replace(
        params,
        learn_lengths=True,
        decode_horizon=params.num_steps,
        hold_overloaded=True,
        overload_share=0.0,
        stall_ratio=0.5,
    )
