"""The papers joined: a dormant copy before all, as WarmServe takes it; else HydraServe's layout of a cold start.

WarmServe decides which replicas there are and who of them gives way; HydraServe decides how a start without one is laid
out. Where several GPUs serve the layout alike, the one whose replicas are worth least is taken (WarmServe section 5.2's
scores). An engine asleep on a GPU is a copy too (SwapServeLLM section 4).

Departures: WarmServe gives an instance its GPUs for itself; here bytes decide, and no more replicas go than it takes.
Where models of several GPUs live, a copy within a free group of theirs is left alone while a start from host memory
breaks a smaller one (`compact`): a hit saves its start a second, the larger model waits for minutes.
"""

from collections.abc import Sequence

from glowplug.domain.hardware import Node
from glowplug.policies.decisions import PlaceDecision
from glowplug.policies.placement.compact import broken, fresh
from glowplug.policies.placement.dormant import grow
from glowplug.policies.placement.hydraserve import HydraserveParams, lay_out
from glowplug.policies.placement.port import PlacementView, PlaceRequest, reads_seconds

PARAMS = HydraserveParams(clear=True)


@reads_seconds
def place(request: PlaceRequest, view: PlacementView, params: HydraserveParams = PARAMS) -> PlaceDecision:
    """See hydraserve.place; replicas are grown from, or give way."""
    largest = max(request.model.num_gpus, view.fleet.largest_group())
    if largest > 1:
        return _compact(request, view, largest) or lay_out(request, view, params)
    return grow(request, view) or lay_out(request, view, params)


def _compact(request: PlaceRequest, view: PlacementView, largest: int) -> PlaceDecision | None:
    """The copy, or the start from host memory, that breaks no group larger than it must."""

    def breaks(node: Node, gpu_ids: Sequence[str]) -> int:
        return broken(node, gpu_ids, view, largest)

    grown = grow(request, view, breaks)
    at = view.fleet.node(grown.node_id) if grown else None
    loss = breaks(at, grown.stages[0].gpu_ids) if grown and at else largest + 1
    if grown is not None and not loss:
        return grown
    started = fresh(request, view, largest)
    if started is not None and started[0] < loss:
        return started[1]
    return grown
