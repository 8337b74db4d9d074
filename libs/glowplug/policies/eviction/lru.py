"""Least recently used: the baseline that every eviction policy is measured against.

Paper: mCache ("Enable importance-aware model cacheability for inference serving"), the evaluation's baseline list:
"removes the least recently used item when the cache is full". SwapServeLLM uses the oldest access to break ties among
victims. No equation: victims leave in the order (priority, last_used_at, name) until enough bytes are free.

Departures: classic LRU evicts every item up to the one that frees enough, even if that one alone would do. Here a
second pass spares the most recently used victims that turn out not to be needed, so that one large victim does not drag
small ones along.
"""

from collections.abc import Iterable

from glowplug.policies.caching import ordering
from glowplug.policies.caching.ordering import Resident
from glowplug.policies.caching.recency import Lru
from glowplug.policies.decisions import EvictDecision


def evict(residents: Iterable[Resident], need_bytes: int) -> EvictDecision:
    """Choose what to evict so that at least `need_bytes` become free. Nothing `held` is ever chosen.

    All or nothing: when all that may be evicted would not suffice, the decision is empty and says so. Each rival's
    score is its `last_used_at`.
    """
    return ordering.evict(Lru(), residents, need_bytes, 0.0)
