"""ServerlessLLM: the server where the model is ready soonest, given nearby weights.

The baseline of HydraServe section 8.1 (host memory as a cache, containers ready) and, with copies kept on the GPUs
(`keep_last`, a prewarming policy), SLLM-GPU of WarmServe section 7.1: a dormant copy first, then the fewest estimated
seconds to load, over the network unless host memory or disk has the weights, then over PCIe. Idle replicas of other
models are dropped before a request has to wait.

Departure: ServerlessLLM moves running models aside to free a good server (live migration); here it counts as full.
"""

from functools import partial
from typing import Final

from glowplug.domain.decision import Rival
from glowplug.domain.hardware import Node
from glowplug.fleet.node_index import NodeMemory
from glowplug.fleet.start_times import StartKind
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.dormant import Clearing, cheapest, cheapest_on, dropped, grow
from glowplug.policies.placement.expect import offer_of
from glowplug.policies.placement.first_fit import fit
from glowplug.policies.placement.links import found_at
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu

MAX_RIVALS = 16
_WHERE: Final = {
    StartKind.CACHED: "are in host memory",
    StartKind.DISK: "are read from its disk",
    StartKind.COLD: "come over the network",
}


def place(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    """Choose the node ready soonest. Ties: least lost, then the first node and GPUs."""
    if grown := grow(request, view):
        return grown
    options = [(estimate_s(request, node, view), node, cleared) for node, cleared in _with_memory(request, view)]
    if not options:
        return fit(request.model, view.fleet)
    options.sort(key=lambda option: (option[0], sum(c.lost for c in option[2]), option[1].node_id))
    seconds, node, cleared = options[0]
    gpu_ids = tuple(sorted(one.gpu_id for one in cleared))
    where = _WHERE[found_at(node, request.model)]
    return PlaceDecision(
        stages=(StageDecision(node_id=node.node_id, gpu_ids=gpu_ids, bytes_per_gpu=bytes_per_gpu(request.model)),),
        drops=dropped(cleared),
        reason=f"it is ready soonest there: its weights {where} and are loaded within {seconds:.2f} s",
        rivals=tuple(Rival(name=n.node_id, score=s, unit="s to load") for s, n, _ in options[:MAX_RIVALS]),
    )


def estimate_s(request: PlaceRequest, node: Node, view: PlacementView) -> float:
    model = request.model
    offer = offer_of(node, model, view, found_at(node, model))
    load_s = model.weights_bytes / model.num_gpus / offer.pcie_bytes_per_s
    return load_s + model.fetch_bytes / offer.link.share()


def _with_memory(request: PlaceRequest, view: PlacementView) -> list[tuple[Node, list[Clearing]]]:
    model, need, fleet = request.model, bytes_per_gpu(request.model), view.fleet
    num_gpus = model.num_gpus

    def loses(known: NodeMemory) -> float:
        cleared = cheapest(known, model, view)
        return sum(one.lost for one in cleared) if len(cleared) == num_gpus else float("inf")

    if not fleet.candidates((need,), num_gpus, model.engine, 1, drops="free", loses=loses):
        return []
    apart = {*view.links, *fleet.disk_holders(model)}
    near = partial(fleet.candidates, (need,), num_gpus, model.engine, MAX_RIVALS, drops="free", loses=loses, busy=apart)
    holders = fleet.holders(model)
    nodes = [*near(only=holders), *(() if holders is None else near(besides=holders))]
    nodes.sort(key=lambda node: node.node_id)
    return list(cheapest_on(nodes, model, view))
