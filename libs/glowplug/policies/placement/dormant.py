"""Dormant copies in a placement: growing an instance from its model's copy, and dropping other models' replicas.

A dropped replica's bytes are free at once (WarmServe section 4.2, page remapping), while evicting a running engine
costs a drain. The dropped replicas have the least sum of scores (WarmServe section 5.2, last paragraph).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from glowplug.domain.decision import Rival
from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.phrasing import counted
from glowplug.domain.units import show_bytes
from glowplug.fleet.node_index import NodeMemory
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu, free_bytes
from glowplug.policies.placement.warmserve_evict_aware import LOST_UNIT

MAX_RIVALS = 32


@dataclass(frozen=True, slots=True)
class Clearing:
    """One GPU after `drops`: its free bytes, and the dropped replicas' worth."""

    gpu_id: str
    free: int
    drops: tuple[str, ...] = ()
    lost: float = 0.0

    @property
    def cost(self) -> tuple[float, int, str]:
        return (self.lost, len(self.drops), self.gpu_id)


def copies_of(request: PlaceRequest, view: PlacementView) -> list[Instance]:
    """Return dormant rows of the declared revision to grow from, by id."""
    model = request.model
    return sorted(
        (row for row in view.fleet.copies(model) if row.engine == model.engine and len(row.workers) == model.num_gpus),
        key=lambda row: row.instance_id,
    )


def grow(request: PlaceRequest, view: PlacementView) -> PlaceDecision | None:
    """Choose the dormant copy to grow from, dropping others if needed: prewarmed, else asleep, else being prewarmed;
    then least cost."""
    copies = copies_of(request, view)
    if not copies:
        return None
    found: list[tuple[tuple[int, float, int, str], Instance, list[Clearing]]] = []
    rivals: list[Rival] = []
    for row in copies:
        node = view.fleet.node(row.node_id)
        cleared = _cleared(row, node, request, view) if node is not None and not node.draining else None
        if cleared is None:
            rivals.append(
                Rival(name=row.instance_id, score=0.0, why="there is not enough free memory beside it", unit=LOST_UNIT)
            )
            continue
        drops = dropped(cleared)
        lost = sum(view.fleet.scores.get(d, 0.0) for d in drops)
        rung, is_there, _ = _RUNGS.get(row.state, _COMING)
        order = (rung, lost, len(drops), row.instance_id)
        why = f"it is {is_there}{giving_way(len(drops))}"
        rivals.append(Rival(name=row.instance_id, score=lost, why=why, unit=LOST_UNIT))
        found.append((order, row, cleared))
    if not found:
        return None
    _, row, cleared = min(found, key=lambda entry: entry[0])
    grown = taking(row.node_id, cleared, request.model, _RUNGS.get(row.state, _COMING)[2])
    return replace(grown, source=row.instance_id, rivals=tuple(rivals[:MAX_RIVALS]))


def with_drops(request: PlaceRequest, view: PlacementView) -> PlaceDecision | None:
    """Choose a place without a copy by dropping replicas: least sum of scores, fewest drops, first node."""
    model = request.model
    nodes = view.fleet.among(view.fleet.dormant, bytes_per_gpu(model), model.num_gpus, model.engine)
    options = []
    for node, cleared in cheapest_on(nodes, model, view):
        drops = dropped(cleared)
        options.append((sum(view.fleet.scores.get(d, 0.0) for d in drops), len(drops), node.node_id, cleared))
    if not options:
        return None
    _, num_drops, node_id, cleared = min(options, key=lambda option: option[:3])
    once = f"{counted(num_drops, 'replica')} of other models {'gives' if num_drops == 1 else 'give'} way"
    reason = f"{show_bytes(bytes_per_gpu(model))} are free there once {once}"
    return taking(node_id, sorted(cleared, key=lambda c: c.gpu_id), model, reason)


def taking(node_id: str, cleared: Sequence[Clearing], model: Model, reason: str) -> PlaceDecision:
    gpu_ids = tuple(one.gpu_id for one in cleared)
    stage = StageDecision(node_id=node_id, gpu_ids=gpu_ids, bytes_per_gpu=bytes_per_gpu(model))
    return PlaceDecision(stages=(stage,), drops=dropped(cleared), reason=reason)


def cheapest(known: NodeMemory, model: Model, view: PlacementView) -> list[Clearing]:
    """Return the cheapest GPUs; fewer than needed if the model does not fit."""
    options = (clear(gpu, bytes_per_gpu(model), known.rows, view) for gpu in known.node.gpus)
    return sorted((one for one in options if one is not None), key=lambda one: one.cost)[: model.num_gpus]


def cheapest_on(nodes: Sequence[Node], model: Model, view: PlacementView) -> Iterator[tuple[Node, list[Clearing]]]:
    question = ("cheapest", bytes_per_gpu(model), model.num_gpus)
    found = view.fleet.answers(question, lambda known: cheapest(known, model, view), nodes)
    return ((node, one) for node, one in zip(nodes, found, strict=True) if len(one) == model.num_gpus)


def clear(
    gpu: Gpu, need: int, here: Sequence[Instance], view: PlacementView, *, keep: str = "", extra: int = 0
) -> Clearing | None:
    """Clear `need` bytes on the GPU, least-worth replicas first and none needlessly, or return None. `keep` stays, and
    its `extra` bytes count as free."""
    at_once = free = free_bytes(gpu, view.fleet.reserved) + extra
    if free >= need:
        return Clearing(gpu.gpu_id, free)
    held = {g.holder for g in gpu.grants}
    may_go = sorted(
        (row for row in here if row.instance_id in held and row.instance_id != keep and gives_way(row)),
        key=lambda row: (view.fleet.scores.get(row.instance_id, 0.0), row.instance_id),
    )
    dropped: list[Instance] = []
    for row in may_go:
        if free >= need:
            break
        dropped.append(row)
        free = at_once + gpu.freed_by([r.instance_id for r in dropped])
    if free < need:
        return None
    for row in sorted(dropped, key=lambda r: -view.fleet.scores.get(r.instance_id, 0.0)):
        without = at_once + gpu.freed_by([r.instance_id for r in dropped if r is not row])
        if without >= need:  # a larger one dropped later is enough
            free = without
            dropped.remove(row)
    lost = sum(view.fleet.scores.get(row.instance_id, 0.0) for row in dropped)
    return Clearing(gpu.gpu_id, free, tuple(row.instance_id for row in dropped), lost)


def gives_way(row: Instance) -> bool:
    """Return whether dropping the row frees bytes; a sleeping engine holds none on the GPU."""
    return row.state is not InstanceState.SWAPPED_OUT


def _cleared(row: Instance, node: Node, request: PlaceRequest, view: PlacementView) -> list[Clearing] | None:
    need, by_id = bytes_per_gpu(request.model), {gpu.gpu_id: gpu for gpu in node.gpus}
    here, cleared = view.fleet.dormant.get(node.node_id, ()), []
    for worker in row.workers:
        gpu = by_id.get(worker.gpu_id)
        if gpu is None:
            return None
        own = sum(g.num_bytes for g in gpu.grants if g.holder == row.instance_id)
        one = clear(gpu, need, here, view, keep=row.instance_id, extra=own)
        if one is None:
            return None
        cleared.append(one)
    return cleared


def dropped(cleared: Iterable[Clearing]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(drop for one in cleared for drop in one.drops))


def giving_way(num_lost: int) -> str:
    verb = "gives" if num_lost == 1 else "give"
    return f", and {counted(num_lost, 'other replica')} {verb} way" if num_lost else ""


_RUNGS = {  # state of a copy -> its rung, and words for it
    InstanceState.PREWARMED: (0, "prewarmed", "a copy of its weights is prewarmed there"),
    InstanceState.SWAPPED_OUT: (1, "asleep", "its engine sleeps there and is woken"),
}
_COMING = (2, "being prewarmed", "a copy of its weights is on its way there")
