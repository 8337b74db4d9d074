"""Settings of the model-prefetcher. Bytes and seconds."""

import os
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from glowplug.controllers.prefetcher.params import IMPORTANCE
from glowplug.domain.errors import NoSpace
from glowplug.policies.caching.mcache_importance import ImportanceParams
from glowplug.runtime.settings import NodeId, SourceSettings
from glowplug.weights.fetch import FetchOptions
from glowplug.weights.source import SourceOptions

USABLE_RATIO = 0.9  # of the shared-memory file system: filling it up would take other programs down


class PrefetcherSettings(SourceSettings):
    node_id: NodeId = Field("node-1", pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=64)  # a dot becomes a dash
    shm_dir: Path = Path("/dev/shm/glowplug")
    host_cache_bytes: int = Field(8 << 30, gt=0)
    disk_cache_bytes: int = Field(0, ge=0)  # of local disk behind host memory, for copies of weights; 0 is none
    disk_cache_dir: Path | None = None  # empty: <state_dir>/weights
    disk_retry_s: float = Field(60.0, gt=0)  # a disk that fails is tried again after so long; at start it is not
    copy_after_s: float = Field(2.0, ge=0)  # weights that came in are copied to disk after so long
    link_bytes_per_s: float = Field(0.0, ge=0)  # rate of this node's link for weights; 0 is no limit
    max_fetches: int = Field(2, ge=1, le=64)  # at once
    max_fetch_queue: int = Field(1000, ge=1)
    fetch_part_bytes: int = Field(16 << 20, ge=1 << 16)
    fetch_max_parts: int = Field(4, ge=1, le=64)  # of one fetch, in parallel
    fetch_chunk_bytes: int = Field(1 << 20, ge=1 << 12, le=64 << 20)
    fetch_max_attempts: int = Field(5, ge=1)  # in a row that brought nothing
    fetch_backoff_first_s: float = Field(0.1, gt=0)
    fetch_backoff_cap_s: float = Field(5.0, gt=0)
    fetch_timeout_s: float = Field(3600.0, gt=0)
    fetch_connect_timeout_s: float = Field(10.0, gt=0)
    fetch_stall_timeout_s: float = Field(30.0, gt=0)
    max_peers: int = Field(3, ge=0, le=8)  # other nodes that one fetch reads from, beside the source; 0 is none
    max_peer_reads: int = Field(8, ge=0)  # by other nodes here, at once
    fetch_seed: int = 0  # of the jitter between tries
    room_wait_s: float = Field(10.0, ge=0)  # how long a fetch waits for other weights to leave
    hold_s: float = Field(120.0, gt=0)
    heal_s: float = Field(2.0, gt=0)
    recheck_s: float = Field(3.0, gt=0)  # how often files that no checksum pins are compared with their source
    policy_caching: str = "union"  # who leaves host memory first
    caching_half_life_s: float = Field(300.0, gt=0)  # of mcache's memory of uses, beside a tenth and ten times of it
    caching_renew_s: float = Field(10.0, ge=0)  # how old mcache's scores may be

    def fetch_options(self) -> FetchOptions:
        return FetchOptions(
            part_bytes=self.fetch_part_bytes,
            max_parts=self.fetch_max_parts,
            max_attempts=self.fetch_max_attempts,
            backoff_first_s=self.fetch_backoff_first_s,
            backoff_cap_s=self.fetch_backoff_cap_s,
            timeout_s=self.fetch_timeout_s,
        )

    def source_options(self) -> SourceOptions:
        return replace(
            super().source_options(),
            chunk_bytes=self.fetch_chunk_bytes,
            connect_timeout_s=self.fetch_connect_timeout_s,
            stall_timeout_s=self.fetch_stall_timeout_s,
        )

    def importance(self) -> ImportanceParams:
        return replace(IMPORTANCE, half_life_s=self.caching_half_life_s, renew_s=self.caching_renew_s)

    def capacity_bytes(self) -> int:
        """The setting, bounded by what the file system under `shm_dir` could ever hold. Raises NoSpace."""
        try:
            self.shm_dir.mkdir(parents=True, exist_ok=True)
            stat = os.statvfs(self.shm_dir)
        except OSError as error:
            raise NoSpace(f"cannot keep weights in GLOWPLUG_SHM_DIR={self.shm_dir}: {error.strerror}") from error
        return min(self.host_cache_bytes, int(stat.f_blocks * stat.f_frsize * USABLE_RATIO))

    def disk_capacity_bytes(self, used_bytes: int) -> int:
        """The setting, bounded by what is free where the copies lie, and what they take there. Raises OSError."""
        stat = os.statvfs(self.disk_dir)
        return min(self.disk_cache_bytes, int((stat.f_bavail * stat.f_frsize + used_bytes) * USABLE_RATIO))

    @property
    def disk_dir(self) -> Path:
        return self.disk_cache_dir or self.state_dir / "weights"
