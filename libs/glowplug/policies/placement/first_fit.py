"""First fit: the first GPU, by node and index, whose free bytes hold the instance.

The placement of "serverless vLLM", the baseline of HydraServe section 8.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glowplug.domain.decision import Rival
from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.domain.units import show_bytes
from glowplug.policies.decisions import PlaceDecision, StageDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstFitParams:
    max_rivals: int = 32  # GPUs named in the decision


def place(
    model: Model, nodes: Sequence[Node], reserved: Mapping[str, int], params: FirstFitParams = FirstFitParams()
) -> PlaceDecision:
    """A GPU for one instance of `model`. `reserved`: gpu_id -> bytes promised but not yet granted.

    `possible` is False when no GPU of `nodes` is large enough even when empty, or none can run the engine.
    """
    need = model.memory_bytes
    rivals: list[Rival] = []
    possible = False
    chosen: StageDecision | None = None
    for node in sorted(nodes, key=lambda n: n.node_id):
        if chosen is not None and len(rivals) >= params.max_rivals:
            break
        if model.engine not in node.engines:
            rivals.append(Rival(name=node.node_id, score=0.0, why=f"cannot start engine {model.engine}"))
            continue
        for gpu in node.gpus:
            free = gpu.free_bytes - reserved.get(gpu.gpu_id, 0)
            possible = possible or gpu.total_bytes >= need
            fits = free >= need
            if len(rivals) >= params.max_rivals and (chosen is not None or not fits or node.draining):
                continue  # nothing to choose, and no place left to name it
            if fits and chosen is None and not node.draining:
                chosen = StageDecision(node_id=node.node_id, gpu_ids=(gpu.gpu_id,), bytes_per_gpu=need)
                why = "first with room"
            elif node.draining:
                why = "node is draining"
            else:
                why = "has room too" if fits else f"{show_bytes(free)} free, {show_bytes(need)} needed"
            rivals.append(Rival(name=gpu.gpu_id, score=float(free), why=why))
    listed = tuple(rivals[: params.max_rivals])
    if chosen is None:
        reason = f"no GPU has {show_bytes(need)} free" if possible else _impossible(model, nodes, need)
        return PlaceDecision(possible=possible, reason=reason, rivals=listed)
    reason = f"first GPU with {show_bytes(need)} free"
    return PlaceDecision(stages=(chosen,), reason=reason, rivals=listed)


def _impossible(model: Model, nodes: Sequence[Node], need: int) -> str:
    if not nodes:
        return "no node has joined"
    if not any(model.engine in n.engines for n in nodes):
        return f"no node can start engine {model.engine}"
    largest = max((g.total_bytes for n in nodes if model.engine in n.engines for g in n.gpus), default=0)
    return f"{show_bytes(need)} needed, the largest GPU has {show_bytes(largest)}"
