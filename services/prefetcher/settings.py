"""Settings of the model-prefetcher. Bytes and seconds."""

import os
from dataclasses import replace
from pathlib import Path

from pydantic import Field

from glowplug.domain.errors import NoSpace
from glowplug.runtime.settings import NodeId, SourceSettings, advanced
from glowplug.weights.fetch import FetchOptions
from glowplug.weights.source import SourceOptions

USABLE_RATIO = 0.9  # of the shared-memory file system: filling it up would take other programs down


class PrefetcherSettings(SourceSettings):
    node_id: NodeId = Field("node-1", pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=64)  # a dot becomes a dash
    shm_dir: Path = Path("/dev/shm/glowplug")  # weights in host memory; agent and prefetcher need the same
    host_cache_bytes: int = Field(8 << 30, gt=0)  # host memory for weights; agent and prefetcher need the same
    disk_cache_bytes: int = Field(0, ge=0)  # local disk for copies of weights; 0: none
    disk_cache_dir: Path | None = None  # empty: <state_dir>/weights
    disk_retry_s: float = advanced(60.0, gt=0)  # after which a failed disk is tried again
    copy_after_s: float = advanced(2.0, ge=0)  # from arrival to the copy on disk
    link_bytes_per_s: float = Field(0.0, ge=0)  # most that fetches of this node take; 0: no limit
    fetch_part_bytes: int = advanced(16 << 20, ge=1 << 16)
    fetch_chunk_bytes: int = advanced(1 << 20, ge=1 << 12, le=64 << 20)
    fetch_max_attempts: int = advanced(5, ge=1)  # in a row that brought nothing
    fetch_backoff_first_s: float = advanced(0.1, gt=0)
    max_peers: int = advanced(3, ge=0, le=8)  # nodes that one fetch reads from, beside its source
    max_peer_reads: int = advanced(8, ge=0)  # by other nodes from this one, at once
    room_wait_s: float = advanced(10.0, ge=0)  # how long a fetch waits for other weights to leave
    heal_s: float = advanced(2.0, gt=0)
    recheck_s: float = advanced(3.0, gt=0)  # of files without a checksum
    policy_caching: str = "union"  # who leaves host memory first

    def fetch_options(self) -> FetchOptions:
        return FetchOptions(
            part_bytes=self.fetch_part_bytes,
            max_attempts=self.fetch_max_attempts,
            backoff_first_s=self.fetch_backoff_first_s,
        )

    def source_options(self) -> SourceOptions:
        return replace(super().source_options(), chunk_bytes=self.fetch_chunk_bytes)

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
