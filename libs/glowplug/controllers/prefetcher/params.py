"""The prefetcher's bounds."""

from dataclasses import dataclass
from typing import Final

from glowplug.policies.caching.mcache_importance import ImportanceParams

IMPORTANCE: Final = ImportanceParams(renew_s=10.0, counts="requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetcherParams:
    capacity_bytes: int
    max_fetches: int = 2  # at once
    max_queue: int = 1000
    room_wait_s: float = 10.0  # how long a fetch waits for host memory
    hold_s: float = 120.0  # a region asked for an instance nobody has seen yet stays so long
    heal_s: float = 2.0  # a starting instance whose weights nobody brings for so long is helped
    caching: str = "lru"  # who leaves first: a name of the policy kind `caching`
    importance: ImportanceParams = IMPORTANCE  # of mcache


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsParams:
    """How fetches are measured."""

    newest: float = 0.5  # share of the newest measurement in the average
    bytes_per_s: float = 1e9  # of a source that was never read
    max_digests: int = 4096
