"""Settings of the placer."""

from pydantic import Field

from glowplug.domain.instance import Becomes
from glowplug.fleet.tables import NODE_LEASE_S
from glowplug.policies.eviction.turns import Turns, Victims
from glowplug.runtime.settings import ElectedSettings


class PlacerSettings(ElectedSettings):
    policy_placement: str = "union"
    policy_eviction: str = "union"
    policy_prewarming: str = "union"
    node_lease_s: float = Field(NODE_LEASE_S, gt=0)  # a node silent for this long has left
    min_residency_s: float = Field(1.0, ge=0)  # a READY instance is not evicted before
    fair_wait_s: float = Field(5.0, ge=0)  # a placement that waited this long may have a busy instance drained
    evict_grace_s: float = Field(300.0, ge=0)  # longest drain of a victim: it ends hung engines, not slow answers
    turns: Turns = "balanced"  # when a busy instance gives way; `balanced` weighs its arrivals against who waits
    victims: Victims = "least_worth"  # which of several GPUs instances leave: that, `shortest_queue` or `oldest_use`
    fair_requests: int = Field(6, ge=0)  # with balanced turns a model so many requests ahead gives way; 0: no counting
    sleeper_patience: float = Field(1.0, ge=0)  # a start waits so many times what waking a sleeper saves; 0: not at all
    evict_becomes: Becomes = "swapped_out"  # what a victim turns into where its engine can
    prewarm_every_s: float = Field(2.0, gt=0)  # between two plans of what to prewarm, when nothing happens
    avoid_node_s: float = Field(120.0, ge=0)  # a node where weights could not be had is asked for them again after this
    max_start_nodes: int = Field(3, ge=1)  # a start whose weights cannot be had is tried on so many nodes; 1: on one
    network_bytes_per_s: float = Field(2e9, gt=0)  # of a node's network card that tells no rate
    pcie_bytes_per_s: float = Field(32e9, gt=0)  # host memory to GPU, likewise
    start_container_s: float = Field(0.0, ge=0)  # stages of a start, in place of every prior; all 0: the priors
    start_cuda_s: float = Field(0.0, ge=0)  # context, memory
    start_library_s: float = Field(0.0, ge=0)  # imports
    stage_hop_s: float = Field(0.0, ge=0)  # from one stage of a pipeline to the next
    prefill_s: float = Field(0.0, ge=0)  # first token of a warm instance; 0: its engine's prior
    decode_s: float = Field(0.0, ge=0)  # per token
