"""Least recently used: the baseline of every eviction policy.

Paper: mCache ("Enable importance-aware model cacheability for inference serving"), the evaluation's baseline list:
"removes the least recently used item when the cache is full". SwapServeLLM breaks ties among victims by the oldest
access. Victims leave in the order (priority, last_used_at, name) until enough bytes are free.

Departure: classic LRU evicts every item up to the one that frees enough. Here a second pass spares the most recently
used victims that prove needless.
"""

from collections.abc import Iterable

from glowplug.policies.caching import ordering
from glowplug.policies.caching.ordering import Resident
from glowplug.policies.caching.recency import Lru
from glowplug.policies.decisions import EvictDecision


def evict(residents: Iterable[Resident], need_bytes: int) -> EvictDecision:
    """Choose victims to free at least `need_bytes`, none `held`; all or nothing. A rival's score is its
    `last_used_at`."""
    return ordering.evict(Lru(), residents, need_bytes, 0.0)
