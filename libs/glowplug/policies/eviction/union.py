"""The union's victims among running engines: those whose going is expected to cost the least waiting a byte
(`policies/worth.py`), one after the other until enough bytes are free.

An engine for which requests wait counts each of them, so that the shortest queue goes first (SwapServeLLM section 3.5)
where all take as long to come back; of idle ones the one that is asked for least soon goes, which is the oldest access
where nothing is forecast; and an engine on four GPUs, whose start takes longer, stays before one on a single GPU.
"""

from collections.abc import Iterable, Sequence

from glowplug.policies.caching.ordering import Resident
from glowplug.policies.caching.recency import Lru
from glowplug.policies.decisions import EvictDecision
from glowplug.policies.eviction.swapserve import PreemptionParams, evict_by


class LeastWorth(Lru):
    """Remembers nothing: what its going costs stands on the resident."""

    name = "least worth"
    rule = "what is expected to save the fewest seconds a byte leaves first, and of equals who was used longest ago"
    unit = "s of waiting that its going is expected to cost"

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        ordered = sorted(present, key=lambda r: (r.saves_s / max(1, r.num_bytes), r.last_used_at, r.name))
        return [(r.saves_s, r) for r in ordered]


def evict(
    residents: Iterable[Resident], need_bytes: int, params: PreemptionParams = PreemptionParams()
) -> EvictDecision:
    """Who leaves, in order; nobody when those who may go do not free `need_bytes`."""
    return evict_by(LeastWorth(), residents, need_bytes, params)
