"""Invariants of WarmServe's placement."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.placement.warmserve_evict_aware import (
    PrewarmDemand,
    Prewarmed,
    PrewarmNode,
    ReplicaClass,
    ReplicaShape,
    is_nested_or_disjoint,
    plan,
    replicas,
)
from glowplug.policies.prewarming.warmserve import LayerProfile, first_layers, first_layers_bytes
from glowplug.policies.prewarming.warmserve_reservation import prewarmable_bytes
from glowplug_lab.policies.warmserve_placement import take_over

MODELS = [f"m{n}" for n in range(6)]
SHAPES = st.fixed_dictionaries(
    {
        m: st.builds(ReplicaShape, num_gpus=st.sampled_from([1, 1, 2, 4]), bytes_per_gpu=st.integers(1, 40))
        for m in MODELS
    }
)
DEMANDS = st.lists(
    st.builds(
        PrewarmDemand,
        model_key=st.sampled_from(MODELS),
        concurrency_mean=st.floats(0, 100),
        concurrency_peak=st.floats(0, 200),
        max_concurrency=st.sampled_from([8, 32]),
        num_active=st.integers(0, 3),
        load_s=st.floats(0.05, 10),
    ),
    max_size=8,
    unique_by=lambda d: d.model_key,
)


@st.composite
def clusters(draw):
    return [
        PrewarmNode(
            node_id=f"n{n}",
            gpu_ids=tuple(f"n{n}/{g}" for g in range(4)),
            free_bytes=tuple(draw(st.lists(st.integers(0, 80), min_size=4, max_size=4))),
            draining=frozenset(f"n{n}/{g}" for g in draw(st.sets(st.integers(0, 3), max_size=2))),
        )
        for n in range(draw(st.integers(1, 3)))
    ]


@given(DEMANDS, SHAPES, clusters())
def test_a_plan_keeps_the_guidelines_and_the_bytes(demands, shapes, nodes):
    wishes = replicas(demands)
    steps = plan(wishes, shapes, nodes)
    free = {g: b for node in nodes for g, b in zip(node.gpu_ids, node.free_bytes, strict=True)}
    for at, step in enumerate(steps):
        shape = shapes[step.model_key]
        assert len(set(step.gpu_ids)) == shape.num_gpus
        assert {g.partition("/")[0] for g in step.gpu_ids} == {step.node_id}
        for gpu in step.gpu_ids:
            free[gpu] -= shape.bytes_per_gpu
            assert free[gpu] >= 0, f"{gpu} oversubscribed"
        for other in steps[:at]:
            one, two = set(step.gpu_ids), set(other.gpu_ids)
            assert one <= two or two <= one or not one & two
            assert not (one & two and other.model_key == step.model_key)
    for model in MODELS:
        assert sum(s.model_key == model for s in steps) <= sum(w.model_key == model for w in wishes)


@st.composite
def held_nodes(draw):
    """Eight GPUs; replicas may be unaligned (older plan, other policy, restart) or worthless."""
    made = []
    for at in range(draw(st.integers(1, 5))):
        first, num = draw(st.integers(0, 6)), draw(st.sampled_from([1, 2, 2, 3, 4]))
        gpu_ids = tuple(f"n0/{g}" for g in range(first, min(first + num, 8)))
        score = draw(st.sampled_from([0.0, 0.0, 0.1, 3.0]))
        made.append(Prewarmed(replica_id=f"r{at}", model_key=f"old{at}", gpu_ids=gpu_ids, score=score, is_ready=True))
    free = tuple(draw(st.lists(st.integers(0, 40), min_size=8, max_size=8)))
    return PrewarmNode(node_id="n0", gpu_ids=tuple(f"n0/{g}" for g in range(8)), free_bytes=free, replicas=tuple(made))


@given(DEMANDS, SHAPES, held_nodes(), st.integers(1, 40))
def test_a_plan_around_what_lies_anyhow_crosses_nothing_that_stays(demands, shapes, node, size):
    """Guideline 1 holds against every replica that stays; only worthless ones are dropped."""
    shapes = shapes | {r.model_key: ReplicaShape(num_gpus=len(r.gpu_ids), bytes_per_gpu=size) for r in node.replicas}
    keys = {r.replica_id: r for r in node.replicas}
    lying, gone = {r.replica_id: set(r.gpu_ids) for r in node.replicas}, set()
    for at, step in enumerate(plan(replicas(demands), shapes, [node])):
        gone |= set(step.drop)
        assert gone <= keys.keys() and len(step.drop) == len(set(step.drop))
        for replica_id in step.drop:
            del lying[replica_id]
        mine = set(step.gpu_ids)
        for other in lying.values():
            assert mine <= other or other <= mine or not mine & other
        lying[f"new{at}"] = mine


@given(DEMANDS, SHAPES, clusters())
def test_planning_again_after_a_plan_asks_for_nothing_twice(demands, shapes, nodes):
    wishes = replicas(demands)
    steps = plan(wishes, shapes, nodes)
    after = [
        replace(
            node,
            free_bytes=tuple(
                b - sum(shapes[s.model_key].bytes_per_gpu for s in steps if g in s.gpu_ids)
                for g, b in zip(node.gpu_ids, node.free_bytes, strict=True)
            ),
            replicas=tuple(
                Prewarmed(replica_id=f"r{at}", model_key=s.model_key, gpu_ids=s.gpu_ids)
                for at, s in enumerate(steps)
                if s.node_id == node.node_id
            ),
        )
        for node in nodes
    ]
    placed = {m: sum(s.model_key == m for s in steps) for m in MODELS}
    for step in plan(wishes, shapes, after):
        wanted = sum(w.model_key == step.model_key for w in wishes)
        placed[step.model_key] += 1
        assert placed[step.model_key] <= wanted


@given(DEMANDS, clusters(), SHAPES, st.randoms(use_true_random=False))
def test_the_order_of_nodes_and_demands_changes_nothing(demands, nodes, shapes, chance):
    mixed, turned = list(demands), list(nodes)
    chance.shuffle(mixed)
    chance.shuffle(turned)
    assert plan(replicas(demands), shapes, nodes) == plan(replicas(mixed), shapes, turned)
    for model in MODELS:
        assert take_over(model, shapes[model], nodes) == take_over(model, shapes[model], turned)


@given(DEMANDS)
def test_scores_fall_with_rank_and_rise_with_load_time(demands):
    wishes = replicas(demands)
    for model in MODELS:
        for kind in ReplicaClass:
            mine = [
                w.score
                for w in sorted((w for w in wishes if w.model_key == model and w.kind is kind), key=lambda w: w.rank)
            ]
            assert mine == sorted(mine, reverse=True)
            assert all(score >= 0 for score in mine)


@given(DEMANDS, st.integers(0, 7), st.floats(0.1, 5), st.floats(0.1, 300))
def test_what_takes_longer_to_load_scores_higher_and_more_demand_wishes_for_no_fewer(demands, at, more_s, more):
    """Eq. 5-8: every score is proportional to T_c; the counts rise with L_P and L_A."""
    if not demands:
        return
    one = demands[at % len(demands)]

    def of(demand):
        return {(w.kind, w.rank): w.score for w in replicas([demand])}

    here, slower = of(one), of(replace(one, load_s=one.load_s + more_s))
    assert here.keys() == slower.keys()
    assert all(slower[key] > score or score == 0 for key, score in here.items())
    assert len(of(replace(one, concurrency_peak=one.concurrency_peak + more))) >= len(here)
    busier = replace(one, concurrency_mean=one.concurrency_mean + more, concurrency_peak=one.concurrency_peak + more)
    assert len(of(busier)) >= len(here)
    num_basic = sum(kind is ReplicaClass.BASIC for kind, _ in here)
    assert sum(kind is ReplicaClass.BASIC for kind, _ in of(busier)) >= num_basic


@given(st.integers(0, 64), st.integers(1, 64), st.integers(0, 1000), st.integers(0, 1000))
def test_more_running_or_more_used_never_frees_more(running, capacity, used, total):
    used = min(used, total)
    here = prewarmable_bytes(running, capacity, used, total)
    assert 0 <= here <= total - used
    assert prewarmable_bytes(running + 1, capacity, used, total) <= here
    if used < total:
        assert prewarmable_bytes(running, capacity, used + 1, total) <= here


@given(st.integers(0, 255), st.integers(0, 255))
def test_nesting_is_symmetric(one, other):
    assert is_nested_or_disjoint(one, other) == is_nested_or_disjoint(other, one)


# replicas of the first k layers: k by the rule of erratum E7, against a start played layer by layer

PROFILES = st.builds(
    LayerProfile,
    num_layers=st.integers(2, 96),
    weights_bytes=st.integers(1_000_000_000, 150_000_000_000),
    load_bytes_per_s=st.floats(1e8, 1e12),
    prefill_s_per_layer=st.floats(0.0, 0.1),
    lead_s=st.floats(0.0, 2.0),
)
MORE = st.floats(1.0, 100.0)


def waited_s(profile: LayerProfile, num_there: int) -> float:
    """Idle seconds of the first prefill: a layer computes after its arrival and after its predecessor."""
    load_s, at_s = profile.load_s_per_layer, profile.lead_s
    for layer in range(1, profile.num_layers + 1):
        comes_at = max(0, layer - num_there) * load_s
        at_s = max(at_s, comes_at) + profile.prefill_s_per_layer
    return at_s - profile.lead_s - profile.num_layers * profile.prefill_s_per_layer


@given(PROFILES)
def test_a_start_with_k_layers_waits_for_none_and_with_one_less_it_does(profile: LayerProfile) -> None:
    k = first_layers(profile)
    assert 1 <= k <= profile.num_layers
    assert waited_s(profile, k) <= 1e-9 + 1e-9 * profile.lead_s
    if k == 1:
        return
    late_s = max(
        (layer - k + 1) * profile.load_s_per_layer - profile.lead_s - (layer - 1) * profile.prefill_s_per_layer
        for layer in range(k, profile.num_layers + 1)
    )
    assert late_s > 0.0
    if late_s > 1e-6:  # else rounding decides
        assert waited_s(profile, k - 1) > late_s / 2


@given(PROFILES, MORE)
def test_a_faster_link_or_a_longer_prefill_never_needs_more_layers(profile: LayerProfile, more: float) -> None:
    k, c = first_layers(profile), profile.prefill_s_per_layer
    assert first_layers(replace(profile, load_bytes_per_s=profile.load_bytes_per_s * more)) <= k
    assert first_layers(replace(profile, prefill_s_per_layer=c * more)) <= k
    assert first_layers(replace(profile, lead_s=profile.lead_s * more)) <= k


@given(PROFILES)
def test_without_compute_all_layers_are_needed(profile: LayerProfile) -> None:
    bare = replace(profile, prefill_s_per_layer=0.0, lead_s=0.0)
    assert first_layers(bare) == bare.num_layers
    assert first_layers_bytes(bare) == bare.weights_bytes


@given(PROFILES)
def test_bytes_are_those_of_k_layers_and_never_more_than_all(profile: LayerProfile) -> None:
    k, num_bytes = first_layers(profile), first_layers_bytes(profile)
    assert 0 < num_bytes <= profile.weights_bytes
    assert num_bytes >= profile.weights_bytes * k / profile.num_layers * (1 - 1e-12)
