"""Choose running engines to swap out so that another can be swapped in.

Paper: SwapServeLLM section 3.5, demand-aware preemption: shortest queue of waiting requests first, then least recently
accessed, until enough bytes are free.

Departures: a `held` engine (at work, too young, pinned) is never chosen, and a victim made needless by a later, larger
one is spared (erratum E29, which names both as missing).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from glowplug.policies.caching import ordering
from glowplug.policies.caching.ordering import Resident
from glowplug.policies.caching.recency import Lru
from glowplug.policies.decisions import EvictDecision


class ShortestQueue(Lru):
    """Evict the shortest queue first. Stateless: residents carry their queue and last use."""

    name = "shortest queue"
    rule = "the one with the shortest queue leaves first, and of equals the one used longest ago"
    unit = "requests wait"

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        ordered = sorted(present, key=lambda r: (r.num_waiting, r.last_used_at, r.name))
        return [(float(r.num_waiting), r) for r in ordered]


def evict(residents: Iterable[Resident], need_bytes: int) -> EvictDecision:
    """Choose the engines to swap out, in order; none if they cannot free `need_bytes`."""
    return evict_by(ShortestQueue(), residents, need_bytes)


def evict_by(order: Lru, residents: Iterable[Resident], need_bytes: int) -> EvictDecision:
    """Choose among the lowest priority, then with the next, and so on; the paper has no priorities."""
    residents, decision = list(residents), EvictDecision(reason="nothing needs to be freed")
    for priority in sorted({resident.priority for resident in residents}):
        alike = [replace(r, priority=0) if r.priority else r for r in residents if r.priority <= priority]
        decision = ordering.evict(order, alike, need_bytes, 0.0)
        if decision.victims:
            break
    return decision
