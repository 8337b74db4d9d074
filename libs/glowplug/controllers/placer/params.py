"""Waits of the placer, assumed link rates, and its rules."""

from dataclasses import dataclass, field
from typing import Annotated

from glowplug.domain.bounds import Bounded, Count, Positive
from glowplug.domain.instance import Becomes
from glowplug.domain.reading import ADVANCED, SETTING
from glowplug.fleet.tables import NODE_LEASE_S
from glowplug.policies.eviction.turns import Turns, Victims
from glowplug.policies.placement.hydraserve_allocation import StageSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacerParams(Bounded):
    """Times in seconds, rates in bytes a second."""

    node_lease_s: Annotated[Positive, SETTING] = NODE_LEASE_S  # a node that is silent for this long counts as gone
    repeat_s: float = 2.0  # between sends of an unanswered start
    give_up_s: float = 8.0  # ... then it is placed anew, on another node where there is one
    impossible_s: float = 3.0  # patience of a placement that no GPU could hold, for nodes to join
    # longest drain of a victim: it ends hung engines, not slow answers
    evict_grace_s: Annotated[float, ADVANCED] = 300.0
    batch_grace_s: float = 0.5  # ... of one that runs batch requests alone: routers take them back at once
    min_residency_s: Annotated[float, SETTING] = 1.0  # a READY instance is not evicted sooner
    fair_wait_s: Annotated[float, SETTING] = 5.0  # a placement that waited this long may have a busy instance drained
    fair_turn_s: float = 5.0  # ... once READY this long: a start costs seconds, and is for more than one batch
    fair_requests: Annotated[int, ADVANCED] = 6  # lead at which a model gives way with balanced turns; 0: no counting
    keep_gone_s: float = 300.0  # of rows of gone instances
    forget_s: float = 10.0  # of a placement that is not repeated (the autoscaler repeats each 2 s)
    settle_s: float = 3.0  # time for nodes and routers to report, before evictions or refusals
    retry_s: float = 1.0  # between tries of a refused placement, without new bytes
    turns: Turns = "fair"  # policies/eviction/turns.py
    victims: Annotated[Victims, ADVANCED] = "oldest_use"  # of several GPUs, likewise
    sleeper_patience: float = 1.0  # wait for a sleeping engine, as a multiple of the wake's saving
    evict_becomes: Annotated[Becomes, SETTING] = "stopped"  # a victim becomes this where its engine can
    prewarm_every_s: float = 2.0  # between prewarming plans, when nothing happens
    prewarm_gap_s: float = 0.25  # ... and when something happens
    prewarm_retry_s: float = 10.0  # after a failed replica of the model
    follows_parts: bool = False  # prefetchers report that a stage has its part, and fetch the rest if it becomes whole;
    # False: the part counts as fetched when the stage loads, and its engine fetches the rest, as in scenarios
    hole_grace_s: float = 0.0  # for a stage that becomes whole to go on without a lost stage
    avoid_node_s: float = 120.0  # after which a node that failed to get weights is tried again
    max_start_nodes: Count = 3  # tried before waiting requests are refused
    network_bytes_per_s: Positive = 2e9  # of a node that reports no rate: 16 Gbit/s
    pcie_bytes_per_s: Positive = 32e9  # host to GPU, of a node that reports no rate
    start_stages: StageSeconds = field(default_factory=StageSeconds)  # of models not started yet
