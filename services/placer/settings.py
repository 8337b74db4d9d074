"""Settings of the placer."""

from pydantic import Field

from glowplug.runtime.settings import ElectedSettings


class PlacerSettings(ElectedSettings):
    policy_placement: str = "first_fit"
    policy_residency: str = "lru"
    node_lease_s: float = Field(8.0, gt=0)  # a node silent for this long has left
    min_residency_s: float = Field(1.0, ge=0)  # a READY instance is not evicted before
    fair_wait_s: float = Field(5.0, ge=0)  # a placement that waited this long may have a busy instance drained
    evict_grace_s: float = Field(300.0, ge=0)  # longest drain of a victim: it ends hung engines, not slow answers
