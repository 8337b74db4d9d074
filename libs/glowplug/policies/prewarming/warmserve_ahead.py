"""What is prewarmed ahead of time, on GPUs whose instances drain, and what has to lie where it can be used now.

Paper: WarmServe section 4.1: GPUs that drain take replicas, "ensuring prewarming completion before the next
allocation". Algorithm 1 counts a replica there like any other. Departures, both of use where load returns within the
seconds that a drain takes:

- A start cannot use a replica under an instance that drains. So wishes are met where a start can use them first, and
  GPUs that drain take what finds no place there; else the only copy of a model lies under a drain while GPUs are idle.
- What drains keeps its own weights when it stops (section 4.1: the worker then holds "both the previously running model
  and the proactively loaded models"), so it counts as a replica of its model, and no second copy goes there.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain

from glowplug.domain.instance import Instance
from glowplug.policies.placement.node_index import IndexedNodes, NodeMemory
from glowplug.policies.placement.warmserve_evict_aware import PrewarmStep, ReplicaShape
from glowplug.policies.placement.warmserve_groups import Prewarmed, PrewarmNode
from glowplug.policies.placement.warmserve_view import replicas_on


def draining_gpus(fleet: IndexedNodes, draining: Collection[str]) -> frozenset[str]:
    """GPUs on which an instance drains."""
    if not draining:
        return frozenset()

    def here(known: NodeMemory) -> tuple[str, ...]:
        return tuple(g.gpu_id for g in known.node.gpus if any(grant.holder in draining for grant in g.grants))

    return frozenset(chain.from_iterable(fleet.answers("draining", here)))


def usable(nodes: Sequence[PrewarmNode], gpu_ids: Set[str]) -> list[PrewarmNode]:
    """The nodes as a start sees them: replicas on those GPUs count for no wish."""
    return [
        replace(n, replicas=tuple(replace(r, counts=not gpu_ids & set(r.gpu_ids)) for r in n.replicas)) for n in nodes
    ]


def after(
    nodes: Sequence[PrewarmNode],
    steps: Sequence[PrewarmStep],
    shapes: Mapping[str, ReplicaShape],
    finishing: Mapping[str, Sequence[Instance]],
) -> list[PrewarmNode]:
    """The nodes once these steps are taken and what drains has stopped: node_id -> what finishes there."""
    found = []
    for node in nodes:
        mine = [step for step in steps if step.node_id == node.node_id]
        gone = {replica_id for step in mine for replica_id in step.drop}
        there = [r for r in node.replicas if r.replica_id not in gone]
        coming = [
            Prewarmed(replica_id=f"~{at}", model_key=s.model_key, gpu_ids=s.gpu_ids, score=s.score, is_ready=False)
            for at, s in enumerate(mine)
        ]
        stays = (*replicas_on(finishing.get(node.node_id, ()), {}), *coming)
        there += [replace(replica, may_go=False) for replica in stays]
        free = dict(zip(node.gpu_ids, node.free_bytes, strict=True))
        for step in mine:
            for gpu_id in step.gpu_ids:
                free[gpu_id] -= shapes[step.model_key].bytes_per_gpu
        found.append(replace(node, free_bytes=tuple(max(0, n) for n in free.values()), replicas=tuple(there)))
    return found
