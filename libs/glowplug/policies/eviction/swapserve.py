"""Which running engines are swapped out so that another can be swapped in.

Paper: SwapServeLLM section 3.5, demand-aware preemption: engines with the shortest queue of waiting requests go first,
of equals the one accessed longest ago; one after the other until enough bytes are free.

Departures: who is `held` (at work, too young, pinned) is never chosen; with `fewest`, those are spared whom a later and
larger victim made needless (erratum E29, which names both as missing).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from glowplug.policies.caching import ordering
from glowplug.policies.caching.ordering import Resident
from glowplug.policies.caching.recency import Lru
from glowplug.policies.decisions import EvictDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionParams:
    fewest: bool = True


class ShortestQueue(Lru):
    """Remembers nothing: queue and last use stand on the resident."""

    name = "shortest queue"
    rule = "who has the shortest queue leaves first, and of equals who was used longest ago"
    unit = "requests wait"

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        ordered = sorted(present, key=lambda r: (r.num_waiting, r.last_used_at, r.name))
        return [(float(r.num_waiting), r) for r in ordered]


def evict(
    residents: Iterable[Resident], need_bytes: int, params: PreemptionParams = PreemptionParams()
) -> EvictDecision:
    """Who is swapped out, in order; nobody when those who may go do not free `need_bytes`."""
    return evict_by(ShortestQueue(), residents, need_bytes, params)


def evict_by(
    order: Lru, residents: Iterable[Resident], need_bytes: int, params: PreemptionParams = PreemptionParams()
) -> EvictDecision:
    """Who leaves in that order. Those of the lowest priority are tried alone, then with the next one's beside them,
    which the paper does not know."""
    residents, decision = list(residents), EvictDecision(reason="nothing has to be freed")
    for priority in sorted({resident.priority for resident in residents}):
        alike = [replace(r, priority=0) if r.priority else r for r in residents if r.priority <= priority]
        decision = ordering.evict(order, alike, need_bytes, 0.0, spare=params.fewest)
        if decision.victims:
            break
    return decision
