"""Nodes as WarmServe's algorithms see them: which GPUs are free of running instances, and the replicas on them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.policies.placement.shape import room_of
from glowplug.policies.placement.warmserve_groups import Prewarmed, PrewarmNode


def serving_gpus(
    node: Node, here: Sequence[Instance], reserved: Mapping[str, int], besides: Collection[str] = ()
) -> frozenset[str]:
    """GPUs of one node on which something else than replicas `here` holds bytes or is promised them. Holders in
    `besides` (instances that drain) do not count."""
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


def replicas_on(here: Iterable[Instance], scores: Mapping[str, float]) -> tuple[Prewarmed, ...]:
    """Weights on GPUs, or on their way there; engines asleep outside them are none."""
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


def start_nodes(
    model: Model,
    need: int,
    nodes: Iterable[Node],
    dormant: Mapping[str, Sequence[Instance]],
    reserved: Mapping[str, int],
    scores: Mapping[str, float],
) -> Iterator[PrewarmNode]:
    """Where an instance may start: GPUs that serve, or could never hold `need` bytes, are marked (as `draining`)."""
    for node in nodes:
        if node.draining or model.engine not in node.engines:
            continue
        here = dormant.get(node.node_id, ())
        closed = serving_gpus(node, here, reserved) | {g.gpu_id for g in node.gpus if g.total_bytes < need}
        if len(node.gpus) - len(closed) < model.num_gpus:
            continue
        mine = tuple(row for row in here if row.model_key != model.key or row.model_revision in (0, model.revision))
        yield PrewarmNode(
            node_id=node.node_id,
            gpu_ids=tuple(gpu.gpu_id for gpu in node.gpus),
            free_bytes=(),
            draining=closed,
            replicas=replicas_on(mine, scores) if mine else (),
        )


def prewarm_nodes(
    nodes: Iterable[Node],
    dormant: Mapping[str, Sequence[Instance]],
    reserved: Mapping[str, int],
    scores: Mapping[str, float],
    draining: Collection[str],
) -> Iterator[PrewarmNode]:
    """Where replicas may be prewarmed: idle and universal GPUs, and those whose instances all drain (section 4.1)."""
    for node in nodes:
        if node.draining:
            continue
        here = dormant.get(node.node_id, ())
        closed = serving_gpus(node, here, reserved, draining)
        gpus = [gpu for gpu in node.gpus if gpu.gpu_id not in closed]
        if gpus or here:  # a replica counts wherever it lies
            yield PrewarmNode(
                node_id=node.node_id,
                gpu_ids=tuple(gpu.gpu_id for gpu in gpus),
                free_bytes=tuple(room_of(gpu, reserved) for gpu in gpus),
                draining=frozenset(g.gpu_id for g in gpus if any(grant.holder in draining for grant in g.grants)),
                replicas=replicas_on(here, scores),
                engines=frozenset(e for e in node.engines if node.can(e, "prewarm")),
            )
