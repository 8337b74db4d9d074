"""Bounds and times of the prefetcher."""

from dataclasses import dataclass
from typing import Final

from glowplug.domain.bounds import Positive
from glowplug.policies.caching.mcache_importance import ImportanceParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsParams:
    newest: float = 0.5
    bytes_per_s: float = 1e9  # of a source that was never read
    max_digests: int = 4096


IMPORTANCE: Final = ImportanceParams(renew_s=10.0, counts="requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetcherParams:
    capacity_bytes: int
    max_fetches: int = 2  # at once
    max_queue: int = 1000
    room_wait_s: float = 10.0  # longest wait of a fetch for host memory
    hold_s: float = 120.0  # a region stays this long for an instance not reported yet
    heal_s: Positive = 2.0  # after this a starting instance without a fetch of its weights gets one
    caching: str = "lru"  # eviction order: a name of the policy kind `caching`
    disk_bytes: int = 0  # 0: no disk tier
    disk_trouble: str = ""  # why the disk cannot be used, if known at the start
    disk_gain: float = 0.25  # a copy is written where a read saves at least this share of a fetch
    disk_retry_s: Positive = 60.0  # after this a failed disk is written again
    copy_after_s: float = 2.0  # fetched weights are copied after this: their engine's start goes first
    # A disk never used counts as fast: the first copy measures it.
    disk_seconds: SecondsParams = SecondsParams(bytes_per_s=4e9)
    importance: ImportanceParams = IMPORTANCE  # parameters of mcache
