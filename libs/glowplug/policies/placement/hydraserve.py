"""HydraServe: a cold start in as few stages as meet the objectives.

Paper: HydraServe section 4.1, Algorithm 1 over the links' ledgers (section 4.2, Eq. 3-4); section 8.3's cache option:
where host memory has the weights one worker there is enough. Where a node's disk has them, a stage reads its part at
the disk's rate, without the network.

Departures:
- A TPOT objective that one warm worker misses is raised to that worker's TPOT with the hops added (the paper then falls
  back to one worker, however late its first token).
- Pipelines use only nodes whose engine serves stages.
- A stage prefers a GPU that could hold the whole model, since consolidation makes it grow there.
- A copy that will sleep is one worker, since no pipeline sleeps.
- A model of several GPUs starts whole, on the node that is ready soonest, unless `allocation.pipeline_over_tensor`.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from glowplug.domain.hardware import Node
from glowplug.fleet.node_index import IndexedNodes, NodeMemory
from glowplug.fleet.start_times import StartKind
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement import serverlessllm
from glowplug.policies.placement.dormant import clear, gives_way, grow
from glowplug.policies.placement.expect import offer_of, stage_seconds
from glowplug.policies.placement.first_fit import fit
from glowplug.policies.placement.hydraserve_allocation import (
    AS_SOON,
    AllocationParams,
    ColdStart,
    ServerOffer,
    StageLayout,
    allocate,
    seeks_soonest,
)
from glowplug.policies.placement.links import gpu_kind_of, has_copy_on_disk
from glowplug.policies.placement.port import PlacementView, PlaceRequest, reads_seconds
from glowplug.policies.placement.shape import bytes_per_gpu, free_bytes, stage_bytes

ENDLESS = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraserveParams:
    allocation: AllocationParams = field(default_factory=AllocationParams)
    clear: bool = False  # replicas may be dropped for a start (the union)


@reads_seconds
def place(request: PlaceRequest, view: PlacementView, params: HydraserveParams = HydraserveParams()) -> PlaceDecision:
    return grow(request, view) or lay_out(request, view, params)


def lay_out(request: PlaceRequest, view: PlacementView, params: HydraserveParams) -> PlaceDecision:
    """Lay out a start without a copy. One that fits nowhere is refused as such, however late it would be."""
    if request.is_to_sleep:
        params = replace(params, allocation=replace(params.allocation, max_stages=1))
    model, fleet, allocation = request.model, view.fleet, params.allocation
    if model.num_gpus > 1 and not allocation.pipeline_over_tensor:
        return serverlessllm.place(request, view)
    needs = [bytes_per_gpu(model, num) for num in range(1, allocation.max_stages + 1)]
    able = _able(needs, request, view, params)
    staged = {node.node_id for node, _ in able if node.can(model.engine, "stages")}
    by_stages = _fits_as_stages(request, [_nth_free(o, model.num_gpus) for n, o in able if n.node_id in staged], params)
    if not by_stages and not any(_nth_free(offered, model.num_gpus) >= needs[0] for _, offered in able):
        return fit(model, fleet)
    start = _cold_start(request, view, params)
    cached = _able(needs[:1], request, view, params, only=fleet.holders(model))
    alone = replace(allocation, max_stages=1, check_contention=False)
    layout = allocate(start, _offers(cached, request, view, params, is_cached=True), view.now_s, alone)
    if layout is None:
        layout = _spread(start, _offers(able, request, view, params), staged, request, view, params)
    if layout is not None:
        return _as_stages(layout, request, view, params)
    refusal = fit(model, fleet)
    if refusal.stages or not by_stages:
        return refusal
    return replace(refusal, is_late=True, reason=f"{refusal.reason}, and a start in stages would be late")


def _cold_start(request: PlaceRequest, view: PlacementView, params: HydraserveParams) -> ColdStart:
    model = request.model
    first = next((n for n in view.fleet if not n.draining and model.engine in n.engines), None)
    gpu_kind = gpu_kind_of(first) if first else ""  # per offer where nodes differ
    stages = stage_seconds(model, gpu_kind, view, StartKind.COLD)
    warm_tpot_s = stages.decode_s + stages.hop_s * params.allocation.max_stages
    return ColdStart(
        weight_bytes=model.weights_bytes,
        file_bytes=model.fetch_bytes,
        kv_bytes=model.kv_bytes,
        slo_ttft_s=model.slo.ttft_s or ENDLESS,
        slo_tpot_s=max(model.slo.tpot_s, warm_tpot_s) if model.slo.tpot_s else ENDLESS,
        stages=stages,
        waited_s=request.waited_s,
        num_required=request.num_required,
        is_awaited=request.is_awaited,
        num_gpus=model.num_gpus,
        parts={
            number: parts
            for number in range(2, params.allocation.max_stages + 1)
            if (parts := view.parts(model, number))
        },
    )


def _spread(
    start: ColdStart,
    offers: Sequence[ServerOffer],
    staged: Set[str],
    request: PlaceRequest,
    view: PlacementView,
    params: HydraserveParams,
) -> StageLayout | None:
    single = allocate(start, offers, view.now_s, replace(params.allocation, max_stages=1))
    by_time = seeks_soonest(start, params.allocation)
    if single is not None and single.meets_slo and start.num_required <= 1 and not by_time:
        return single
    if view.fleet.num_able(request.model.engine, "stages") < 2 or params.allocation.max_stages < 2:
        return single
    pipeline = allocate(start, [o for o in offers if o.node_id in staged], view.now_s, params.allocation)
    is_choice = by_time and start.num_required <= 1
    if is_choice and single is not None and pipeline is not None and single.ttft_s <= AS_SOON * pipeline.ttft_s:
        return single
    return pipeline if pipeline is not None and (pipeline.meets_slo or single is None) else single


def _fits_as_stages(request: PlaceRequest, free: Sequence[int], params: HydraserveParams) -> bool:
    """Return whether some number of equal stages fits, one per server, in time or not."""
    free, most = sorted(free, reverse=True), min(params.allocation.max_stages, len(free))
    return any(free[num - 1] * num >= bytes_per_gpu(request.model) for num in range(2, most + 1))


@dataclass(frozen=True, slots=True)
class _Open:
    """One node's GPUs with enough bytes for a stage after drops (gpu_id, bytes)."""

    gpus: tuple[tuple[str, int], ...]
    lost: Mapping[str, float]


def _nth_free(open_gpus: _Open, num_gpus: int) -> int:
    return sorted((free for _, free in open_gpus.gpus), reverse=True)[num_gpus - 1]


def _able(
    needs: Sequence[int],
    request: PlaceRequest,
    view: PlacementView,
    params: HydraserveParams,
    *,
    only: Set[str] | None = None,
) -> list[tuple[Node, _Open]]:
    model, fleet, allocation = request.model, view.fleet, params.allocation
    num_ranked = max(2 * allocation.max_stages, allocation.max_rivals)  # all that a layout or its rivals may name
    drops = "bare" if params.clear else ""
    num_gpus = model.num_gpus

    def loses(known: NodeMemory) -> float:
        here = _open(known.node, min(needs), 0, fleet, params)
        return sum(sorted(here.lost.get(gpu_id, 0.0) for gpu_id, _ in here.gpus)[:num_gpus])

    apart = {*view.links, *fleet.disk_holders(model)}
    near = fleet.candidates(needs, num_gpus, model.engine, num_ranked, drops=drops, loses=loses, busy=apart, only=only)
    whole = bytes_per_gpu(model)
    least = whole if fleet.could_hold(whole, model.num_gpus, model.engine, even_draining=False) else 0
    found = ((node, _open(node, min(needs), least, fleet, params)) for node in near)
    return [(node, open_gpus) for node, open_gpus in found if len(open_gpus.gpus) >= model.num_gpus]


def _open(node: Node, need: int, least_total: int, fleet: IndexedNodes, params: HydraserveParams) -> _Open:
    here = fleet.dormant.get(node.node_id, ()) if params.clear else ()
    ids = {row.instance_id for row in here if gives_way(row)}
    gpus, lost = [], {}
    for gpu in node.gpus:
        if gpu.total_bytes < least_total:
            continue
        free = free_bytes(gpu, fleet.reserved)
        if here:
            copies = [g for g in gpu.grants if g.holder in ids]
            free += gpu.freed_by(ids) if copies else 0
            lost[gpu.gpu_id] = sum(fleet.scores.get(g.holder, 0.0) for g in copies)
        if free >= need:
            gpus.append((gpu.gpu_id, free))
    return _Open(tuple(gpus), lost)


def _offers(
    able: Iterable[tuple[Node, _Open]],
    request: PlaceRequest,
    view: PlacementView,
    params: HydraserveParams,
    *,
    is_cached: bool = False,
) -> list[ServerOffer]:
    reserved, model = view.fleet.reserved, request.model

    def kind_at(node: Node) -> StartKind:
        if is_cached:
            return StartKind.CACHED
        return StartKind.DISK if has_copy_on_disk(node, model) else StartKind.COLD

    found = [(node, open_gpus, kind_at(node)) for node, open_gpus in able]
    alike = {(gpu_kind_of(node), kind) for node, _, kind in found}
    stages = {(gpu_kind, kind): stage_seconds(model, gpu_kind, view, kind) for gpu_kind, kind in alike}
    return [
        replace(
            offer_of(node, model, view, kind, stages[gpu_kind_of(node), kind]),
            gpus=open_gpus.gpus,
            empty_gpus=frozenset(g.gpu_id for g in node.gpus if not g.grants and not reserved.get(g.gpu_id)),
            lost=open_gpus.lost,
        )
        for node, open_gpus, kind in found
    ]


def _as_stages(
    layout: StageLayout, request: PlaceRequest, view: PlacementView, params: HydraserveParams
) -> PlaceDecision:
    model, fleet, num_stages = request.model, view.fleet, layout.num_stages
    stages, drops = [], list[str]()
    parts = view.parts(model, num_stages)
    for number, worker in enumerate(layout.workers):
        need = bytes_per_gpu(model) if num_stages == 1 else worker.num_bytes
        first, last = stage_bytes(model, number, num_stages)
        stages.append(
            StageDecision(
                node_id=worker.node_id,
                gpu_ids=worker.gpu_ids,
                bytes_per_gpu=need,
                first_byte=first,
                fetch_bytes=(last or model.fetch_bytes) - first if num_stages > 1 else 0,
                part_bytes=parts[number] if parts else 0,
            )
        )
        node = fleet.node(worker.node_id) if params.clear else None
        by_id = {gpu.gpu_id: gpu for gpu in node.gpus} if node else {}
        for gpu_id in worker.gpu_ids if by_id else ():
            cleared = clear(by_id[gpu_id], need, fleet.dormant.get(worker.node_id, ()), view)
            drops += cleared.drops if cleared is not None else ()
    return PlaceDecision(
        stages=tuple(stages), drops=tuple(dict.fromkeys(drops)), reason=layout.reason, rivals=layout.rivals
    )
