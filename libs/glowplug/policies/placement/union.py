"""The papers joined: a dormant copy if there is one, as in WarmServe; else HydraServe's layout of a cold start.

WarmServe decides which replicas exist and are dropped. Of GPUs that serve a layout alike, those with the least worth of
replicas are taken (WarmServe section 5.2's scores). A sleeping engine is a copy too (SwapServeLLM section 4).

Departures: WarmServe gives an instance whole GPUs; here bytes decide, and no more replicas go than needed.

Without a TTFT objective the soonest first token is taken where a request waits (`allocation.soonest`).
"""

from glowplug.policies.decisions import PlaceDecision
from glowplug.policies.placement.dormant import grow
from glowplug.policies.placement.hydraserve import HydraserveParams, lay_out
from glowplug.policies.placement.hydraserve_allocation import AllocationParams
from glowplug.policies.placement.port import PlacementView, PlaceRequest, reads_seconds

PARAMS = HydraserveParams(clear=True, allocation=AllocationParams(soonest=True))


@reads_seconds
def place(request: PlaceRequest, view: PlacementView, params: HydraserveParams = PARAMS) -> PlaceDecision:
    return grow(request, view) or lay_out(request, view, params)
