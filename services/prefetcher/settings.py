"""Settings of the model-prefetcher. Bytes and seconds."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.domain.bounds import Bounds, Positive
from glowplug.domain.errors import NoSpace
from glowplug.domain.reading import ADVANCED, CONSTANT
from glowplug.policies.systems import UNION
from glowplug.runtime.settings import NodeSettings, SourceSettings, a_policy

USABLE_RATIO = 0.9  # of the shared-memory file system: filling it up would take other programs down


@dataclass(kw_only=True)
class PrefetcherSettings(NodeSettings, SourceSettings):
    disk_cache_bytes: int = 0  # local disk for copies of weights; 0: none
    disk_cache_dir: Path | None = None  # empty: <state_dir>/weights
    link_bytes_per_s: float = 0.0  # most that fetches of this node take; 0: no limit
    max_peers: Annotated[int, Bounds(most=8), ADVANCED] = 3  # nodes that one fetch reads from, beside its source
    max_peer_reads: Annotated[int, CONSTANT] = 8  # by other nodes from this one, at once
    recheck_s: Annotated[Positive, CONSTANT] = 3.0  # of files without a checksum
    policy_caching: Annotated[str, a_policy("caching")] = UNION.policies["caching"]  # who leaves host memory first
    params: PrefetcherParams = field(default_factory=lambda: PrefetcherParams(capacity_bytes=0))

    def capacity_bytes(self) -> int:
        """The setting, bounded by the file system under `shm_dir`. Raises NoSpace."""
        try:
            self.shm_dir.mkdir(parents=True, exist_ok=True)
            stat = os.statvfs(self.shm_dir)
        except OSError as error:
            raise NoSpace(f"cannot keep weights in GLOWPLUG_SHM_DIR={self.shm_dir}: {error.strerror}") from error
        return min(self.host_cache_bytes, int(stat.f_blocks * stat.f_frsize * USABLE_RATIO))

    def disk_capacity_bytes(self, used_bytes: int) -> int:
        """The setting, bounded by the free space beside the copies and their own. Raises OSError."""
        stat = os.statvfs(self.disk_dir)
        return min(self.disk_cache_bytes, int((stat.f_bavail * stat.f_frsize + used_bytes) * USABLE_RATIO))

    @property
    def disk_dir(self) -> Path:
        return self.disk_cache_dir or self.state_dir / "weights"
