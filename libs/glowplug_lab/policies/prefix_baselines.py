"""Baselines of prefix-aware routing: a sticky hash, and llm-d's weighted sum of scores."""

from collections import OrderedDict

from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing.port import NONE_FREE, Balancer, BalancerParams
from glowplug.policies.routing.prefix import PrefixAware
from glowplug.policies.routing.prefix_index import Prefix
from glowplug.policies.routing.tracked import SentRequest, Tracker

STICKY_BLOCKS = 8  # leading blocks that decide
MOST_KEPT = 100_000
PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 2.0, 2.0


class Sticky(Tracker):
    """The Balancer `sticky`: a load balancer's session hash, whatever the load. If the instance is full, the one with
    the fewest requests is taken."""

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

    def _reads(self, ticket: int, sent: SentRequest, prefix: Prefix) -> None:
        for block in prefix[:STICKY_BLOCKS]:
            self._kept[block] = sent.at.instance_id
            self._kept.move_to_end(block)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)


class LlmdLike(PrefixAware):
    """The Balancer `llmd_like`: llm-d's inference scheduler adds scores from 0 to 1 with its guide's weights (prefix
    cache 3, queue 2, KV cache use 2) and takes the highest sum. The prefix score is the share of the prompt's blocks
    held; the queue score runs from the longest queue (0) to the shortest (1).

    Departure: queues are requests in flight, known at once; llm-d scrapes them from engines.
    """

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
