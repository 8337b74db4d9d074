"""The union's order of host memory and disk: what is worth least a byte leaves first (`policies/worth.py`).

mCache's Eq. 1 is the case of it in which requests are rare: penalty over size, times the rate. Beside that

- the rate is that of what asks this memory, starts and prewarmings: a model whose engine runs through its requests
  asks for nothing. It is counted with weights that fade, so that the time since the last one is in it already, and is
  not taken for a second source: with both, recency hides which models are popular, and on HydraServe's workload (384
  models) 85 % of all starts fetched their weights instead of 76 % (simulated);
- below a replica on a GPU of the node it is the second who asks that misses it: the first one grows from the replica.

Who leaves is the same on disk, where the penalty is what a fetch costs more than a read (mCache section 4).
"""

from collections.abc import Sequence
from dataclasses import replace

from glowplug.policies.caching.mcache_importance import CacheFacts, Importance
from glowplug.policies.caching.ordering import Ordering, Resident
from glowplug.policies.worth import Asking, Holding, asked, away_s


class ByWorth(Importance):
    """Counts as mCache's importance does, and weighs by worth."""

    name = "least worth"
    rule = "what is expected to save the fewest seconds a byte leaves first"
    unit = "s saved per byte"

    def holding(self, resident: Resident, now_s: float) -> Holding:
        """What it is worth here."""
        climb_s = self._penalty_s(resident.name, resident.num_bytes)
        asking = Asking(self.rate_per_s(resident.name, now_s))
        probability = asked(asking, away_s(climb_s), times=2 if resident.has_copy else 1)
        return Holding(name=resident.name, asked=probability, climb_s=climb_s, num_bytes=resident.num_bytes)

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        known = [(self.holding(resident, now_s).worth, resident) for resident in present]
        return sorted(known, key=lambda entry: (entry[0], entry[1].last_used_at, entry[1].name))


def union(cache: CacheFacts) -> Ordering:
    """The policy `union`. It counts uses, and weighs when it is asked: its options are the fields of `RateParams`, over
    what `cache` says."""
    return ByWorth(cache.penalty_s, replace(cache.importance, counts="uses"))
