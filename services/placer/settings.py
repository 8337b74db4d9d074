"""Settings of the placer."""

from pydantic import Field

from glowplug.domain.instance import Becomes
from glowplug.fleet.tables import NODE_LEASE_S
from glowplug.policies.eviction.turns import Turns, Victims
from glowplug.runtime.settings import ElectedSettings, advanced


class PlacerSettings(ElectedSettings):
    policy_placement: str = "union"
    policy_eviction: str = "union"
    policy_prewarming: str = "union"
    node_lease_s: float = Field(NODE_LEASE_S, gt=0)  # after this long without a word from it, a node counts as gone
    min_residency_s: float = Field(1.0, ge=0)  # a READY instance is not evicted sooner
    fair_wait_s: float = Field(5.0, ge=0)  # a placement that waited this long may have a busy instance drained
    evict_grace_s: float = advanced(300.0, ge=0)  # longest drain of a victim
    turns: Turns = advanced("balanced")  # when a busy instance gives way
    victims: Victims = advanced("least_worth")  # whose instances leave
    fair_requests: int = advanced(6, ge=0)  # lead at which a model gives way; 0: never
    sleeper_patience: float = advanced(1.0, ge=0)  # how many times the saving to wait for a wake
    evict_becomes: Becomes = "swapped_out"  # what a victim becomes where its engine can
    avoid_node_s: float = advanced(120.0, ge=0)  # after weights could not be had there
    max_start_nodes: int = advanced(3, ge=1)  # tried for a start whose weights fail
    start_container_s: float = advanced(0.0, ge=0)  # stages of a start; all 0: priors
    start_cuda_s: float = advanced(0.0, ge=0)  # context, memory
    start_library_s: float = advanced(0.0, ge=0)  # imports
    stage_hop_s: float = advanced(0.0, ge=0)  # from one stage of a pipeline to the next
    prefill_s: float = advanced(0.0, ge=0)  # first token of a warm instance; 0: its engine's prior
    decode_s: float = advanced(0.0, ge=0)  # per token
