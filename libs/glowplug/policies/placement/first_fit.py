"""First fit: the first node, and on it the first GPUs, whose free bytes hold the instance.

The placement of "serverless vLLM", the baseline of HydraServe section 8.1. A model of several GPUs takes GPUs of one
node. Where the model lies dormant on GPUs that have the room, the instance grows from there (SwapServeLLM section 4
wakes an engine where it went to sleep); without dormant copies this is the baseline as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glowplug.domain.decision import Rival
from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.domain.units import show_bytes
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.dormant import grow
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu, room_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFitParams:
    max_rivals: int = 32  # GPUs named in the decision


def place(request: PlaceRequest, view: PlacementView, params: FirstFitParams = FirstFitParams()) -> PlaceDecision:
    """GPUs of one node for one instance. `possible` is False when no node of the view has GPUs large enough even when
    empty, or none can run the engine."""
    return grow(request, view) or fit(request.model, view.nodes, view.reserved, params)


def fit(
    model: Model, nodes: Sequence[Node], reserved: Mapping[str, int], params: FirstFitParams = FirstFitParams()
) -> PlaceDecision:
    """The first GPUs by node (ids as text: node-10 before node-2) and index. `reserved`: gpu_id -> bytes promised but
    not yet granted."""
    need, num_gpus = bytes_per_gpu(model), model.num_gpus
    rivals: list[Rival] = []
    possible = False
    chosen: StageDecision | None = None
    for node in sorted(nodes, key=lambda n: n.node_id):
        if chosen is not None and len(rivals) >= params.max_rivals:
            break
        if model.engine not in node.engines:
            rivals.append(Rival(name=node.node_id, score=0.0, why=f"it cannot start engine {model.engine}"))
            continue
        rooms = [(gpu.gpu_id, room_of(gpu, reserved)) for gpu in node.gpus]
        possible = possible or sum(gpu.total_bytes >= need for gpu in node.gpus) >= num_gpus
        fitting = [] if node.draining else [gpu_id for gpu_id, room in rooms if room >= need]
        if chosen is None and len(fitting) >= num_gpus:
            chosen = StageDecision(node_id=node.node_id, gpu_ids=tuple(fitting[:num_gpus]), bytes_per_gpu=need)
        for gpu_id, room in rooms[: params.max_rivals - len(rivals)]:
            why = _why(node, gpu_id, room, need, chosen)
            rivals.append(Rival(name=gpu_id, score=float(room), why=why, unit="bytes free"))
    listed = tuple(rivals[: params.max_rivals])
    on = "GPU" if num_gpus == 1 else f"{num_gpus} GPUs of one node"
    if chosen is None:
        lacking = f"no {on} has {show_bytes(need)} free" if num_gpus == 1 else f"no {on} have {show_bytes(need)} free"
        return PlaceDecision(
            possible=possible, reason=lacking if possible else _impossible(model, nodes, need), rivals=listed
        )
    first = "this is the first GPU" if num_gpus == 1 else f"these are the first {num_gpus} GPUs of one node"
    return PlaceDecision(stages=(chosen,), reason=f"{first} with {show_bytes(need)} free", rivals=listed)


def _why(node: Node, gpu_id: str, room: int, need: int, chosen: StageDecision | None) -> str:
    if node.draining:
        return "its node is being drained"
    if chosen is not None and gpu_id in chosen.gpu_ids:
        return "it is the first with room"
    return "it has room too" if room >= need else f"{show_bytes(need)} are needed"


def _impossible(model: Model, nodes: Sequence[Node], need: int) -> str:
    able = [n for n in nodes if model.engine in n.engines]
    if not nodes:
        return "no node has joined"
    if not able:
        return f"no node can start engine {model.engine}"
    largest = max((g.total_bytes for n in able for g in n.gpus), default=0)
    if model.num_gpus > 1 and largest >= need:
        return f"no node has {model.num_gpus} GPUs of {show_bytes(need)} each"
    return f"no GPU is large enough: {show_bytes(need)} are needed, and the largest has {show_bytes(largest)}"
