"""Baselines of prefix-aware routing: a sticky hash, and a weighted sum of scores as in llm-d's scheduler."""

from collections import OrderedDict

from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing.port import NONE_FREE, Balancer, BalancerParams
from glowplug.policies.routing.prefix import PrefixAware
from glowplug.policies.routing.prefix_index import Prefix
from glowplug.policies.routing.tracked import Sent, Tracker

STICKY_BLOCKS = 8  # at the beginning of a prompt, by which it sticks
MOST_KEPT = 100_000
PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0


class Sticky(Tracker):
    """The Balancer `sticky`: as a load balancer's hash of a session, whatever the load. A request whose instance is
    full waits for none: it goes to the one with the fewest requests."""

    reads_prefixes = True

    def __init__(self, params: BalancerParams) -> None:
        super().__init__(params)
        self._kept: OrderedDict[int, str] = OrderedDict()

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float, prefix: Prefix = ()) -> RouteDecision:
        free = {here.instance_id: here for here in self.instances.values() if self._may_take_one(here)}
        if not free:
            return NONE_FREE
        for block in prefix[STICKY_BLOCKS - 1 :: -1]:
            if (kept := self._kept.get(block)) in free:
                return RouteDecision(str(kept), "prompts that begin so go there")
        fewest = min(free.values(), key=lambda here: (here.num_in_flight, here.instance_id))
        return RouteDecision(fewest.instance_id, "no such prompt has come, and it has the fewest requests in flight")

    def _reads(self, ticket: int, sent: Sent, prefix: Prefix) -> None:
        for block in prefix[:STICKY_BLOCKS]:
            self._kept[block] = sent.at.instance_id
            self._kept.move_to_end(block)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)


class LlmdLike(PrefixAware):
    """The Balancer `llmd_like`: llm-d's inference scheduler adds scores between 0 and 1 with the weights of its guide
    (prefix cache 3, queue 2, KV cache use 2) and takes the highest sum. Its prefix scorer counts the blocks held, of
    all blocks of the prompt; its queue scorer goes from the longest queue (0) to the shortest (1).

    Departure: queues are requests in flight, which a router knows at once, where llm-d scrapes them from engines."""

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float, prefix: Prefix = ()) -> RouteDecision:
        free = []
        for here in self.instances.values():
            self._settle(here, now_s)
            if self._may_take_one(here):
                free.append(here)
        if not free:
            return NONE_FREE
        shortest = min(here.num_in_flight for here in free)
        longest = max(here.num_in_flight for here in free)
        best, most = "", -1.0
        for here in sorted(free, key=lambda one: (one.num_in_flight, one.instance_id)):
            score = QUEUE_WEIGHT * (
                (longest - here.num_in_flight) / (longest - shortest) if longest > shortest else 1.0
            )
            score += KV_WEIGHT * (1 - min(1.0, here.look.at_most(1) / here.look.kv_tokens))
            if prefix:
                score += PREFIX_WEIGHT * self.index.num_held(here.instance_id, prefix) / len(prefix)
            if score > most:
                best, most = here.instance_id, score
        return RouteDecision(best, f"its scores for prefix, queue and cache add up to {most:.2f}")


def sticky(params: BalancerParams) -> Balancer:
    return Sticky(params)


def llmd_like(params: BalancerParams) -> Balancer:
    return LlmdLike(params)
