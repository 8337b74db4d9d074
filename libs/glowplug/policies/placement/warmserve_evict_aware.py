"""Evict-aware placement of prewarmed replicas.

Paper: WarmServe section 5.2, Algorithm 1. A replica needs D GPUs of one server with S/D free bytes each; the sets of
two models are nested or disjoint. Among the groups whose replicas all score less than the newcomer, the one with the
least sum of scores is taken; if there is none, the one with the least sum at all.

Departures, all as the published code or needed by it (errata E9, E10):
- Existing replicas take the first of their model's scores, in order of their ids; extras score 0.
- A GPU never holds two replicas of one model.
- Replicas that score 0 are dropped when a wish fits nowhere, an extension that the code leaves as a TODO.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from glowplug.policies.placement.warmserve_scores import ReplicaClass, ReplicaWish
from glowplug.policies.placement.warmserve_view import Prewarmed, PrewarmNode, groups_of, is_nested_or_disjoint, members


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShape:
    """The size of one replica of a model: GPUs of one node, and bytes on each."""

    num_gpus: int
    bytes_per_gpu: int
    engine: str = ""  # the engine that can hold the replica; empty: any


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmStep:
    """Prewarm one replica on these GPUs, after dropping replicas that are no longer wanted."""

    model_key: str
    node_id: str
    gpu_ids: tuple[str, ...]
    score: float
    drop: tuple[str, ...] = ()  # replica ids
    reason: str = ""
    bytes_per_gpu: int = 0  # bytes of the replica on each GPU; 0: all of its weights


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictAwareParams:
    max_steps: int = 1000


LESS_RATIO: Final = 0.5  # victims' worth over the newcomer's: a copy there serves at once, a new one has to load


@dataclass(frozen=True, slots=True)
class _Group:
    """GPUs with enough free memory, and the replicas they would be shared with."""

    lost: float  # sum of the replicas' scores
    bits: int
    highest: float
    models: frozenset[str]


@dataclass(slots=True)
class _Node:
    """One node while a plan is made. `groups`: shape -> groups found for it since the node's last step."""

    view: PrewarmNode
    free: list[int]
    held: list[tuple[int, Prewarmed]]  # bits, replica
    groups: dict[ReplicaShape, Sequence[_Group]] = field(default_factory=dict)

    @classmethod
    def of(cls, view: PrewarmNode, scores: Mapping[str, float]) -> "_Node":
        worth = {r.replica_id: scores.get(r.replica_id, 0.0) for r in view.replicas}
        scored = (r if r.score == worth[r.replica_id] else replace(r, score=worth[r.replica_id]) for r in view.replicas)
        return cls(view, list(view.free_bytes), [(view.bits(r.gpu_ids), r) for r in scored])

    def has_stale(self, most: float) -> bool:
        """Return whether a copy on the node is worth at most `most` and may be dropped."""
        return any(replica.score <= most and replica.may_go for _, replica in self.held)

    def groups_for(self, shape: ReplicaShape) -> Sequence[_Group]:
        """Groups with enough free memory that are nested with, or disjoint from, each replica there; least worth
        first."""
        known = self.groups.get(shape)
        if known is None:
            has_bytes = sum(1 << at for at, free in enumerate(self.free) if free >= shape.bytes_per_gpu)
            held = tuple((bits, replica.score, replica.model_key) for bits, replica in self.held)
            known = self.groups[shape] = _groups(len(self.free), shape.num_gpus, has_bytes, held)
        return known


@lru_cache(maxsize=8192)
def _groups(num_gpus: int, size: int, has_bytes: int, held: tuple[tuple[int, float, str], ...]) -> tuple[_Group, ...]:
    """Groups of `size` among the GPUs with enough free memory (bits), given the replicas there: bits, score, model."""
    found = []
    for bits in groups_of(num_gpus, size):
        if bits & has_bytes != bits:
            continue
        lost, highest, models = 0.0, -1.0, []
        for other, score, model_key in held:
            common = other & bits
            if common:
                if common != other and common != bits:
                    break  # neither nested nor disjoint
                lost += score
                highest = max(score, highest)
                models.append(model_key)
        else:
            found.append(_Group(lost, bits, highest, frozenset(models)))
            if not held:
                break  # without replicas all groups are alike: the first one is enough
    return tuple(sorted(found, key=lambda g: (g.lost, g.bits)))


@dataclass(frozen=True, slots=True)
class _Fit:
    beaten: bool  # every replica on the same GPUs scores less
    lost: float  # sum of those replicas' scores
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
    """Plan what to prewarm where, the most valuable first. `wishes` come sorted (`warmserve_scores.replicas`).

    A wish whose model has no shape, or that fits nowhere, is skipped. With `worths` existing replicas take their scores
    from it, and a wish that fits nowhere replaces replicas that together score less than half of it.
    """
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
    full: set[ReplicaShape] = set()  # shapes for which no group has the free memory
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
            steps.append(_take(working[found.node_id], wish, shape, shapes, found))
    return steps


def share_out(
    wishes: Sequence[ReplicaWish], nodes: Sequence[PrewarmNode]
) -> tuple[dict[str, float], list[ReplicaWish]]:
    """Scores of the existing replicas (replica_id -> score), and the wishes that none of them fulfils."""
    there: dict[str, list[str]] = {}
    for node in nodes:
        for replica in node.replicas:
            if replica.counts:
                there.setdefault(replica.model_key, []).append(replica.replica_id)
    for ids in there.values():
        ids.sort(reverse=True)  # taken from the end
    scores: dict[str, float] = {}
    still_open: list[ReplicaWish] = []
    for wish in wishes:
        if mine := there.get(wish.model_key):
            scores[mine.pop()] = wish.score
        else:
            still_open.append(wish)
    return scores, still_open


def _best(nodes: Iterable[_Node], wish: ReplicaWish, shape: ReplicaShape) -> _Fit | None:
    """The best group with enough free memory. Nodes come by id: the first that loses nothing ends the search."""
    best: _Fit | None = None
    for node in nodes:
        tried = False  # tried a group with a higher replica: a node's first such group is its best
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
    """The best group of one node once replicas worth at most `most` together are dropped for it, or None."""
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
        freed = sum(r.bytes_per_gpu or sizes.get(r.model_key, 0) for r in on_it)
        if node.free[at] + freed < shape.bytes_per_gpu:
            return None
    return _Fit(highest < wish.score, lost, node.view.node_id, bits, tuple(r.replica_id for r in drop))


def _take(
    node: _Node, wish: ReplicaWish, shape: ReplicaShape, shapes: Mapping[str, ReplicaShape], fit: _Fit
) -> PrewarmStep:
    """Apply the step to the working copy of the node."""
    node.groups.clear()
    gone = set(fit.drop)
    for other, replica in node.held:
        if replica.replica_id in gone and replica.model_key in shapes:
            for at in members(other):
                if at < len(node.free):
                    node.free[at] += replica.bytes_per_gpu or shapes[replica.model_key].bytes_per_gpu
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
        over = "more than each copy that lies there" if fit.beaten else "no more than those that lie there"
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
