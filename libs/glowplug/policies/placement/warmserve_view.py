"""Nodes in the terms of WarmServe's algorithms: which GPUs (bits of one node's) are free of running instances, and the
replicas on them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.policies.placement.node_index import IndexedNodes, NodeMemory
from glowplug.policies.placement.shape import free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewarmed:
    """One replica that lies on GPUs of one node, or is being loaded there."""

    replica_id: str
    model_key: str
    gpu_ids: tuple[str, ...]
    score: float = 0.0
    is_ready: bool = True
    counts: bool = True  # whether it fulfils a wish; False: no start could use it there
    bytes_per_gpu: int = 0  # bytes it holds; 0: as many as any replica of its model
    may_go: bool = True  # a plan may drop it; False for what drains or is only planned


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmNode:
    """One node's GPUs that may hold prewarmed weights: idle and universal ones, and dedicated ones that drain.

    `free_bytes` are the bytes each could take, in the order of `gpu_ids`; `draining` names the GPUs that still serve.
    """

    node_id: str
    gpu_ids: tuple[str, ...]
    free_bytes: tuple[int, ...]
    draining: frozenset[str] = frozenset()
    replicas: tuple[Prewarmed, ...] = ()
    engines: frozenset[str] | None = None  # engines whose replicas the node can hold; None: any

    def bits(self, gpu_ids: Sequence[str]) -> int:
        """A set of this node's GPUs as bits. GPUs that are not candidates count as bits past the last."""
        place = {gpu_id: at for at, gpu_id in enumerate(self.gpu_ids)}
        beyond = len(self.gpu_ids)
        return sum(1 << place.get(gpu_id, beyond + at) for at, gpu_id in enumerate(gpu_ids))


@lru_cache(maxsize=256)
def groups_of(num_gpus: int, size: int) -> tuple[int, ...]:
    """Every set of `size` out of `num_gpus` GPUs, as bits, lowest GPUs first."""
    return tuple(sum(1 << at for at in chosen) for chosen in combinations(range(num_gpus), size))


def is_nested_or_disjoint(one: int, other: int) -> bool:
    """Return whether two GPU sets share nothing, or one contains the other (WarmServe's first guideline)."""
    common = one & other
    return common in (0, one, other)


def members(bits: int) -> Iterator[int]:
    """Positions of the set bits."""
    at = 0
    while bits:
        if bits & 1:
            yield at
        bits >>= 1
        at += 1


def serving_gpus(
    node: Node, here: Sequence[Instance], reserved: Mapping[str, int], besides: Collection[str] = ()
) -> frozenset[str]:
    """GPUs of one node on which bytes are held by or promised to anything but the replicas `here`. Holders in `besides`
    (instances that drain) do not count."""
    copies = {row.instance_id: row for row in here}
    return frozenset(gpu.gpu_id for gpu in node.gpus if _serves(gpu, copies, reserved, besides))


def _serves(gpu: Gpu, copies: Mapping[str, Instance], reserved: Mapping[str, int], besides: Collection[str]) -> bool:
    held = set()
    for grant in gpu.grants:
        if grant.holder not in copies and grant.holder not in besides:
            return True
        held.add(grant.holder)
    promised = reserved.get(gpu.gpu_id, 0)
    if promised:
        for replica_id, row in copies.items():
            if replica_id not in held and not row.state.is_dormant:
                promised -= sum(w.num_bytes for w in row.workers if w.gpu_id == gpu.gpu_id)
    return promised > 0


def _that_may_go(node: Node, replicas: tuple[Prewarmed, ...]) -> tuple[Prewarmed, ...]:
    """The replicas, with `may_go` False for those whose weights others on the GPU read too: dropping such a one frees
    nothing."""
    shared = [weights for gpu in node.gpus for weights in gpu.shared if weights.counts]
    kept = {holder for weights in shared for holder in weights.holders}
    return (
        tuple(replace(one, may_go=False) if one.replica_id in kept else one for one in replicas) if kept else replicas
    )


def replicas_on(here: Iterable[Instance], scores: Mapping[str, float]) -> tuple[Prewarmed, ...]:
    """Replicas with weights on GPUs, or being loaded there; engines asleep are none."""
    return tuple(
        Prewarmed(
            replica_id=row.instance_id,
            model_key=row.model_key,
            gpu_ids=tuple(w.gpu_id for w in row.workers),
            score=scores.get(row.instance_id, 0.0),
            is_ready=row.state is InstanceState.PREWARMED,
        )
        for row in here
        if row.state is not InstanceState.SWAPPED_OUT
    )


def start_nodes(model: Model, need: int, fleet: IndexedNodes) -> Iterator[PrewarmNode]:
    """Nodes where an instance may start, by id: GPUs that serve, or could never hold `need` bytes, are marked as
    `draining`."""
    key, engine, num_gpus = model.key, model.engine, model.num_gpus

    def serving(known: NodeMemory) -> tuple[Node, frozenset[str]]:
        return known.node, serving_gpus(known.node, known.rows, fleet.reserved)

    for node, closed in fleet.answers("serving", serving):
        if node.draining or engine not in node.engines:
            continue
        closed = closed | {g.gpu_id for g in node.gpus if g.total_bytes < need}
        if len(node.gpus) - len(closed) < num_gpus:
            continue
        here = fleet.dormant.get(node.node_id, ())
        mine = tuple(row for row in here if row.model_key != key or model.is_declared_as(row.model_revision))
        yield PrewarmNode(
            node_id=node.node_id,
            gpu_ids=tuple(gpu.gpu_id for gpu in node.gpus),
            free_bytes=(),
            draining=closed,
            replicas=replicas_on(mine, fleet.scores) if mine else (),
        )


def prewarm_nodes(fleet: IndexedNodes, draining: Collection[str], *, is_ahead: bool) -> Iterator[PrewarmNode]:
    """Nodes where replicas may be prewarmed: idle and universal GPUs, and, when planning ahead, those whose instances
    all drain (section 4.1)."""

    def seen(known: NodeMemory) -> PrewarmNode | None:
        node, here, besides = known.node, known.rows, draining if is_ahead else ()
        if node.draining:
            return None
        closed = serving_gpus(node, here, fleet.reserved, besides)
        gpus = [gpu for gpu in node.gpus if gpu.gpu_id not in closed]
        if not gpus and not here:  # a node with a replica counts without free GPUs
            return None
        return PrewarmNode(
            node_id=node.node_id,
            gpu_ids=tuple(gpu.gpu_id for gpu in gpus),
            free_bytes=tuple(free_bytes(gpu, fleet.reserved) for gpu in gpus),
            draining=frozenset(g.gpu_id for g in gpus if any(grant.holder in besides for grant in g.grants)),
            replicas=_that_may_go(node, replicas_on(here, {})),
            engines=frozenset(e for e in node.engines if node.can(e, "prewarm")),
        )

    return (found for found in fleet.answers(("prewarm", is_ahead), seen) if found is not None)
