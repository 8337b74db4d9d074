"""How long the placer waits, what it assumes of links, and which rules it follows."""

from dataclasses import dataclass, field

from glowplug.domain.bounds import check_bounds
from glowplug.domain.instance import Becomes
from glowplug.fleet.tables import NODE_LEASE_S
from glowplug.policies.eviction.turns import Turns, Victims
from glowplug.policies.placement.hydraserve_allocation import StageSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerParams:
    """How long things may take or stay, in seconds; rates in bytes a second."""

    node_lease_s: float = NODE_LEASE_S  # a node silent for this long has left
    repeat_s: float = 2.0  # a start of which no fact has come is sent again after this
    give_up_s: float = 8.0  # ... and placed anew after this, on another node where there is one
    impossible_s: float = 3.0  # how long a placement that no GPU could hold waits for nodes to join
    evict_grace_s: float = 300.0  # longest drain of a victim: it ends hung engines, not slow answers
    min_residency_s: float = 1.0  # a READY instance stays at least this long
    fair_wait_s: float = 5.0  # after this wait a busy instance may be drained for a model none of whose requests runs
    fair_turn_s: float = 5.0  # ... that has been READY this long: a start costs seconds, and is for more than one batch
    fair_requests: int = 6  # with balanced turns a model gives way once it is so many requests ahead; 0: no counting
    keep_gone_s: float = 300.0  # rows of instances that are gone are kept this long
    forget_s: float = 10.0  # a placement that nobody repeats (the autoscaler does each 2 s) is wanted no more
    max_tick_gap_s: float = 3.0  # a longer one was our pause or a jump of the clock, not the silence of the nodes
    settle_s: float = 3.0  # after start, time for nodes and routers to report before anybody is evicted or given up
    retry_s: float = 1.0  # a placement that was refused asks its policy again after this, or as soon as bytes come free
    turns: Turns = "fair"  # when a busy instance gives way: policies/eviction/turns.py
    victims: Victims = "oldest_use"  # which of several GPUs instances leave: policies/eviction/turns.py
    sleeper_patience: float = 0.0  # a start waits where its engine sleeps for so many times what the wake saves
    evict_becomes: Becomes = "stopped"  # what a running engine turns into that leaves for another, where it can
    prewarm_every_s: float = 2.0  # between two plans of what to prewarm, when nothing happens
    prewarm_gap_s: float = 0.25  # ... and when something does
    prewarm_retry_s: float = 10.0  # a model whose replica failed is prewarmed again after this
    follows_parts: bool = False  # prefetchers say when a stage has its part, and bring the rest of what becomes whole;
    # False: it is there when the stage loads, and the rest is for its engine to bring, as in scenarios
    hole_grace_s: float = 0.0  # how long a stage that becomes whole has to go on without one that is gone
    avoid_node_s: float = 120.0  # a node where weights could not be had is asked for them again after this
    max_start_nodes: int = 3  # on how many nodes a start is tried before whoever waits for it is refused
    network_bytes_per_s: float = 2e9  # of a node's network card that tells no rate: 16 Gbit/s
    pcie_bytes_per_s: float = 32e9  # host to GPU, of a node that tells no rate
    start_stages: StageSeconds = field(default_factory=StageSeconds)  # of models that have not been started yet

    def __post_init__(self) -> None:
        check_bounds(self, above_0=("network_bytes_per_s", "pcie_bytes_per_s", "max_start_nodes"))
