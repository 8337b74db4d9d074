"""Expected seconds of a start at its place: by stage, and to the first token.

All policies get the same figures, from `start_times` and the links' ledgers, for HydraServe's layouts, decisions,
agents and waiting clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.fleet.start_times import StageTimes, StartKind, kind_from, slowest
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.hydraserve_allocation import (
    AllocationParams,
    ServerOffer,
    StageSeconds,
    besides_s,
    ready_s,
)
from glowplug.policies.placement.links import (
    LinkLedger,
    declared_pcie,
    disk_rate,
    found_at,
    gpu_kind_of,
    link_of,
    pcie_rate,
    settle,
)
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu

STREAMS = "stream"  # of loading weights while they arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One expected start. `by_phase`: per stage, phase -> seconds."""

    kind: StartKind
    start_s: float  # from the command to READY
    ttft_s: float  # ... to the first token of a waiting request
    by_phase: tuple[Mapping[str, float], ...]
    slowdown: float = 1.0  # of its nodes' cores, which the figures include


def expect(decision: PlaceDecision, request: PlaceRequest, view: PlacementView) -> Expected | None:
    """Predict an ordered start; None if it is on no node of the view."""
    model = request.model
    nodes = {stage.node_id: node for stage in decision.stages if (node := view.fleet.node(stage.node_id)) is not None}
    if not decision.stages or any(stage.node_id not in nodes for stage in decision.stages):
        return None
    if decision.source:
        here = nodes[decision.node_id]
        kind, grown = _growth(decision, model, here, view)
        ttft_s = grown.whole_s + view.first_tokens(model, warm_seconds(model, view).prefill_s)
        return Expected(
            kind=kind,
            start_s=grown.whole_s,
            ttft_s=ttft_s,
            by_phase=(grown.by_phase(),),
            slowdown=view.times.slowdown(model, here, kind),
        )
    found = [_stage(stage, len(decision.stages), model, nodes[stage.node_id], view) for stage in decision.stages]
    start_s = max(seconds for _, seconds, _ in found)
    num_full = sum(stage.bytes_per_gpu >= bytes_per_gpu(model) for stage in decision.stages)
    warm = warm_seconds(model, view)
    first_s = view.first_tokens(model, warm.prefill_s)
    after_s = besides_s(replace(warm, prefill_s=first_s), len(decision.stages), num_full)
    kinds = {kind for kind, _, _ in found}
    return Expected(
        kind=slowest(kinds),
        start_s=start_s,
        ttft_s=start_s + after_s,
        by_phase=tuple(phases for _, _, phases in found),
        slowdown=max(view.times.slowdown(model, node, found_at(node, model)) for node in nodes.values()),
    )


def warm_seconds(model: Model, view: PlacementView) -> StageSeconds:
    """Return warm inference: measured, else configured, else the engine's prior."""
    known = view.warm(model)
    if known is not None:
        return known
    return replace(view.start_stages, prefill_s=view.start_stages.prefill_s or view.times.prefill_s(model))


def stage_seconds(model: Model, gpu_kind: str, view: PlacementView, kind: StartKind) -> StageSeconds:
    """Return the terms of Eq. 5. Container and CUDA context are not measured apart."""
    took = view.times.predict(model, kind, gpu_kind)
    library_s = took.launch_s * view.times.library_share(model)
    return replace(
        warm_seconds(model, view),
        container_s=took.launch_s - library_s,
        cuda_s=0.0,
        library_s=library_s,
        warmup_s=took.warmup_s + took.rest_s,
        tail_s=view.times.tail_s(model, gpu_kind),
    )


def offer_of(
    node: Node, model: Model, view: PlacementView, kind: StartKind, stages: StageSeconds | None = None
) -> ServerOffer:
    """Return a node's rates and stages for that kind of start, without GPUs. `stages`: if known already."""
    gpu_kind, num_bytes = gpu_kind_of(node), model.fetch_bytes
    if kind is StartKind.CACHED:
        look_s = view.times.predict(model, kind, gpu_kind).fetch_s
        link = LinkLedger(bytes_per_s=num_bytes / look_s if look_s > 0 and num_bytes else float("inf"))
    elif kind is StartKind.DISK:
        link = LinkLedger(bytes_per_s=disk_rate(node, model, view.times))
    else:
        known = view.links.get(node.node_id)
        link = settle(link_of(node, model, view.times, known, view.now_s), view.now_s)
    return ServerOffer(
        node_id=node.node_id,
        link=link,
        pcie_bytes_per_s=pcie_rate(node, model, view.times),
        stages=stages or stage_seconds(model, gpu_kind, view, kind),
        streams=node.can(model.engine, STREAMS),
    )


def _growth(decision: PlaceDecision, model: Model, node: Node, view: PlacementView) -> tuple[StartKind, StageTimes]:
    rows = view.fleet.copies(model)
    source = next((row for row in rows if row.instance_id == decision.source), None)
    kind = kind_from(source.state) if source is not None else StartKind.GROWTH
    if kind is not StartKind.JOIN or source is None:
        return kind, _predict(model, kind, node, view)
    own = _predict(model, found_at(node, model), node, view)
    left_s = max(0.0, own.whole_s - (view.now_s - source.created_at))
    grown = _predict(model, StartKind.GROWTH, node, view)
    return kind, replace(grown, load_s=left_s + grown.load_s)


def _predict(model: Model, kind: StartKind, node: Node, view: PlacementView) -> StageTimes:
    return view.times.predict(model, kind, gpu_kind_of(node), declared_pcie(node)).slowed(
        view.times.slowdown(model, node, kind)
    )


def _slowed(offer: ServerOffer, by: float) -> ServerOffer:
    """Return the offer of a node whose cores are `by` times as slow; loads wait for them too."""
    took = offer.stages
    if by == 1 or took is None:
        return offer
    names = ("container_s", "cuda_s", "library_s", "warmup_s", "tail_s")
    stages = replace(took, **{name: getattr(took, name) * by for name in names})
    return replace(offer, stages=stages, pcie_bytes_per_s=offer.pcie_bytes_per_s / by)


def _stage(
    stage: StageDecision, num_stages: int, model: Model, node: Node, view: PlacementView
) -> tuple[StartKind, float, Mapping[str, float]]:
    kind = found_at(node, model)
    offer = _slowed(offer_of(node, model, view, kind), view.times.slowdown(model, node, kind))
    part_bytes = stage.part_bytes or stage.fetch_bytes or model.fetch_bytes
    loaded = model.weights_bytes / num_stages
    if stage.part_bytes:
        loaded = model.weights_bytes * stage.part_bytes / model.fetch_bytes
    here = replace(
        _predict(model, kind, node, view),
        fetch_s=part_bytes / offer.link.share(),
        load_s=loaded / len(stage.gpu_ids) / offer.pcie_bytes_per_s,
    )
    assert offer.stages is not None
    if offer.streams:
        seconds = ready_s(offer.stages, part_bytes, offer, AllocationParams(), len(stage.gpu_ids))
        if offer.stages.tail_s and kind is not StartKind.CACHED:  # the load begins with the fetch and ends after it
            beside_s = here.fetch_s + offer.stages.tail_s - here.launch_s
            here = replace(here, load_s=max(here.load_s, beside_s))
    else:
        seconds = here.whole_s
    return kind, seconds, here.by_phase()
