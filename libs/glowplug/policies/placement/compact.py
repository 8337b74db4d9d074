"""Keeping large groups of GPUs whole: where instances of several GPUs live, a start takes the GPUs whose group is
broken already.

Ours, not a paper's. WarmServe (section 5.2) takes a prewarmed copy before all, even one that lies within the last free
group of a larger model: on its own workload a 70B on four GPUs then waits for minutes while small models come and go
around it. Groups are aligned blocks of 2, 4, 8 GPUs of a node, as Algorithm 1 has them; the rule is best fit of a
buddy allocator, and it does not apply where no instance or replica in sight has more than one GPU.
"""

from collections.abc import Iterable, Sequence

from glowplug.domain.hardware import Grant, GrantOwner, Node
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.dormant import Clearing, clear
from glowplug.policies.placement.node_index import NodeMemory
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu


def broken(node: Node, gpu_ids: Iterable[str], view: PlacementView, largest: int) -> int:
    """GPUs of the largest block of at most `largest` that serves nobody and would no longer be whole; 0: none larger
    than what is taken."""
    at = {gpu.gpu_id: number for number, gpu in enumerate(node.gpus)}
    taken = {at[g] for g in gpu_ids if g in at}
    serving = {
        number for number, gpu in enumerate(node.gpus) if _serves(gpu.grants) or view.fleet.reserved.get(gpu.gpu_id)
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
            options.append(
                ((broken(known.node, gpu_ids, view, largest), lost, num_drops, gpu_ids[0]), known.node, group)
            )
        return min(options, key=lambda option: option[0], default=None)

    nodes = view.fleet.caching(model, need, num_gpus)
    asked = view.fleet.answers(("fresh", need, num_gpus, largest), best_here, nodes)
    found = min((one for one in asked if one is not None), key=lambda one: one[0], default=None)
    if found is None:
        return None
    order, node, group = found
    stage = StageDecision(
        node_id=node.node_id, gpu_ids=tuple(one.gpu_id for one in group), bytes_per_gpu=bytes_per_gpu(model)
    )
    said = f"it breaks up a free group of {order[0]} GPUs" if order[0] else "it breaks up no free group of GPUs"
    drops = tuple(dict.fromkeys(drop for one in group for drop in one.drops))
    return order[0], PlaceDecision(
        stages=(stage,), drops=drops, reason=f"host memory has its weights there, and {said}"
    )


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


def _serves(grants: Iterable[Grant]) -> bool:
    return any(grant.owner not in (GrantOwner.PREWARM, GrantOwner.SLEEPER) for grant in grants)
