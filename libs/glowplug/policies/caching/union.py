"""The union's order of host memory and disk: evict first what is worth least per byte (`policies/worth.py`).

mCache's Eq. 1 is the special case of rare requests: penalty over size, times the rate. There are two additions:

- The rate counts what asks this memory, starts and prewarmings: a model whose engine keeps running asks for nothing.
  The count decays, so that it contains the time since the last use already, which is therefore no second source: with
  both, recency hides which models are popular, and on HydraServe's workload (384 models) 85 % of all starts fetched
  their weights instead of 76 % (simulated).
- Below a replica on a GPU of the node, only the second start misses the weights: the first one grows from the replica.

The order is the same on disk, where the penalty is what a fetch costs more than a read (mCache section 4).
"""

from collections.abc import Sequence
from dataclasses import replace

from glowplug.policies.caching.mcache_importance import CacheFacts, Importance
from glowplug.policies.caching.ordering import Ordering, Resident
from glowplug.policies.worth import Asking, Holding, asked, away_s


class ByWorth(Importance):
    """Count uses as mCache's importance does, and order by worth."""

    name = "least worth"
    rule = "what is expected to save the fewest seconds a byte leaves first"
    unit = "s saved per byte"

    def holding(self, resident: Resident, now_s: float) -> Holding:
        """Return the resident as a `Holding`, which gives its worth in this cache."""
        climb_s = self._penalty_s(resident.name, resident.num_bytes)
        asking = Asking(self.rate_per_s(resident.name, now_s))
        probability = asked(asking, away_s(climb_s), times=2 if resident.has_copy else 1)
        return Holding(name=resident.name, asked=probability, climb_s=climb_s, num_bytes=resident.num_bytes)

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        known = [(self.holding(resident, now_s).worth, resident) for resident in present]
        return sorted(known, key=lambda entry: (entry[0], entry[1].last_used_at, entry[1].name))


def union(cache: CacheFacts) -> Ordering:
    """Build the policy `union`, which counts uses and keeps no old scores. Its options are the fields of `RateParams`;
    they override what `cache` says."""
    return ByWorth(cache.penalty_s, replace(cache.importance, counts="uses"))
