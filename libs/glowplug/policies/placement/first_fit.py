"""First fit: the first node and GPUs whose free bytes hold the instance.

The placement of "serverless vLLM", the baseline of HydraServe section 8.1. A model of several GPUs takes one node's. A
dormant copy on GPUs with the bytes is grown (SwapServeLLM section 4 wakes an engine where it went to sleep).
"""

from dataclasses import dataclass

from glowplug.domain.bounds import Count
from glowplug.domain.decision import Rival
from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.domain.units import show_bytes
from glowplug.fleet.node_index import IndexedNodes
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.dormant import grow
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu, free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFitParams:
    max_rivals: Count = 32  # GPUs named in the decision


def place(request: PlaceRequest, view: PlacementView, params: FirstFitParams = FirstFitParams()) -> PlaceDecision:
    """Choose GPUs of one node. `possible` is False if none would do even empty."""
    return grow(request, view) or fit(request.model, view.fleet, params)


def fit(model: Model, fleet: IndexedNodes, params: FirstFitParams = FirstFitParams()) -> PlaceDecision:
    need, num_gpus = bytes_per_gpu(model), model.num_gpus
    rivals: list[Rival] = []
    chosen: StageDecision | None = None
    for node in fleet.candidates((need,), num_gpus, model.engine, 1):
        fitting = tuple(gpu.gpu_id for gpu in node.gpus if free_bytes(gpu, fleet.reserved) >= need)
        if len(fitting) >= num_gpus:
            chosen = StageDecision(node_id=node.node_id, gpu_ids=fitting[:num_gpus], bytes_per_gpu=need)
            break
    for other in fleet:
        if len(rivals) >= params.max_rivals:
            break
        if model.engine not in other.engines:
            rivals.append(Rival(name=other.node_id, score=0.0, why=f"it cannot start engine {model.engine}"))
            continue
        for gpu in other.gpus[: params.max_rivals - len(rivals)]:
            free = free_bytes(gpu, fleet.reserved)
            why = _why(other, gpu.gpu_id, free, need, chosen)
            rivals.append(Rival(name=gpu.gpu_id, score=float(free), why=why, unit="bytes free"))
    on = "GPU" if num_gpus == 1 else f"{num_gpus} GPUs of one node"
    if chosen is None:
        possible = fleet.could_hold(need, num_gpus, model.engine)
        lacking = f"no {on} has {show_bytes(need)} free" if num_gpus == 1 else f"no {on} have {show_bytes(need)} free"
        reason = lacking if possible else _impossible(model, fleet, need)
        return PlaceDecision(possible=possible, reason=reason, rivals=tuple(rivals))
    first = "this is the first GPU" if num_gpus == 1 else f"these are the first {num_gpus} GPUs of one node"
    return PlaceDecision(stages=(chosen,), reason=f"{first} with {show_bytes(need)} free", rivals=tuple(rivals))


def _why(node: Node, gpu_id: str, free: int, need: int, chosen: StageDecision | None) -> str:
    if node.draining:
        return "its node is being drained"
    if chosen is not None and gpu_id in chosen.gpu_ids:
        return "it is the first with enough free memory"
    return "it has enough free memory too" if free >= need else f"{show_bytes(need)} are needed"


def _impossible(model: Model, fleet: IndexedNodes, need: int) -> str:
    able = [kind for kind in fleet.kinds() if model.engine in kind.engines]
    if not fleet.kinds():
        return "no node has joined"
    if not able:
        return f"no node can start engine {model.engine}"
    largest = max((total for kind in able for _, total in kind.gpus), default=0)
    if model.num_gpus > 1 and largest >= need:
        return f"no node has {model.num_gpus} GPUs of {show_bytes(need)} each"
    return f"no GPU is large enough: {show_bytes(need)} are needed, and the largest has {show_bytes(largest)}"
