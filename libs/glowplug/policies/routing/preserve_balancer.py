"""PreServe's router with its bookkeeping: `preserve_load_aware.route` among instances that are kept in order.

Paper: PreServe section 4.3.3. An instance that is full, or overloaded where those are held, is out of the order, so
that nobody has to walk past it. When nothing is left in the order the request waits in the router's queue.

Departure: the tokens still to be generated shrink with every step of every engine. Before a choice those instances are
brought up to date where something was sent, began or ended since the choice before, and until they are `num_refreshed`
others in turn: up to so many the order is exact, of a thousand each is off by what it generates during some hundred
choices.

Option: `decode_horizon`. Printed is current_d, all tokens still to be generated. Of two instances with the same sum
the one with many short answers left runs the larger batch and is slower now; counting only the tokens of the steps
ahead tells them apart.
"""

from collections import OrderedDict
from dataclasses import replace

from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing.port import Balancer, BalancerParams
from glowplug.policies.routing.preserve_load_aware import InstanceLoad, LoadOrder
from glowplug.policies.routing.tracked import NOTHING, Tracked, Tracker


class LoadAware(Tracker):
    """The Balancer `preserve_load_aware`."""

    def __init__(self, params: BalancerParams) -> None:
        super().__init__(params)
        self._order = LoadOrder(params)
        self._news: dict[str, Tracked] = {}  # those that have changed since the last choice
        self._turns: OrderedDict[str, Tracked] = OrderedDict()  # those with requests, whose turn comes next first

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float) -> RouteDecision:
        self._refresh(now_s)
        return self._order.route(prompt_tokens, expected_tokens, self.params.most_visited)

    def _touched(self, here: Tracked) -> None:
        self._news[here.instance_id] = here

    def _refresh(self, now_s: float) -> None:
        news, self._news = self._news, {}
        for here in news.values():
            self._settle(here, now_s)
            self._bring_up(here)
        turns = self._turns
        for _ in range(min(self.params.num_refreshed - len(news), len(turns))):
            here = next(iter(turns.values()))
            turns.move_to_end(here.instance_id)
            if here.instance_id not in news:
                self._settle(here, now_s)
                self._bring_up(here)

    def _bring_up(self, here: Tracked) -> None:
        """Its place in the order is what it has to do now."""
        instance_id, look = here.instance_id, here.look
        if not len(look):
            self._turns.pop(instance_id, None)
        elif self._turns.get(instance_id) is not here:
            self._turns[instance_id] = here
        if not self._has_room(here):
            self._order.drop(instance_id)
            return
        load = self._order.of(instance_id)
        if load is None or load.look_ahead is not look:
            load = InstanceLoad(instance_id, look)
        load.queued_tokens, load.current_tokens = here.queued_tokens, look.tokens_left
        horizon, others = self.params.decode_horizon, here.others
        if horizon:
            load.current_tokens = look.tokens_left_within(horizon)
        if others is not NOTHING:
            num_others = max(0, here.num_in_flight - len(look))
            load.queued_tokens += others.queued_tokens
            load.current_tokens += min(others.current_tokens, num_others * (horizon or others.current_tokens))
            load.other_kv_tokens = here.other_kv_tokens
        else:
            load.other_kv_tokens = 0
        self._order.put(load)


def preserve_load_aware(params: BalancerParams) -> Balancer:
    return LoadAware(params)


def union(params: BalancerParams) -> Balancer:
    """`preserve_load_aware` with three changes.

    It counts the decode load of the steps it looks ahead: what is generated after them slows nobody who is routed now.
    It holds what would overload everybody. Where the model has an objective for its tokens it sends prompts in
    stretches of half of that (`tracked.Reading`)."""
    changed = replace(params, decode_horizon=params.num_steps, hold_overloaded=True, stall_ratio=0.5)
    return LoadAware(changed)
