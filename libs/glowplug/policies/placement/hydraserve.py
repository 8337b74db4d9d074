"""HydraServe: a cold start laid out over servers, as few stages as meet the objectives.

Paper: HydraServe section 4.1, Algorithm 1 over the links' ledgers (section 4.2, Eq. 3-4); section 8.3's cache option:
where host memory has the weights there is nothing to fetch, and one worker there will do.

Departures: an objective for TPOT that even one warm worker misses says nothing about layouts, and is taken for what
that worker does, hops apart (the paper falls back to one worker then, however late its first token); where no scheme
fits the request waits (erratum E19); pipelines only over nodes whose engine serves stages;
a stage lies on a GPU that could hold the whole model, where there is any, since consolidation makes it grow there;
a model of several GPUs starts whole, on the node that is ready soonest: the paper raises pipelining on top of tensor
parallelism for large models (section 7), which it does not evaluate, and which `allocation.pipeline_over_tensor` is:
stages of a tensor group each, all of its GPUs on one server.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

from glowplug.domain.hardware import Node
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement import serverlessllm
from glowplug.policies.placement.dormant import clear, gives_way, grow
from glowplug.policies.placement.expect import offer_of, stage_seconds
from glowplug.policies.placement.first_fit import fit
from glowplug.policies.placement.hydraserve_allocation import (
    AllocationParams,
    ColdStart,
    Layout,
    ServerOffer,
    allocate,
)
from glowplug.policies.placement.links import gpu_kind_of, has_weights
from glowplug.policies.placement.port import PlacementView, PlaceRequest, reads_seconds
from glowplug.policies.placement.shape import bytes_per_gpu, room_of
from glowplug.policies.start_times import StartKind

ENDLESS = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraserveParams:
    allocation: AllocationParams = field(default_factory=AllocationParams)
    use_cache: bool = True
    clear: bool = False  # replicas may be dropped for it (the union)


@reads_seconds
def place(request: PlaceRequest, view: PlacementView, params: HydraserveParams = HydraserveParams()) -> PlaceDecision:
    """One stage or several, each with the bytes it fetches first. No stages when nothing fits now."""
    return grow(request, view) or lay_out(request, view, params)


def lay_out(request: PlaceRequest, view: PlacementView, params: HydraserveParams) -> PlaceDecision:
    """A start of its own."""
    if request.model.num_gpus > 1 and not params.allocation.pipeline_over_tensor:
        return serverlessllm.place(request, view)
    able = [n for n in view.nodes if not n.draining and request.model.engine in n.engines]
    start = _cold_start(request, able, view, params)
    layout = _cached(start, able, request, view, params)
    if layout is not None:
        return _as_stages(layout, request, view, params)
    offers = _offers(able, request, view, params)
    staged = {node.node_id for node in able if node.can(request.model.engine, "stages")}
    layout = _spread(start, offers, staged, view, params)
    if layout is None:
        told = fit(request.model, view.nodes, view.reserved)
        if told.stages or not _fits_as_stages(start, offers, staged, params):
            return told
        return replace(told, is_late=True, reason=f"{told.reason}, and a start in stages would be late")
    return _as_stages(layout, request, view, params)


def _cold_start(
    request: PlaceRequest, able: Sequence[Node], view: PlacementView, params: HydraserveParams
) -> ColdStart:
    model = request.model
    gpu_kind = gpu_kind_of(able[0]) if able else ""  # where nodes differ their offers have seconds of their own
    stages = stage_seconds(model, gpu_kind, view, StartKind.COLD)
    warm_tpot_s = stages.decode_s + stages.hop_s * params.allocation.max_stages
    return ColdStart(
        model_key=model.key,
        weight_bytes=model.weights_bytes,
        kv_bytes=model.kv_bytes,
        slo_ttft_s=model.slo.ttft_s or ENDLESS,
        slo_tpot_s=max(model.slo.tpot_s, warm_tpot_s) if model.slo.tpot_s else ENDLESS,
        stages=stages,
        waited_s=request.waited_s,
        num_required=request.num_required,
        num_gpus=model.num_gpus,
    )


def _cached(
    start: ColdStart, nodes: Iterable[Node], request: PlaceRequest, view: PlacementView, params: HydraserveParams
) -> Layout | None:
    """One worker where host memory has the weights."""
    if not params.use_cache:
        return None
    there = [node for node in nodes if has_weights(node, request.model)]
    alone = replace(params.allocation, max_stages=1, check_contention=False)
    return allocate(start, _offers(there, request, view, params, is_cached=True), view.now_s, alone)


def _spread(
    start: ColdStart, offers: Sequence[ServerOffer], staged: Set[str], view: PlacementView, params: HydraserveParams
) -> Layout | None:
    """One worker anywhere where that meets the objectives (the smallest s); else stages, on the `staged` nodes."""
    single = allocate(start, offers, view.now_s, replace(params.allocation, max_stages=1))
    if single is not None and single.meets_slo and start.num_required <= 1:
        return single
    if len(staged) < 2 or params.allocation.max_stages < 2:
        return single
    pipeline = allocate(start, [o for o in offers if o.node_id in staged], view.now_s, params.allocation)
    return pipeline if pipeline is not None and (pipeline.meets_slo or single is None) else single


def _fits_as_stages(
    start: ColdStart, offers: Iterable[ServerOffer], staged: Set[str], params: HydraserveParams
) -> bool:
    """Whether some number of equal stages has the bytes, each on a server of its own, in time or not."""
    rooms = sorted((_room(o, start.num_gpus) for o in offers if o.node_id in staged), reverse=True)
    most = min(params.allocation.max_stages, len(rooms))
    return any(rooms[num - 1] * num >= start.bytes_per_gpu() for num in range(2, most + 1))


def _room(offer: ServerOffer, num_gpus: int) -> int:
    """Bytes on each of that server's `num_gpus` GPUs with the most."""
    return sorted((free for _, free in offer.gpus), reverse=True)[num_gpus - 1]


def _offers(
    nodes: Iterable[Node],
    request: PlaceRequest,
    view: PlacementView,
    params: HydraserveParams,
    *,
    is_cached: bool = False,
) -> list[ServerOffer]:
    model = request.model
    whole = bytes_per_gpu(model)
    low = bytes_per_gpu(model, 1 if is_cached else params.allocation.max_stages)
    nodes = list(nodes)
    fits_somewhere = any(sum(gpu.total_bytes >= whole for gpu in node.gpus) >= model.num_gpus for node in nodes)
    offers = []
    for node in nodes:
        here = view.dormant.get(node.node_id, ()) if params.clear else ()
        gpus, lost = [], {}
        for gpu in node.gpus:
            if fits_somewhere and gpu.total_bytes < whole:
                continue
            room = room_of(gpu, view.reserved)
            if here:
                ids = {row.instance_id for row in here if gives_way(row)}
                copies = [g for g in gpu.grants if g.holder in ids]
                room += sum(g.num_bytes for g in copies)
                lost[gpu.gpu_id] = sum(view.scores.get(g.holder, 0.0) for g in copies)
            if room >= low:
                gpus.append((gpu.gpu_id, room))
        if len(gpus) >= model.num_gpus:
            empty = frozenset(g.gpu_id for g in node.gpus if not g.grants and not view.reserved.get(g.gpu_id))
            offers.append(
                replace(offer_of(node, model, view, is_cached=is_cached), gpus=tuple(gpus), empty_gpus=empty, lost=lost)
            )
    return offers


def _as_stages(layout: Layout, request: PlaceRequest, view: PlacementView, params: HydraserveParams) -> PlaceDecision:
    model, num_stages = request.model, layout.num_stages
    whole = model.fetch_bytes
    cuts = [whole * number // num_stages for number in range(num_stages + 1)]
    by_id = {gpu.gpu_id: gpu for node in view.nodes for gpu in node.gpus} if params.clear else {}
    stages, drops = [], list[str]()
    for number, worker in enumerate(layout.workers):
        need = bytes_per_gpu(model) if num_stages == 1 else worker.num_bytes
        stages.append(
            StageDecision(
                node_id=worker.node_id,
                gpu_ids=worker.gpu_ids,
                bytes_per_gpu=need,
                first_byte=cuts[number],
                fetch_bytes=cuts[number + 1] - cuts[number] if num_stages > 1 else 0,
            )
        )
        for gpu_id in worker.gpu_ids if params.clear else ():
            cleared = clear(by_id[gpu_id], need, view.dormant.get(worker.node_id, ()), view)
            drops += cleared.drops if cleared is not None else ()
    return PlaceDecision(
        stages=tuple(stages), drops=tuple(dict.fromkeys(drops)), reason=layout.reason, rivals=layout.rivals
    )
