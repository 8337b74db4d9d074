"""Prefix-aware routing: prefer the instance that holds most of the prompt, unless it is too busy.

Ours; the papers route every request as new. PreServe's load (preserve_load_aware.py, section 4.3.3) counts the tokens
an instance has to compute; with H_i tokens of the prompt held by instance i,

    L_i = (queued_i + P - H_i) + (current_i + D) + beta max(0, U_i - T_mem) M_i,    the least L_i is chosen

so that cache, queue, decoding and memory are one quantity. H_i is an estimate (prefix_index.py) times the share that
engines confirmed (`usage.prompt_tokens_details.cached_tokens`). A restarted or woken instance holds nothing; each
router knows only its own requests. A sent prompt counts without its held part. With one sequence per slot
(`Target.num_sequences`) only idle slots count. A full instance is neither chosen nor waited for: a full slot engine has
no idle slot to reuse.

Visited are the holders of most of the prompt, at most `most_visited`, and as many of the least loaded. Without a holder
the choice is `preserve_load_aware`'s.
"""

from collections import OrderedDict
from itertools import islice

from glowplug.domain.snapshot import Target
from glowplug.policies.decisions import RouteDecision
from glowplug.policies.routing.port import NONE_FREE, Balancer, BalancerParams
from glowplug.policies.routing.prefix_index import SIMILARITY, Prefix, PrefixIndex, Slots
from glowplug.policies.routing.preserve_load_aware import LoadAware, load_of, union_params
from glowplug.policies.routing.tracked import SentRequest

TRUST_WEIGHT = 0.1  # of the newest report of an engine
NUM_GONE = 16  # instances whose blocks are kept for a return from a drain


class PrefixAware(LoadAware):
    reads_prefixes = True

    def __init__(self, params: BalancerParams) -> None:
        super().__init__(params)
        self.index = PrefixIndex()
        self.trust = 1.0  # tokens found in caches, per token expected there
        self._ready_at: dict[str, float] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._slots: dict[str, Slots] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.index)

    def put(self, target: Target, now_s: float) -> None:
        instance_id = target.instance_id
        self._gone.pop(instance_id, None)
        if self._ready_at.get(instance_id) != target.ready_at:
            self._forget(instance_id)
            self._ready_at[instance_id] = target.ready_at
        if target.num_sequences:
            self._slots.setdefault(instance_id, Slots(target.num_sequences)).num_slots = target.num_sequences
        super().put(target, now_s)

    def gone(self, instance_id: str) -> None:
        super().gone(instance_id)
        if instance_id in self._ready_at:
            self._gone[instance_id] = None
            self._gone.move_to_end(instance_id)
        while len(self._gone) > NUM_GONE:
            oldest, _ = self._gone.popitem(last=False)
            self._forget(oldest)
            del self._ready_at[oldest]

    def _reads(self, ticket: int, sent: SentRequest, prefix: Prefix) -> None:
        here, instance_id = sent.at, sent.at.instance_id
        if prefix:
            sent.found_tokens = self._found(instance_id, sent.prompt_tokens, prefix)
            sent.unread_tokens -= int(sent.found_tokens * self.trust)
        most = min(here.look.kv_tokens // self.params.block_tokens, self.params.most_blocks // len(self._ready_at))
        if slots := self._slots.get(instance_id):
            lost = slots.take(ticket, prefix[: most // slots.num_slots], self._least(sent.prompt_tokens))
            self.index.drop(instance_id, lost)
        elif prefix:
            self.index.add(instance_id, prefix, most)

    def ended(self, ticket: int, response_tokens: int, now_s: float, cached_tokens: int = -1) -> None:
        sent = self.requests.get(ticket)
        if sent is not None:
            if sent.found_tokens and cached_tokens >= 0:
                self.trust += TRUST_WEIGHT * (min(1.0, cached_tokens / sent.found_tokens) - self.trust)
            if slots := self._slots.get(sent.at.instance_id):
                self.index.keep(sent.at.instance_id, slots.free(ticket))
        super().ended(ticket, response_tokens, now_s, cached_tokens)

    def choose(self, prompt_tokens: int, expected_tokens: int, now_s: float, prefix: Prefix = ()) -> RouteDecision:
        holders = list(islice(self.index.holders(prefix), self.params.most_visited)) if prefix else ()
        if not holders or len(self.instances) == 1:
            return super().choose(prompt_tokens, expected_tokens, now_s)
        self._refresh(now_s)
        best, least, most_held = "", float("inf"), 0
        for instance_id in dict.fromkeys([*holders, *self._order.lowest(self.params.most_visited)]):
            load = self._order.of(instance_id)
            if load is None:
                continue
            held = int(self._found(instance_id, prompt_tokens, prefix) * self.trust)
            tokens = load_of(load, prompt_tokens, expected_tokens, self.params, least + held) - held
            if tokens < least:
                best, least, most_held = instance_id, tokens, held
        if not best:
            return NONE_FREE
        return RouteDecision(best, f"it has the fewest tokens yet to compute, {most_held} of the prompt being cached")

    def _forget(self, instance_id: str) -> None:
        self.index.forget(instance_id)
        self._slots.pop(instance_id, None)

    def _least(self, prompt_tokens: int) -> float:
        return SIMILARITY * prompt_tokens / self.params.block_tokens

    def _found(self, instance_id: str, prompt_tokens: int, prefix: Prefix) -> int:
        """Return held tokens of a prompt; its last token is always computed."""
        num_tokens = self.index.num_held(instance_id, prefix) * self.params.block_tokens
        return max(0, min(num_tokens, prompt_tokens - 1))


def prefix(params: BalancerParams) -> Balancer:
    return PrefixAware(params)


def union(params: BalancerParams) -> Balancer:
    """Build `prefix` with preserve_load_aware.py's union changes."""
    return PrefixAware(union_params(params))
