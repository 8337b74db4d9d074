"""Room `caching`: who leaves host memory first, one Ordering per prefetcher, each made the same way.

mCache section 6.3 compares its own importance with LRU, LFU, ARC and SRRIP. Belady's order needs the future and is
made by benches alone (recency.Belady).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from glowplug.policies.caching.mcache_importance import Importance, ImportanceParams
from glowplug.policies.caching.ordering import Ordering
from glowplug.policies.caching.recency import Arc, Lfu, Lru, Srrip


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """What an ordering may know of its cache. `penalty_s` is P of mCache Eq. 1: (name, bytes) -> seconds of a miss."""

    capacity_bytes: int
    penalty_s: Callable[[str, int], float]
    importance: ImportanceParams = field(default_factory=ImportanceParams)


MakeOrdering = Callable[[CacheFacts], Ordering]


def mcache(cache: CacheFacts) -> Ordering:
    """Its options are the fields of `ImportanceParams`, over what `cache` says."""
    return Importance(cache.penalty_s, cache.importance)


CACHING: Final[dict[str, MakeOrdering]] = {
    "lru": lambda _: Lru(),
    "lfu": lambda _: Lfu(),
    "arc": lambda cache: Arc(cache.capacity_bytes),
    "srrip": lambda _: Srrip(),
    "mcache": mcache,
}
