"""How long the placer waits, the rates it assumes of links, and the rules it follows."""

from dataclasses import dataclass, field

from glowplug.domain.bounds import check_bounds
from glowplug.domain.instance import Becomes
from glowplug.fleet.tables import NODE_LEASE_S
from glowplug.policies.eviction.turns import Turns, Victims
from glowplug.policies.placement.hydraserve_allocation import StageSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerParams:
    """Parameters of the placer: times in seconds, rates in bytes a second."""

    node_lease_s: float = NODE_LEASE_S  # a node silent for this long has left
    repeat_s: float = 2.0  # after this a start that no fact answers is sent again
    give_up_s: float = 8.0  # ... and placed anew after this, on another node where there is one
    impossible_s: float = 3.0  # how long a placement that no GPU could hold waits for nodes to join
    evict_grace_s: float = 300.0  # longest drain of a victim: it ends hung engines, not slow answers
    batch_grace_s: float = 0.5  # ... of a victim that runs batch requests alone: routers take them back at once
    min_residency_s: float = 1.0  # a READY instance stays at least this long
    fair_wait_s: float = 5.0  # after this wait a busy instance may be drained for a model none of whose requests runs
    fair_turn_s: float = 5.0  # ... once READY this long: a start costs seconds, and is for more than one batch
    fair_requests: int = 6  # with balanced turns a model gives way once it is so many requests ahead; 0: no counting
    keep_gone_s: float = 300.0  # rows of instances that are gone are kept this long
    forget_s: float = 10.0  # a placement is dropped when no service repeats it this long (the autoscaler does each 2 s)
    max_tick_gap_s: float = 3.0  # a longer gap means a pause or clock jump of this process, not silent nodes
    settle_s: float = 3.0  # after start, time for nodes and routers to report before an instance is evicted or given up
    retry_s: float = 1.0  # a refused placement asks its policy again after this, or as soon as bytes come free
    turns: Turns = "fair"  # when a busy instance gives way: policies/eviction/turns.py
    victims: Victims = "oldest_use"  # which of several GPUs instances leave: policies/eviction/turns.py
    sleeper_patience: float = 0.0  # a start waits for a sleeping engine this many times as long as the wake saves
    evict_becomes: Becomes = "stopped"  # what an evicted engine becomes where it can
    prewarm_every_s: float = 2.0  # between two plans of what to prewarm, when nothing happens
    prewarm_gap_s: float = 0.25  # ... and when something happens
    prewarm_retry_s: float = 10.0  # a model whose replica failed is prewarmed again after this
    follows_parts: bool = False  # prefetchers report that a stage has its part, and fetch the rest if it becomes whole;
    # False: the part counts as fetched when the stage loads, and its engine fetches the rest, as in scenarios
    hole_grace_s: float = 0.0  # how long a stage that becomes whole has to go on without a lost stage
    avoid_node_s: float = 120.0  # after this a node where weights could not be had is tried again
    max_start_nodes: int = 3  # nodes a start is tried on before the requests that wait for it are refused
    network_bytes_per_s: float = 2e9  # of a node that reports no rate for its network card: 16 Gbit/s
    pcie_bytes_per_s: float = 32e9  # host to GPU, of a node that reports no rate
    start_stages: StageSeconds = field(default_factory=StageSeconds)  # of models not started yet

    def __post_init__(self) -> None:
        check_bounds(self, above_0=("network_bytes_per_s", "pcie_bytes_per_s", "max_start_nodes"))
