"""WarmServe: place a new instance on GPUs without a running one, preferring a prewarmed copy of its model.

Paper: WarmServe section 5.2, last paragraph, and section 4 (Fig. 5). Prewarmed, else being prewarmed, else the free
group with the least sum of replica scores; overlapping replicas are dropped, since a dedicated worker has its GPUs for
itself. GPUs of running or draining instances are no candidates. The least sum of lost scores decides on hit and miss
alike, as the text says (erratum E8).

`unplaced` is the ablation "without evict-aware placement" (section 7.5, Fig. 12): the first copy or group, whatever it
costs the others. First fit is our reading; the paper names no replacement.
"""

from collections.abc import Iterable, Iterator

from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.dormant import giving_way
from glowplug.policies.placement.first_fit import fit
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu
from glowplug.policies.placement.warmserve_evict_aware import (
    Prewarmed,
    PrewarmNode,
    ReplicaShape,
    groups_of,
    members,
    start_nodes,
)


def place(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    """Choose GPUs, and on a hit the copy to grow from. No stages if every group has an instance."""
    return take_over(request.model.key, *_asked(request, view)) or _nowhere(request, view)


def unplaced(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    """Choose the first copy, else the first group, by node and id: the ablation."""
    shape, nodes = _asked(request, view)
    for node in nodes:
        for copy in sorted(_copies(request.model.key, shape, node), key=lambda r: (not r.is_ready, r.replica_id)):
            lost = _lost(_held(node), node.bits(copy.gpu_ids), copy)
            return _taking(node, copy.gpu_ids, shape, lost, "this is the first copy there is", copy)
    for node in nodes:
        for bits in _free_groups(shape, node):
            why = "there is no copy, and this is the first free group of GPUs"
            return _taking(node, _named(node, bits), shape, _lost(_held(node), bits), why)
    return _nowhere(request, view)


def take_over(model_key: str, shape: ReplicaShape, nodes: Iterable[PrewarmNode]) -> PlaceDecision | None:
    """Choose a ready replica, else one still loading, else the free group with the least valuable replicas. None
    without `shape.num_gpus` GPUs that are not serving."""
    views = sorted(nodes, key=lambda n: n.node_id)
    hits = []
    for node in views:
        for copy in _copies(model_key, shape, node):
            bits = node.bits(copy.gpu_ids)
            lost = _lost(_held(node), bits, copy)
            hits.append(((not copy.is_ready, sum(r.score for r in lost), node.node_id, bits), node, copy, lost))
    if hits:
        order, node, copy, lost = min(hits, key=lambda hit: hit[0])
        why = f"a copy of it {'is' if copy.is_ready else 'is being'} prewarmed there"
        return _taking(node, _named(node, order[-1]), shape, lost, why, copy)
    best: tuple[tuple[float, int], PrewarmNode, int, list[Prewarmed]] | None = None
    for node in views:
        held = _held(node)
        for bits in _free_groups(shape, node):
            lost = _lost(held, bits)
            cost = (sum(r.score for r in lost), len(lost))
            if best is None or cost < best[0]:
                best = (cost, node, bits, lost)
            if not lost:
                break
        if best is not None and best[0] == (0, 0):
            break
    if best is None:
        return None
    _, node, bits, lost = best
    why = "no copy of it is prewarmed, and these GPUs hold the copies worth least"
    return _taking(node, _named(node, bits), shape, lost, why)


def _asked(request: PlaceRequest, view: PlacementView) -> tuple[ReplicaShape, list[PrewarmNode]]:
    """The shape in terms of section 5.2, and the nodes by id."""
    need = bytes_per_gpu(request.model)
    shape = ReplicaShape(num_gpus=request.model.num_gpus, bytes_per_gpu=need)
    return shape, list(start_nodes(request.model, need, view.fleet))


def _copies(model_key: str, shape: ReplicaShape, node: PrewarmNode) -> list[Prewarmed]:
    mine = [r for r in node.replicas if r.model_key == model_key and len(r.gpu_ids) == shape.num_gpus]
    return [r for r in mine if node.draining.isdisjoint(r.gpu_ids)]


def _free_groups(shape: ReplicaShape, node: PrewarmNode) -> Iterator[int]:
    if len(node.gpu_ids) - len(node.draining) < shape.num_gpus:
        return
    closed = node.bits([g for g in node.gpu_ids if g in node.draining])
    for bits in groups_of(len(node.gpu_ids), shape.num_gpus):
        if not bits & closed:
            yield bits


def _held(node: PrewarmNode) -> list[tuple[int, Prewarmed]]:
    return [(node.bits(r.gpu_ids), r) for r in node.replicas]


def _lost(held: list[tuple[int, Prewarmed]], bits: int, copy: Prewarmed | None = None) -> list[Prewarmed]:
    """`copy` is kept: the instance grows from it."""
    return [r for other, r in held if other & bits and r is not copy]


def _named(node: PrewarmNode, bits: int) -> tuple[str, ...]:
    return tuple(node.gpu_ids[at] for at in members(bits))


def _taking(
    node: PrewarmNode,
    gpu_ids: tuple[str, ...],
    shape: ReplicaShape,
    lost: list[Prewarmed],
    why: str,
    copy: Prewarmed | None = None,
) -> PlaceDecision:
    stage = StageDecision(node_id=node.node_id, gpu_ids=gpu_ids, bytes_per_gpu=shape.bytes_per_gpu)
    return PlaceDecision(
        stages=(stage,),
        source=copy.replica_id if copy else "",
        drops=tuple(r.replica_id for r in lost),
        reason=f"{why}{giving_way(len(lost))}",
    )


def _nowhere(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    said = fit(request.model, view.fleet)
    if said.possible:
        num = request.model.num_gpus
        lacking = "no node has a GPU that serves nobody" if num == 1 else f"no node has {num} GPUs that serve nobody"
        return PlaceDecision(reason=lacking, rivals=said.rivals, whole_gpus=True)
    return PlaceDecision(possible=False, reason=said.reason, rivals=said.rivals)
