"""What a placement policy is asked, and what it may look at. Every policy of the room has this shape:

place(request: PlaceRequest, view: PlacementView) -> PlaceDecision
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.placement.hydraserve_contention import LinkLedger


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRequest:
    """One instance that needs room."""

    instance_id: str
    model: Model
    waited_s: float = 0.0
    num_required: int = 1  # instances the model is to have in the end


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView:
    """The fleet as a placement sees it. `nodes` are alive, in order of their ids; cordoned ones are marked draining."""

    now_s: float
    nodes: Sequence[Node]
    reserved: Mapping[str, int] = field(default_factory=dict)  # gpu_id -> bytes promised, not yet in its ledger
    dormant: Mapping[str, Sequence[Instance]] = field(default_factory=dict)  # node_id -> replicas, those coming too,
    # and engines that are swapped out
    scores: Mapping[str, float] = field(default_factory=dict)  # instance_id of a replica -> its worth when last planned
    links: Mapping[str, LinkLedger] = field(default_factory=dict)  # node_id -> fetches under way on its network card
    seconds: Mapping[str, StageSeconds] = field(default_factory=dict)  # model_key -> stages of its starts, measured
    network_bytes_per_s: float = 2e9  # of a node's network card that tells no rate
    pcie_bytes_per_s: float = 32e9  # host memory to GPU, likewise
    start_stages: StageSeconds | None = None  # of models that have not been started yet
