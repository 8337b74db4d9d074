"""WarmServe's prewarming: replicas for the forecast load, placed at the least cost to others.

Paper: WarmServe section 5.2, Eq. 5-8 and Algorithm 1 (`warmserve_evict_aware`), over GPUs that are
idle or universal and, ahead of time, over those whose instances drain (section 4.1: "ensuring prewarming completion
before the next allocation"). Departures, beside those of that page:

- A plan makes at most `max_steps` replicas, the next continues; replicas of changed models are dropped.
- Algorithm 1 counts a replica under a draining instance, although no start can use it. Here wishes are met first where
  a start can, then on draining GPUs; else a model's only copy might be under a drain while GPUs are idle.
- A draining instance keeps its own weights when it stops (section 4.1: the worker then holds "both the previously
  running model and the proactively loaded models"), so it counts as a replica.

`first_layers` (section 4, erratum E7; off, as in the published code, which loads all layers): a replica holds the first
k layers, and an instance "can directly begin inference on the available layers while asynchronously loading the
remaining parameters". The paper does not print the rule, read here as the smallest k, at least 1, with

    (j - k) W / (L b) <= t_0 + (j - 1) c      for j = k + 1 .. L

so that each missing layer is loaded in time. `growth_leads` (t_0, 0 in E7) is an extension: a growth's seconds before
its first layer computes. A replica is whole before a warm request has shown a prefill, and if a drained instance left
it.

`literal` follows the published code where it differs (errata E4, E5). `unplaced` is the ablation without evict-aware
placement (section 7.5): the first group with enough free memory. `unproactive`: none where an instance drains.
"""

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain

from glowplug.domain.bounds import Bounded, Count, Positive
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.fleet.node_index import IndexedNodes, NodeMemory
from glowplug.policies.placement.shape import weights_per_gpu
from glowplug.policies.placement.warmserve_evict_aware import (
    EvictAwareParams,
    PrewarmDemand,
    Prewarmed,
    PrewarmNode,
    PrewarmStep,
    ReplicaShape,
    ReplicaWish,
    ScoreParams,
    prewarm_nodes,
    replicas,
    replicas_on,
    share_out,
)
from glowplug.policies.placement.warmserve_evict_aware import plan as place_replicas
from glowplug.policies.prewarming.port import PrewarmPlan, PrewarmView, outdated


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmserveParams:
    scores: ScoreParams = field(default_factory=ScoreParams)
    placement: EvictAwareParams = field(default_factory=lambda: EvictAwareParams(max_steps=16))
    proactive: bool = True
    evict_aware: bool = True
    first_layers: bool = False  # section 4; the published code loads all (E7)
    growth_leads: bool = False  # ... plus a growth's own seconds, an extension (`lead_s`)
    num_layers: Count = 32  # ... of the shallowest model


def plan(view: PrewarmView, params: WarmserveParams = WarmserveParams()) -> PrewarmPlan:
    wishes = replicas((_demand(key, view) for key in sorted(view.forecasts) if key in view.models), params.scores)
    return plan_for(wishes, view, params)


def plan_for(
    wishes: Sequence[ReplicaWish],
    view: PrewarmView,
    params: WarmserveParams,
    worths: Mapping[str, float] | None = None,
) -> PrewarmPlan:
    """Plan for wishes, most valuable first. With `worths` of existing replicas, wishes replace those worth less."""
    stale = outdated(view)
    nodes = _nodes(view, stale, params)
    shapes = {
        key: _shape(m.num_gpus, _replica_bytes(m, view, params), m.engine)
        for key in {wish.model_key for wish in wishes} | {r.model_key for node in nodes for r in node.replicas}
        if (m := view.models.get(key)) is not None
    }
    scores, still_open = share_out(wishes, nodes)
    steps: list[PrewarmStep] = []
    if params.proactive and (closed := _draining_gpus(view.fleet, view.draining)):
        now = _usable(_nodes(view, stale, replace(params, proactive=False)), closed)
        at_once, still_open = share_out(wishes, now)
        scores |= at_once
        steps = _place(wishes, still_open, shapes, now, params, worths)
        nodes = _after(nodes, steps, shapes, view.finishing)
    _, rest = share_out(wishes, nodes)
    steps += _place(wishes, rest, shapes, nodes, params, worths)
    inputs = {"wishes": len(wishes), "open": len(still_open)}
    return PrewarmPlan(steps=tuple(steps), drops=stale, scores=scores, inputs=inputs)


def _place(
    wishes: Sequence[ReplicaWish],
    still_open: Sequence[ReplicaWish],
    shapes: Mapping[str, ReplicaShape],
    nodes: Sequence[PrewarmNode],
    params: WarmserveParams,
    worths: Mapping[str, float] | None,
) -> list[PrewarmStep]:
    if params.evict_aware:
        return place_replicas(wishes, shapes, nodes, params.placement, worths)
    return _first_fit(still_open, shapes, nodes, params.placement.max_steps)


def _demand(key: str, view: PrewarmView) -> PrewarmDemand:
    model, forecast = view.models[key], view.forecasts[key]
    return PrewarmDemand(
        model_key=key,
        concurrency_mean=forecast.concurrency_mean,
        concurrency_peak=forecast.concurrency_peak,
        max_concurrency=view.slots_of(model),
        num_active=view.num_active.get(key, 0),
        load_s=view.load_s.get(key, 0.0),
    )


@lru_cache(maxsize=4096)
def _shape(num_gpus: int, num_bytes: int, engine: str) -> ReplicaShape:
    return ReplicaShape(num_gpus=num_gpus, bytes_per_gpu=num_bytes, engine=engine)


def _replica_bytes(model: Model, view: PrewarmView, params: WarmserveParams) -> int:
    weights = weights_per_gpu(model)
    if not params.first_layers or not weights:
        return weights
    load_s, prefill_s = view.load_s.get(model.key, 0.0), view.prefill_s.get(model.key, 0.0)
    if load_s <= 0 or prefill_s <= 0:
        return weights
    return first_layers_bytes(
        LayerProfile(
            num_layers=params.num_layers,
            weights_bytes=weights,
            load_bytes_per_s=weights / load_s,
            prefill_s_per_layer=prefill_s / params.num_layers,
            lead_s=view.growth_s.get(model.key, 0.0) if params.growth_leads else 0.0,
        )
    )


def _nodes(view: PrewarmView, stale: Sequence[str], params: WarmserveParams) -> list[PrewarmNode]:
    gone = frozenset(stale)
    nodes = list(prewarm_nodes(view.fleet, view.draining, is_ahead=params.proactive))
    if not gone:
        return nodes
    return [replace(n, replicas=tuple(r for r in n.replicas if r.replica_id not in gone)) for n in nodes]


def _first_fit(
    wishes: Sequence[ReplicaWish], shapes: Mapping[str, ReplicaShape], nodes: Sequence[PrewarmNode], max_steps: int
) -> list[PrewarmStep]:
    free = {g: n for node in nodes for g, n in zip(node.gpu_ids, node.free_bytes, strict=True)}
    models = {g: {r.model_key for r in node.replicas if g in r.gpu_ids} for node in nodes for g in node.gpu_ids}
    steps: list[PrewarmStep] = []
    full: set[tuple[str, ReplicaShape]] = set()
    for wish in wishes:
        shape = shapes.get(wish.model_key)
        if shape is None or (wish.model_key, shape) in full or len(steps) >= max_steps:
            continue
        for node in nodes:
            if shape.engine and node.engines is not None and shape.engine not in node.engines:
                continue
            fits = [g for g in node.gpu_ids if free[g] >= shape.bytes_per_gpu and wish.model_key not in models[g]]
            if len(fits) >= shape.num_gpus:
                gpu_ids = tuple(fits[: shape.num_gpus])
                for gpu_id in gpu_ids:
                    free[gpu_id] -= shape.bytes_per_gpu
                    models[gpu_id].add(wish.model_key)
                steps.append(
                    PrewarmStep(
                        model_key=wish.model_key,
                        node_id=node.node_id,
                        gpu_ids=gpu_ids,
                        score=wish.score,
                        reason="the load that is expected needs it, and these are the first GPUs with free memory",
                        bytes_per_gpu=shape.bytes_per_gpu,
                    )
                )
                break
        else:
            full.add((wish.model_key, shape))
    return steps


def _draining_gpus(fleet: IndexedNodes, draining: Collection[str]) -> frozenset[str]:
    if not draining:
        return frozenset()

    def here(known: NodeMemory) -> tuple[str, ...]:
        return tuple(g.gpu_id for g in known.node.gpus if any(grant.holder in draining for grant in g.grants))

    return frozenset(chain.from_iterable(fleet.answers("draining", here)))


def _usable(nodes: Sequence[PrewarmNode], gpu_ids: Set[str]) -> list[PrewarmNode]:
    return [
        replace(n, replicas=tuple(replace(r, counts=not gpu_ids & set(r.gpu_ids)) for r in n.replicas)) for n in nodes
    ]


def _after(
    nodes: Sequence[PrewarmNode],
    steps: Sequence[PrewarmStep],
    shapes: Mapping[str, ReplicaShape],
    finishing: Mapping[str, Sequence[Instance]],
) -> list[PrewarmNode]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile(Bounded):
    num_layers: Count  # L, all alike
    weights_bytes: int  # W, of all layers on that GPU
    load_bytes_per_s: Positive  # b, host memory to GPU
    prefill_s_per_layer: float  # c, of the shortest prefill
    lead_s: float = 0.0  # t_0

    @property
    def load_s_per_layer(self) -> float:
        return self.weights_bytes / self.num_layers / self.load_bytes_per_s


def first_layers(profile: LayerProfile) -> int:
    """Return k, from 1 to `num_layers`. The rule is linear in the layer, so the first and last missing layers
    decide."""
    load_s, compute_s, last = profile.load_s_per_layer, profile.prefill_s_per_layer, profile.num_layers
    for k in range(1, last):
        if all((layer - k) * load_s <= profile.lead_s + (layer - 1) * compute_s for layer in (k + 1, last)):
            return k
    return last


def first_layers_bytes(profile: LayerProfile) -> int:
    return min(profile.weights_bytes, math.ceil(profile.weights_bytes * first_layers(profile) / profile.num_layers))


literal = partial(plan, params=WarmserveParams(scores=ScoreParams(burst="ratio", class_first=False)))
unplaced = partial(plan, params=WarmserveParams(evict_aware=False))
unproactive = partial(plan, params=WarmserveParams(proactive=False))
