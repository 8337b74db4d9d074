"""The union's prewarming: make the replica worth most next; with a price, free GPUs whose replicas are not worth it.

A replica's worth (`policies/worth.py`) is the probability that the load reaches it before a reload, times the saving of
a start from it. The i-th replica of a model with K instances of B slots is needed beyond (K + i) B concurrent requests,
the first of a model without any with the next request. WarmServe's Algorithm 1 places them (section 5.2) with these
worths for its scores (Eq. 7-8); a wish that fits nowhere replaces copies worth less. An idle instance that drains is
about to leave a copy, and counts among the K.

Replicas are made only where host memory has the weights, as everywhere in WarmServe (section 7.1). Over the network
they slow cold starts: with 384 models on 16 Gbit/s cards TTFT attainment on HydraServe's workload fell from 100 % to 94
% (simulated). Other models get a copy by their first start.

Copies are dropped at once for a start, so they cost nothing. An operator who can give GPUs back sets a price: GPUs
without serving instances are kept while their copies save at least `price` seconds of waiting a second and GPU
(`idle_worth`). docs/adr/0025 has the costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from glowplug.domain.bounds import Count, Positive
from glowplug.domain.hardware import Node
from glowplug.policies.placement.dormant import gives_way
from glowplug.policies.placement.links import has_weights
from glowplug.policies.placement.warmserve_evict_aware import PrewarmStep, ReplicaClass, ReplicaWish, serving_gpus
from glowplug.policies.prewarming.port import PrewarmPlan, PrewarmView, weighing
from glowplug.policies.prewarming.warmserve import WarmserveParams, plan_for
from glowplug.policies.worth import asked, away_s, idle_worth, level


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionParams:
    plan: WarmserveParams = field(default_factory=WarmserveParams)
    price: float = 0.0  # seconds of waiting to save per second of an unwanted GPU; 0: none
    least_asked: Positive = 0.02  # probability of need
    max_replicas: Count = 64


PARAMS = UnionParams()


@weighing
def plan(view: PrewarmView, params: UnionParams = PARAMS) -> PrewarmPlan:
    worths = {replica_id: holding.saves_s for replica_id, holding in view.holdings.items()}
    found = plan_for(wishes(view, params), view, params.plan, worths)
    near = [step for step in found.steps if _is_near(step, view)]
    paid, unpaid = _held_against_price(near, view, params)
    return replace(
        found,
        steps=tuple(paid),
        scores=worths,
        unpaid=unpaid,
        inputs={**found.inputs, "over_network": len(found.steps) - len(near), "unpaid": len(near) - len(paid)},
    )


def wishes(view: PrewarmView, params: UnionParams) -> list[ReplicaWish]:
    found = []
    for key, forecast in view.forecasts.items():
        model, climb_s = view.models.get(key), view.climb_s.get(key, 0.0)
        if model is None or climb_s <= 0:
            continue
        there, slots = view.num_active.get(key, 0) + view.num_leaving_copies.get(key, 0), view.slots_of(model)
        for rank in range(params.max_replicas):
            probability = asked(level(forecast, there + rank, slots), away_s(climb_s))
            if probability < params.least_asked:
                break
            score = probability * climb_s
            found.append(ReplicaWish(model_key=key, kind=ReplicaClass.BASIC, rank=rank, score=score))
    return sorted(found, key=lambda wish: (-wish.score, wish.model_key, wish.rank))


def _is_near(step: PrewarmStep, view: PrewarmView) -> bool:
    node = view.fleet.node(step.node_id)
    return node is not None and has_weights(node, view.models[step.model_key])


def _held_against_price(
    steps: Sequence[PrewarmStep], view: PrewarmView, params: UnionParams
) -> tuple[list[PrewarmStep], dict[str, str]]:
    if params.price <= 0:
        return list(steps), {}
    taken = {dropped for step in steps for dropped in step.drop}
    saves = {replica_id: holding.idle_worth for replica_id, holding in view.holdings.items()}
    named = {f"~{number}": step for number, step in enumerate(steps)}  # distinct from replica ids
    saves |= {name: _idle_worth(step, view) for name, step in named.items()}
    unpaid = dict[str, str]()
    places = {*view.fleet.dormant, *(step.node_id for step in steps)}
    for node in (known for node_id in sorted(places) if (known := view.fleet.node(node_id)) is not None):
        rows = [r for r in view.fleet.dormant.get(node.node_id, ()) if gives_way(r) and r.instance_id not in taken]
        held = {r.instance_id: {w.gpu_id for w in r.workers} for r in rows if r.instance_id in view.holdings}
        held |= {name: set(step.gpu_ids) for name, step in named.items() if step.node_id == node.node_id}
        unpaid |= _unpaid_on(node, held, saves, view, params)
    paid = [step for name, step in named.items() if name not in unpaid]
    return paid, {name: why for name, why in unpaid.items() if name not in named}


def _idle_worth(step: PrewarmStep, view: PrewarmView) -> float:
    key = step.model_key
    model = view.models[key]
    before = view.num_active.get(key, 0) + len(view.fleet.copies(model))
    asking = level(view.forecasts.get(key), before, view.slots_of(model))
    return idle_worth(asking, view.climb_s.get(key, 0.0))


def _unpaid_on(
    node: Node, held: Mapping[str, set[str]], saves: Mapping[str, float], view: PrewarmView, params: UnionParams
) -> dict[str, str]:
    serving = serving_gpus(node, view.fleet.dormant.get(node.node_id, ()), view.fleet.reserved)
    left, lost = dict(held), dict[str, str]()
    while left:
        name, gpu_ids = left.popitem()
        names, together = [name], set(gpu_ids)
        while more := [other for other, on in left.items() if on & together]:
            for other in more:
                together |= left.pop(other)
                names.append(other)
        if not together or together & serving:
            continue
        saved, least = sum(saves.get(one, 0.0) for one in names), params.price * len(together)
        if saved < least:
            why = f"what lies on {', '.join(sorted(together))} saves {1000 * saved:.3g} ms of waiting a second"
            lost |= dict.fromkeys(names, f"{why}, and has to save {1000 * least:.3g}")
    return lost
