"""WarmServe: a new instance takes over GPUs that serve nobody, a prewarmed copy of its model before all.

Paper: WarmServe section 5.2, last paragraph, and section 4 (Fig. 5). Prewarmed, else being prewarmed, else the free
group whose replicas' scores add up to least; whatever it overlaps loses its place, since a dedicated worker has its
GPUs for itself. GPUs of a running instance, draining ones too, are no candidates.

`unplaced` is the ablation "without evict-aware placement" (section 7.5, Fig. 12): the first copy or group there is,
whatever it costs the others. The paper does not say what it puts in its place; first fit is our reading.
"""

from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.dormant import giving_way
from glowplug.policies.placement.first_fit import fit
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu
from glowplug.policies.placement.warmserve_evict_aware import ReplicaShape, Takeover, take_over
from glowplug.policies.placement.warmserve_view import PrewarmNode, groups_of, members, start_nodes


def place(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    """GPUs for one instance, and the copy it grows from on a hit. None while every group has an instance on it."""
    nodes = candidates(request, view)
    found = take_over(request.model.key, shape_of(request), nodes)
    return decided(request, found) if found else nowhere(request, view)


def unplaced(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    """The ablation: the first copy by node and id, else the first group by node and index."""
    nodes, shape = candidates(request, view), shape_of(request)
    found = _first_copy(request.model.key, shape, nodes) or _first_group(shape, nodes)
    return decided(request, found) if found else nowhere(request, view)


def shape_of(request: PlaceRequest) -> ReplicaShape:
    """What it takes, in the words of section 5.2."""
    return ReplicaShape(num_gpus=request.model.num_gpus, bytes_per_gpu=bytes_per_gpu(request.model))


def candidates(request: PlaceRequest, view: PlacementView) -> list[PrewarmNode]:
    """Nodes with enough GPUs that serve nobody, by id."""
    return list(start_nodes(request.model, bytes_per_gpu(request.model), view.fleet))


def decided(request: PlaceRequest, found: Takeover) -> PlaceDecision:
    """A takeover as a placement."""
    need = bytes_per_gpu(request.model)
    stage = StageDecision(node_id=found.node_id, gpu_ids=found.gpu_ids, bytes_per_gpu=need)
    return PlaceDecision(stages=(stage,), source=found.replica_id, drops=found.evicted, reason=found.reason)


def nowhere(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
    """Why no GPU can be had: never, or not while others serve."""
    said = fit(request.model, view.fleet)
    if said.possible:
        num = request.model.num_gpus
        lacking = "no node has a GPU that serves nobody" if num == 1 else f"no node has {num} GPUs that serve nobody"
        return PlaceDecision(reason=lacking, rivals=said.rivals, whole_gpus=True)
    return PlaceDecision(possible=False, reason=said.reason, rivals=said.rivals)


def _first_copy(model_key: str, shape: ReplicaShape, nodes: list[PrewarmNode]) -> Takeover | None:
    for node in nodes:
        for replica in sorted(node.replicas, key=lambda r: (not r.is_ready, r.replica_id)):
            is_free = not node.draining & set(replica.gpu_ids)
            if replica.model_key == model_key and is_free and len(replica.gpu_ids) == shape.num_gpus:
                return _taken(node, replica.gpu_ids, replica.replica_id, "this is the first copy there is")
    return None


def _first_group(shape: ReplicaShape, nodes: list[PrewarmNode]) -> Takeover | None:
    for node in nodes:
        closed = node.bits([g for g in node.gpu_ids if g in node.draining])
        for bits in groups_of(len(node.gpu_ids), shape.num_gpus):
            if not bits & closed:
                gpu_ids = tuple(node.gpu_ids[at] for at in members(bits))
                return _taken(node, gpu_ids, "", "there is no copy, and this is the first free group of GPUs")
    return None


def _taken(node: PrewarmNode, gpu_ids: tuple[str, ...], replica_id: str, why: str) -> Takeover:
    lost = [r for r in node.replicas if set(r.gpu_ids) & set(gpu_ids) and r.replica_id != replica_id]
    return Takeover(
        node_id=node.node_id,
        gpu_ids=gpu_ids,
        replica_id=replica_id,
        evicted=tuple(r.replica_id for r in lost),
        lost_score=sum(r.score for r in lost),
        reason=f"{why}{giving_way(len(lost))}",
    )
