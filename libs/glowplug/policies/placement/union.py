"""The papers joined: a dormant copy if there is one, as in WarmServe; else HydraServe's layout of a cold start.

WarmServe decides which replicas there are and which are dropped; HydraServe decides how a start without one is laid
out. Where several GPUs serve the layout alike, the one whose replicas are worth least is taken (WarmServe section 5.2's
scores). An engine asleep on a GPU is a copy too (SwapServeLLM section 4).

Departures: WarmServe gives an instance its GPUs for itself; here bytes decide, and no more replicas go than needed.

HydraServe takes as few stages as meet the objectives. Without an objective for the first token any layout meets them,
and one worker fetches over one link while the others are idle. Where a request waits for such a start the layout with
the soonest first token is taken (`allocation.soonest`); a start that no request waits for stays one worker.
"""

from glowplug.policies.decisions import PlaceDecision
from glowplug.policies.placement.dormant import grow
from glowplug.policies.placement.hydraserve import HydraserveParams, lay_out
from glowplug.policies.placement.hydraserve_allocation import AllocationParams
from glowplug.policies.placement.port import PlacementView, PlaceRequest, reads_seconds

PARAMS = HydraserveParams(clear=True, allocation=AllocationParams(soonest=True))


@reads_seconds
def place(request: PlaceRequest, view: PlacementView, params: HydraserveParams = PARAMS) -> PlaceDecision:
    """Place as `hydraserve.place` does, but drop replicas for the bytes."""
    return grow(request, view) or lay_out(request, view, params)
