"""The papers joined: a dormant copy before all, as WarmServe takes it; else HydraServe's layout of a cold start.

WarmServe decides which replicas there are and who of them gives way; HydraServe decides how a start without one is laid
out. Where several GPUs serve the layout alike, the one whose replicas are worth least is taken (WarmServe section 5.2's
scores). An engine asleep on a GPU is a copy too (SwapServeLLM section 4).

Departures: WarmServe gives an instance its GPUs for itself; here bytes decide, and no more replicas go than it takes.

Ours (docs/adr/0015): where instances of several GPUs live, a start takes the GPUs whose group is broken already, and
leaves a copy within the last free group of a larger model alone. Groups are aligned blocks of 2, 4, 8 GPUs of a node,
as Algorithm 1 has them; the rule is best fit of a buddy allocator.

HydraServe takes as few stages as meet the objectives. Without an objective for the first token any layout meets them,
and one worker fetches over one link while the others are idle; the union then takes the layout with the soonest one.
"""

from collections.abc import Iterable, Sequence

from glowplug.domain.hardware import GrantOwner, Node
from glowplug.policies.decisions import PlaceDecision
from glowplug.policies.placement.dormant import Clearing, clear, grow, taking
from glowplug.policies.placement.hydraserve import HydraserveParams, lay_out
from glowplug.policies.placement.hydraserve_allocation import AllocationParams
from glowplug.policies.placement.node_index import NodeMemory
from glowplug.policies.placement.port import PlacementView, PlaceRequest, reads_seconds
from glowplug.policies.placement.shape import bytes_per_gpu

PARAMS = HydraserveParams(clear=True, allocation=AllocationParams(soonest=True))


@reads_seconds
def place(request: PlaceRequest, view: PlacementView, params: HydraserveParams = PARAMS) -> PlaceDecision:
    """See hydraserve.place; replicas are grown from, or give way."""
    largest = max(request.model.num_gpus, view.fleet.largest_group())
    found = _compact(request, view, largest) if largest > 1 else grow(request, view)
    return found or lay_out(request, view, params)


def _compact(request: PlaceRequest, view: PlacementView, largest: int) -> PlaceDecision | None:
    """The copy, or the start from host memory, that breaks no group larger than it must."""

    def breaks(node: Node, gpu_ids: Sequence[str]) -> int:
        return broken(node, gpu_ids, view, largest)

    grown = grow(request, view, breaks)
    at = view.fleet.node(grown.node_id) if grown else None
    loss = breaks(at, grown.stages[0].gpu_ids) if grown and at else largest + 1
    if grown is not None and not loss:
        return grown
    started = fresh(request, view, largest)
    return started[1] if started is not None and started[0] < loss else grown


def broken(node: Node, gpu_ids: Iterable[str], view: PlacementView, largest: int) -> int:
    """GPUs of the largest block of at most `largest` that serves nobody and would no longer be whole; 0: none larger
    than what is taken."""
    at = {gpu.gpu_id: number for number, gpu in enumerate(node.gpus)}
    taken = {at[g] for g in gpu_ids if g in at}
    serving = {
        at[gpu.gpu_id]
        for gpu in node.gpus
        if view.fleet.reserved.get(gpu.gpu_id) or any(grant.owner is not GrantOwner.PREWARM for grant in gpu.grants)
    }
    size, worst = 1, 0
    while size < min(largest, len(node.gpus)):
        size *= 2
        for first in {number - number % size for number in taken}:
            block = set(range(first, min(first + size, len(node.gpus))))
            if len(block) == size and not block & serving and not block <= taken:
                worst = size
    return worst


def fresh(request: PlaceRequest, view: PlacementView, largest: int) -> tuple[int, PlaceDecision] | None:
    """A start of its own, from host memory, that breaks the smallest group: (what it breaks, where). None without."""
    model, need = request.model, bytes_per_gpu(request.model)
    num_gpus = model.num_gpus

    def best_here(known: NodeMemory) -> tuple[tuple[int, float, int, str], Node, list[Clearing]] | None:
        options = []
        for group in _groups([clear(gpu, need, known.rows, view) for gpu in known.node.gpus], num_gpus):
            gpu_ids = [one.gpu_id for one in group]
            lost, num_drops = sum(one.lost for one in group), sum(len(one.drops) for one in group)
            order = (broken(known.node, gpu_ids, view, largest), lost, num_drops, gpu_ids[0])
            options.append((order, known.node, group))
        return min(options, key=lambda option: option[0], default=None)

    nodes = view.fleet.caching(model, need, num_gpus)
    asked = view.fleet.answers(("fresh", need, num_gpus, largest), best_here, nodes)
    found = min((one for one in asked if one is not None), key=lambda one: one[0], default=None)
    if found is None:
        return None
    (loss, *_), node, group = found
    said = f"it breaks up a free group of {loss} GPUs" if loss else "it breaks up no free group of GPUs"
    return loss, taking(node.node_id, group, model, f"host memory has its weights there, and {said}")


def _groups(cleared: Sequence[Clearing | None], num: int) -> list[list[Clearing]]:
    """Aligned blocks of `num` GPUs with enough free memory; where there is none, the cheapest `num` of them."""
    blocks = []
    for first in range(0, len(cleared) - num + 1, num):
        block = [one for one in cleared[first : first + num] if one is not None]
        if len(block) == num:
            blocks.append(block)
    loose = sorted((one for one in cleared if one is not None), key=lambda one: one.cost)
    if blocks or len(loose) < num:
        return blocks
    return [sorted(loose[:num], key=lambda one: one.gpu_id)]
