"""The union's order of host memory and disk: least worth per byte (`policies/worth.py`) first.

mCache's Eq. 1 is the special case of rare requests: penalty over size, times the rate. Two additions:

- The rate counts uses of this memory, starts and prewarmings. The count decays, so the time since the last use is no
  second source: with both, 85 % of all starts fetched their weights instead of 76 % on HydraServe's workload (384
  models, simulated).
- Below a replica on the node, only the second start misses the weights: the first grows from the replica.

The order is the same on disk, where the penalty is a fetch less a read (mCache section 4).
"""

from collections.abc import Sequence
from dataclasses import replace

from glowplug.policies.caching.mcache_importance import CacheFacts, Importance
from glowplug.policies.caching.ordering import Ordering, Resident
from glowplug.policies.worth import Asking, InMemory, asked, away_s


class ByWorth(Importance):
    name = "least worth"
    rule = "the one expected to save the fewest seconds per byte leaves first"
    unit = "s saved per byte"

    def holding(self, resident: Resident, now_s: float) -> InMemory:
        climb_s = self._penalty_s(resident.name, resident.num_bytes)
        asking = Asking(self.rate_per_s(resident.name, now_s))
        probability = asked(asking, away_s(climb_s), times=2 if resident.has_copy else 1)
        return InMemory(name=resident.name, asked=probability, climb_s=climb_s, num_bytes=resident.num_bytes)

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        known = [(self.holding(resident, now_s).worth, resident) for resident in present]
        return sorted(known, key=lambda entry: (entry[0], entry[1].last_used_at, entry[1].name))


def union(cache: CacheFacts) -> Ordering:
    """Options are the fields of `RateParams`, which override `cache`."""
    return ByWorth(cache.penalty_s, replace(cache.importance, counts="uses"))
