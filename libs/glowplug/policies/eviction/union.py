"""The union's victims among running engines: those whose eviction is expected to cost the least waiting per byte
(`policies/worth.py`), one after the other until enough bytes are free.

Each request that waits for an engine counts, so that the shortest queue goes first (SwapServeLLM section 3.5) where all
take as long to come back. Of idle engines the one least likely to be asked for soon goes first, which is the one
accessed longest ago where nothing is forecast. An engine on four GPUs, whose start takes longer, outstays one on a
single GPU.
"""

from collections.abc import Iterable, Sequence

from glowplug.policies.caching.ordering import Resident
from glowplug.policies.caching.recency import Lru
from glowplug.policies.decisions import EvictDecision
from glowplug.policies.eviction.swapserve import evict_by


class LeastWorth(Lru):
    """Evict the engine worth least per byte first. Remembers nothing: each resident carries what its eviction would
    cost."""

    name = "least worth"
    rule = "what is expected to save the fewest seconds a byte leaves first, and of equals who was used longest ago"
    unit = "s of waiting that its going is expected to cost"

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        ordered = sorted(present, key=lambda r: (r.saves_s / max(1, r.num_bytes), r.last_used_at, r.name))
        return [(r.saves_s, r) for r in ordered]


def evict(residents: Iterable[Resident], need_bytes: int) -> EvictDecision:
    """Choose which engines leave, in order; none when all that may leave would not free `need_bytes`."""
    return evict_by(LeastWorth(), residents, need_bytes)
