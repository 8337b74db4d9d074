"""The union's victims among running engines: least expected waiting per byte (`policies/worth.py`) first.

Each waiting request counts, so the shortest queue goes first (SwapServeLLM section 3.5) at equal start times. Of idle
engines the one least likely to be needed soon goes first: without forecasts, the one accessed longest ago. An engine on
four GPUs, with a longer start, outstays one on a single GPU.
"""

from collections.abc import Iterable, Sequence

from glowplug.policies.caching.ordering import Resident
from glowplug.policies.caching.recency import Lru
from glowplug.policies.decisions import EvictDecision
from glowplug.policies.eviction.swapserve import evict_by


class LeastWorth(Lru):
    """Evict the engine worth least per byte first. Stateless: residents carry their cost."""

    name = "least worth"
    rule = "the one expected to save the fewest seconds per byte leaves first, and of equals the one used longest ago"
    unit = "s of waiting expected if it leaves"

    def order(self, present: Sequence[Resident], now_s: float) -> list[tuple[float, Resident]]:
        ordered = sorted(present, key=lambda r: (r.saves_s / max(1, r.num_bytes), r.last_used_at, r.name))
        return [(r.saves_s, r) for r in ordered]


def evict(residents: Iterable[Resident], need_bytes: int) -> EvictDecision:
    """Choose victims in order; none if they cannot free `need_bytes`."""
    return evict_by(LeastWorth(), residents, need_bytes)
