"""PreServe's router with its bookkeeping: `preserve_load_aware.route` among instances that are kept in order.

Paper: PreServe section 4.3.3. An instance that is full, or overloaded where those are held, is out of the order, so
that nobody has to walk past it. When nothing is left in the order the request waits in the router's queue.

Departure: the tokens still to be generated shrink with every step of every engine. Before a choice the instances that
were brought up to date longest ago are, `num_refreshed` of them: up to so many the order is exact, of a thousand each
is off by what it generates in a hundred choices or so. Whatever is sent, begins or ends brings its own up to date.
"""

from collections import OrderedDict

from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing.port import Balancer, BalancerParams
from glowplug.policies.routing.preserve_load_aware import LoadAwareParams, LoadOrder
from glowplug.policies.routing.tracked import Tracked, Tracker


class LoadAware(Tracker):
    """The Balancer `preserve_load_aware`."""

    def __init__(self, params: BalancerParams) -> None:
        super().__init__(params)
        self._order = LoadOrder(
            LoadAwareParams(memory_ratio=params.memory_ratio, penalty=params.penalty, num_steps=params.num_steps)
        )
        self._turns: OrderedDict[str, Tracked] = OrderedDict()  # those with requests, longest not settled first

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float) -> RouteDecision:
        self._refresh(now_s)
        return self._order.route(prompt_tokens, expected_tokens)

    def _refresh(self, now_s: float) -> None:
        for _ in range(min(self.params.num_refreshed, len(self._turns))):
            here = next(iter(self._turns.values()))
            self._settle(here, now_s)
            self._changed(here)

    def _changed(self, here: Tracked, queued: int = 0) -> None:
        load, has_room = here.load, self._has_room(here)
        current = load.look_ahead.tokens_left - load.current_tokens
        if not load.has_room:
            load.queued_tokens += queued
            load.current_tokens += current
        elif queued or current:
            self._order.moved(load.instance_id, queued=queued, current=current)
        if has_room != load.has_room:
            self._order.drop(load.instance_id)
            load.has_room = has_room
        if has_room and load.instance_id not in self._order:
            self._order.put(load)
        if len(load.look_ahead):
            self._turns[load.instance_id] = here
            self._turns.move_to_end(load.instance_id)
        else:
            self._turns.pop(load.instance_id, None)


def preserve_load_aware(params: BalancerParams) -> Balancer:
    return LoadAware(params)
