"""Place prewarmed replicas with regard to the ones they would displace.

Paper: WarmServe section 5.2, Algorithm 1. A replica needs D GPUs of one server with S/D free bytes each; the GPU sets
of two models are nested or disjoint. Among the groups whose replicas all score less than the newcomer, the one with the
least sum of scores is taken; if there is none, the one with the least sum of all.

Departures, all as in the published code or needed by it (errata E9, E10):
- Existing replicas take the first of their model's scores, in order of their ids; extras score 0.
- A GPU never holds two replicas of one model.
- Replicas that score 0 are dropped when a wish fits nowhere, an extension that the code leaves as a TODO.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from itertools import chain, combinations
from typing import Final, Literal

from glowplug.domain.bounds import Count, Positive
from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.fleet.node_index import IndexedNodes, NodeMemory
from glowplug.policies.placement.shape import free_bytes

# Nodes in WarmServe's terms; GPU sets are bits of one node's.


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewarmed:
    replica_id: str
    model_key: str
    gpu_ids: tuple[str, ...]
    score: float = 0.0
    is_ready: bool = True
    counts: bool = True  # for a wish; False: no start could use it there
    bytes_per_gpu: int = 0  # 0: as any replica of its model
    may_go: bool = True  # False if it drains or is only planned


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmNode:
    """One node's GPUs for prewarmed weights: idle and universal ones, and dedicated ones that drain. `free_bytes`
    follows `gpu_ids`; `draining` GPUs still serve."""

    node_id: str
    gpu_ids: tuple[str, ...]
    free_bytes: tuple[int, ...]
    draining: frozenset[str] = frozenset()
    replicas: tuple[Prewarmed, ...] = ()
    engines: frozenset[str] | None = None  # None: any

    def bits(self, gpu_ids: Sequence[str]) -> int:
        """Return a set of GPUs as bits; unknown ones become bits past the last."""
        place = {gpu_id: at for at, gpu_id in enumerate(self.gpu_ids)}
        beyond = len(self.gpu_ids)
        return sum(1 << place.get(gpu_id, beyond + at) for at, gpu_id in enumerate(gpu_ids))


@lru_cache(maxsize=256)
def groups_of(num_gpus: int, size: int) -> tuple[int, ...]:
    return tuple(sum(1 << at for at in chosen) for chosen in combinations(range(num_gpus), size))


def is_nested_or_disjoint(one: int, other: int) -> bool:
    common = one & other
    return common in (0, one, other)


def members(bits: int) -> Iterator[int]:
    at = 0
    while bits:
        if bits & 1:
            yield at
        bits >>= 1
        at += 1


def serving_gpus(
    node: Node, here: Sequence[Instance], reserved: Mapping[str, int], besides: Collection[str] = ()
) -> frozenset[str]:
    """Return the node's GPUs with bytes held by or promised to others than the replicas `here` and `besides` (draining
    instances)."""
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
    """Keep replicas whose weights others on the GPU share: dropping them frees nothing."""
    shared = [weights for gpu in node.gpus for weights in gpu.shared if weights.counts]
    kept = {holder for weights in shared for holder in weights.holders}
    return (
        tuple(replace(one, may_go=False) if one.replica_id in kept else one for one in replicas) if kept else replicas
    )


def replicas_on(here: Iterable[Instance], scores: Mapping[str, float]) -> tuple[Prewarmed, ...]:
    """Return replicas on GPUs, or being loaded there, without sleeping engines."""
    return tuple(
        Prewarmed(
            replica_id=row.instance_id,
            model_key=row.model_key,
            gpu_ids=tuple(w.gpu_id for w in row.workers),
            score=scores.get(row.instance_id, 0.0),
            is_ready=row.state is InstanceState.PREWARMED,
            bytes_per_gpu=row.workers[0].num_bytes if row.workers else 0,
        )
        for row in here
        if row.state is not InstanceState.SWAPPED_OUT
    )


def start_nodes(model: Model, need: int, fleet: IndexedNodes) -> Iterator[PrewarmNode]:
    """Yield nodes for a start, by id; GPUs that serve, or are smaller than `need` bytes, count as `draining`."""
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
        mine = tuple(row for row in here if row.model_key != key or not row.is_outdated(model))
        yield PrewarmNode(
            node_id=node.node_id,
            gpu_ids=tuple(gpu.gpu_id for gpu in node.gpus),
            free_bytes=(),
            draining=closed,
            replicas=replicas_on(mine, fleet.scores) if mine else (),
        )


def prewarm_nodes(fleet: IndexedNodes, draining: Collection[str], *, is_ahead: bool) -> Iterator[PrewarmNode]:
    """Yield nodes with idle and universal GPUs, and, when planning ahead, those whose instances all drain (section
    4.1)."""

    def seen(known: NodeMemory) -> PrewarmNode | None:
        node, here, besides = known.node, known.rows, draining if is_ahead else ()
        if node.draining:
            return None
        closed = serving_gpus(node, here, fleet.reserved, besides)
        gpus = [gpu for gpu in node.gpus if gpu.gpu_id not in closed]
        if not gpus and not here:
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


# The number of replicas of each model to prewarm, and the worth of each.
#
# Paper: WarmServe section 5.2, Eq. 5-8, with L_A and L_P the predicted average and peak concurrency, B the batch size,
# K the active instances, T_c the seconds to load the weights, i the rank of a replica in its class:
#
#     N_basic = max(ceil(L_A / B) - K, 0)                                            (5)
#     N_burst = max(ceil(L_P / B) - N_basic - K, 0)                                  (6)
#     S_basic = exp(-i / (N_basic + N_burst)) T_c                                    (7)
#     S_burst = exp(-(N_basic + i) / (N_basic + N_burst)) T_c (L_P - L_A) / L_A      (8)
#
# Departures:
# - Eq. 8 divides by zero for a model that sleeps on average: L_A is floored at `min_average` (erratum E4). The
#   published code multiplies by L_P / L_A; `burst="ratio"` does that.
# - The factor (L_P - L_A) / L_A, unbounded in the paper, is at most `max_burst_factor`, so that one model that sleeps
#   on average and bursts does not outweigh the bursts of all others together.
# - "Basic replicas always have higher priorities than burst replicas": the order is (class, -score), where the
#   published code sorts by score alone (erratum E5; `class_first=False`).


class ReplicaClass(IntEnum):
    """Basic replicas serve the average load, burst ones the peak."""

    BASIC = 0
    BURST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmDemand:
    model_key: str
    concurrency_mean: float  # L_A
    concurrency_peak: float  # L_P
    max_concurrency: int  # B
    num_active: int  # K; draining instances do not count
    load_s: float  # T_c


SCORE_UNIT = "s of loading that it is expected to save"  # Eq. 7-8: T_c times a weight
LOST_UNIT = "s of loading expected for what gives way"  # of dropped replicas
MAX_REPLICAS = 1024  # per class and model: bounds absurd forecasts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWish:
    model_key: str
    kind: ReplicaClass
    rank: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreParams:
    burst: Literal["difference", "ratio"] = "difference"
    min_average: Positive = 0.05
    max_burst_factor: Positive = 100.0
    class_first: bool = True


def replicas(demands: Iterable[PrewarmDemand], params: ScoreParams = ScoreParams()) -> list[ReplicaWish]:
    """Return every replica worth prewarming, most valuable first; ties go by model key and rank."""
    ranked = sorted(chain.from_iterable(_of(demand, params) for demand in demands))
    return [wish for *_, wish in ranked]


_Ranked = tuple[int, float, str, int, int, ReplicaWish]


@lru_cache(maxsize=16384)
def _of(demand: PrewarmDemand, params: ScoreParams) -> tuple[_Ranked, ...]:
    average, peak = max(0.0, demand.concurrency_mean), max(0.0, demand.concurrency_peak)
    batch = max(1, demand.max_concurrency)
    num_basic = min(max(math.ceil(average / batch) - demand.num_active, 0), MAX_REPLICAS)
    num_burst = min(max(math.ceil(peak / batch) - num_basic - demand.num_active, 0), MAX_REPLICAS)
    total = num_basic + num_burst
    if not total:
        return ()
    factor = burst_factor(average, peak, params)
    kinds = [(ReplicaClass.BASIC, rank, 1.0) for rank in range(num_basic)]
    kinds += [(ReplicaClass.BURST, rank, factor) for rank in range(num_burst)]
    ranked: list[_Ranked] = []
    for at, (kind, rank, weight) in enumerate(kinds):
        score = math.exp(-at / total) * demand.load_s * weight
        wish = ReplicaWish(model_key=demand.model_key, kind=kind, rank=rank, score=score)
        ranked.append((kind if params.class_first else 0, -score, demand.model_key, kind, rank, wish))
    return tuple(ranked)


def burst_factor(average: float, peak: float, params: ScoreParams) -> float:
    floor = max(average, params.min_average)
    factor = peak / floor if params.burst == "ratio" else (peak - average) / floor
    return min(max(factor, 0.0), params.max_burst_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    num_gpus: int
    bytes_per_gpu: int
    engine: str = ""  # empty: any


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmStep:
    model_key: str
    node_id: str
    gpu_ids: tuple[str, ...]
    score: float
    drop: tuple[str, ...] = ()
    reason: str = ""
    bytes_per_gpu: int = 0  # 0: all weights


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictAwareParams:
    max_steps: Count = 1000


LESS_RATIO: Final = 0.5  # victims' worth over the newcomer's, which has to load


@dataclass(frozen=True, slots=True)
class _Group:
    lost: float
    bits: int
    highest: float
    models: frozenset[str]


@dataclass(slots=True)
class _Node:
    """`groups`: found per shape since the node's last step."""

    view: PrewarmNode
    free: list[int]
    held: list[tuple[int, Prewarmed]]
    groups: dict[ReplicaShape, Sequence[_Group]] = field(default_factory=dict)

    @classmethod
    def of(cls, view: PrewarmNode, scores: Mapping[str, float]) -> "_Node":
        worth = {r.replica_id: scores.get(r.replica_id, 0.0) for r in view.replicas}
        scored = (r if r.score == worth[r.replica_id] else replace(r, score=worth[r.replica_id]) for r in view.replicas)
        return cls(view, list(view.free_bytes), [(view.bits(r.gpu_ids), r) for r in scored])

    def has_stale(self, most: float) -> bool:
        return any(replica.score <= most and replica.may_go for _, replica in self.held)

    def groups_for(self, shape: ReplicaShape) -> Sequence[_Group]:
        """Return groups with enough memory, nested with or disjoint from each replica; least worth first."""
        known = self.groups.get(shape)
        if known is None:
            has_bytes = sum(1 << at for at, free in enumerate(self.free) if free >= shape.bytes_per_gpu)
            held = tuple((bits, replica.score, replica.model_key) for bits, replica in self.held)
            known = self.groups[shape] = _groups(len(self.free), shape.num_gpus, has_bytes, held)
        return known


@lru_cache(maxsize=8192)
def _groups(num_gpus: int, size: int, has_bytes: int, held: tuple[tuple[int, float, str], ...]) -> tuple[_Group, ...]:
    """`held`: bits, score, model of each replica."""
    found = []
    for bits in groups_of(num_gpus, size):
        if bits & has_bytes != bits:
            continue
        lost, highest, models = 0.0, -1.0, []
        for other, score, model_key in held:
            common = other & bits
            if common:
                if common != other and common != bits:
                    break
                lost += score
                highest = max(score, highest)
                models.append(model_key)
        else:
            found.append(_Group(lost, bits, highest, frozenset(models)))
            if not held:
                break  # groups are alike without replicas
    return tuple(sorted(found, key=lambda g: (g.lost, g.bits)))


@dataclass(frozen=True, slots=True)
class _Fit:
    beaten: bool  # every replica on the same GPUs scores less
    lost: float
    node_id: str
    bits: int
    drop: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[bool, float, int, str, int]:
        return (not self.beaten, self.lost, len(self.drop), self.node_id, self.bits)


def plan(
    wishes: Sequence[ReplicaWish],
    shapes: Mapping[str, ReplicaShape],
    nodes: Iterable[PrewarmNode],
    params: EvictAwareParams = EvictAwareParams(),
    worths: Mapping[str, float] | None = None,
) -> list[PrewarmStep]:
    """Plan replicas and their places. `wishes` are sorted (`replicas`); one without a shape or a place
    is skipped. With `worths`, existing replicas take their scores from it, and a wish that fits nowhere replaces
    replicas that together score less than half of it."""
    views = sorted(nodes, key=lambda n: n.node_id)
    scores, new = share_out(wishes, views)
    scores, ratio = (scores, 0.0) if worths is None else (dict(worths), LESS_RATIO)
    working: dict[str, _Node] = {}

    def able_to_hold(shape: ReplicaShape) -> Iterator[_Node]:
        for view in views:
            if not shape.engine or view.engines is None or shape.engine in view.engines:
                node = working.get(view.node_id)
                if node is None:
                    node = working[view.node_id] = _Node.of(view, scores)
                yield node

    sizes = {key: shape.bytes_per_gpu for key, shape in shapes.items()}
    steps: list[PrewarmStep] = []
    full: set[ReplicaShape] = set()
    for wish in new:
        shape = shapes.get(wish.model_key)
        if shape is None:
            continue
        if len(steps) >= params.max_steps:
            break
        found = None if shape in full else _best(able_to_hold(shape), wish, shape)
        if found is None and shape not in full and not any(node.groups_for(shape) for node in able_to_hold(shape)):
            full.add(shape)
        if found is None:
            most = ratio * wish.score
            stale = [_best_stale(n, wish, shape, sizes, most) for n in able_to_hold(shape) if n.has_stale(most)]
            found = min((fit for fit in stale if fit), key=lambda fit: fit.order, default=None)
            if found is not None:
                full.clear()
        if found is not None:
            steps.append(_take(working[found.node_id], wish, shape, sizes, found))
    return steps


def share_out(
    wishes: Sequence[ReplicaWish], nodes: Sequence[PrewarmNode]
) -> tuple[dict[str, float], list[ReplicaWish]]:
    there: dict[str, list[str]] = {}
    for node in nodes:
        for replica in node.replicas:
            if replica.counts:
                there.setdefault(replica.model_key, []).append(replica.replica_id)
    for ids in there.values():
        ids.sort(reverse=True)
    scores: dict[str, float] = {}
    still_open: list[ReplicaWish] = []
    for wish in wishes:
        if mine := there.get(wish.model_key):
            scores[mine.pop()] = wish.score
        else:
            still_open.append(wish)
    return scores, still_open


def _best(nodes: Iterable[_Node], wish: ReplicaWish, shape: ReplicaShape) -> _Fit | None:
    best: _Fit | None = None
    for node in nodes:
        tried = False  # a node's first group with a higher replica is its best
        for group in node.groups_for(shape):
            if best is not None and best.beaten and group.lost >= best.lost:
                break
            beaten = group.highest < wish.score
            if (tried and not beaten) or wish.model_key in group.models:
                continue
            tried = True
            fit = _Fit(beaten, group.lost, node.view.node_id, group.bits)
            if best is None or fit.order < best.order:
                best = fit
            if beaten:
                break
        if best is not None and best.beaten and best.lost == 0.0:
            break
    return best


def _best_stale(
    node: _Node, wish: ReplicaWish, shape: ReplicaShape, sizes: Mapping[str, int], most: float
) -> _Fit | None:
    fits = (_fit(node, wish, shape, bits, sizes, most) for bits in groups_of(len(node.free), shape.num_gpus))
    return min((fit for fit in fits if fit), key=lambda fit: fit.order, default=None)


def _fit(
    node: _Node, wish: ReplicaWish, shape: ReplicaShape, bits: int, sizes: Mapping[str, int], most: float
) -> _Fit | None:
    highest, lost, drop, given_up = -1.0, 0.0, [], 0.0
    for other, replica in node.held:
        if not other & bits:
            continue
        if replica.model_key == wish.model_key:
            return None
        if replica.may_go and given_up + replica.score <= most:
            drop.append(replica)
            given_up += replica.score
        elif not is_nested_or_disjoint(bits, other):
            return None
        else:
            highest, lost = max(highest, replica.score), lost + replica.score
    for at in members(bits):
        on_it = (r for r in drop if node.view.gpu_ids[at] in r.gpu_ids)
        freed = sum(_freed(r, sizes) for r in on_it)
        if node.free[at] + freed < shape.bytes_per_gpu:
            return None
    return _Fit(highest < wish.score, lost, node.view.node_id, bits, tuple(r.replica_id for r in drop))


def _freed(replica: Prewarmed, sizes: Mapping[str, int]) -> int:
    return replica.bytes_per_gpu or sizes.get(replica.model_key, 0)


def _take(node: _Node, wish: ReplicaWish, shape: ReplicaShape, sizes: Mapping[str, int], fit: _Fit) -> PrewarmStep:
    node.groups.clear()
    gone = set(fit.drop)
    for other, replica in node.held:
        if replica.replica_id in gone:
            for at in members(other):
                if at < len(node.free):
                    node.free[at] += _freed(replica, sizes)
    node.held = [(b, r) for b, r in node.held if r.replica_id not in gone]
    for at in members(fit.bits):
        node.free[at] -= shape.bytes_per_gpu
    gpu_ids = tuple(node.view.gpu_ids[at] for at in members(fit.bits))
    name = f"new {wish.model_key} {wish.kind.name.lower()} {wish.rank}"
    mine = Prewarmed(
        replica_id=name, model_key=wish.model_key, gpu_ids=gpu_ids, score=wish.score, is_ready=False, may_go=False
    )
    node.held.append((fit.bits, mine))
    load = "average" if wish.kind is ReplicaClass.BASIC else "highest"
    saves = f"it is expected to save {wish.score:.3g} s of loading"
    if fit.lost:
        over = "more than each copy there" if fit.beaten else "no more than those there"
        saves = f"{saves}: {over} (together {fit.lost:.3g} s)"
    reason = f"the {load} load that is expected needs it, and {saves}"
    return PrewarmStep(
        model_key=wish.model_key,
        node_id=node.view.node_id,
        gpu_ids=gpu_ids,
        score=wish.score,
        drop=fit.drop,
        reason=reason,
        bytes_per_gpu=shape.bytes_per_gpu,
    )
