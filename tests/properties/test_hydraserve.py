"""Invariants of HydraServe's placement."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.placement import hydraserve, union
from glowplug.policies.placement.hydraserve import HydraserveParams
from glowplug.policies.placement.hydraserve_allocation import (
    AllocationParams,
    ColdStart,
    ServerOffer,
    StageSeconds,
    allocate,
)
from glowplug.policies.placement.links import Fetch, LinkLedger, admits, begin, settle
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from tests.fleet_builder import MIB, a_model, a_node

FETCHES = st.lists(st.tuples(st.floats(1, 1e10), st.floats(0.1, 60)), max_size=4)


@st.composite
def servers(draw):
    made = []
    for n in range(draw(st.integers(1, 6))):
        gpus = tuple((f"n{n}/{g}", draw(st.integers(0, 32))) for g in range(draw(st.integers(1, 4))))
        fetches = tuple(
            Fetch(fetch_id=f"f{at}", left_bytes=left, deadline_at=due) for at, (left, due) in enumerate(draw(FETCHES))
        )
        link = LinkLedger(bytes_per_s=draw(st.sampled_from([2e9, 8e9])), fetches=fetches)
        empty = frozenset(draw(st.sets(st.sampled_from([g for g, _ in gpus]))))
        made.append(ServerOffer(node_id=f"n{n}", link=link, pcie_bytes_per_s=12e9, gpus=gpus, empty_gpus=empty))
    return made


STARTS = st.builds(
    ColdStart,
    weight_bytes=st.integers(1, 24),
    kv_bytes=st.integers(0, 6),
    slo_ttft_s=st.floats(0.5, 20),
    slo_tpot_s=st.floats(0.02, 0.3),
    stages=st.just(StageSeconds(container_s=0.5, cuda_s=0.3, library_s=1, hop_s=0.001, prefill_s=0.5, decode_s=0.04)),
    waited_s=st.floats(0, 5),
    num_required=st.integers(1, 6),
    num_gpus=st.sampled_from([1, 1, 2, 3]),
)


@given(STARTS, servers())
def test_a_layout_fits_its_gpus_on_servers_of_their_own(start, offers):
    layout = allocate(start, offers, 0.0)
    free = {gpu: num for offer in offers for gpu, num in offer.gpus}
    if layout is None:
        whole = start.bytes_per_gpu()
        assert all(sum(num >= whole for _, num in offer.gpus) < start.num_gpus for offer in offers)
        return
    assert 1 <= layout.num_stages <= 4
    assert len({w.node_id for w in layout.workers}) == layout.num_stages
    for worker in layout.workers:
        assert len(set(worker.gpu_ids)) == len(worker.gpu_ids) == start.num_gpus
        for gpu_id in worker.gpu_ids:
            assert worker.num_bytes <= free[gpu_id]
            assert gpu_id.startswith(f"{worker.node_id}/")
    if layout.meets_slo:
        assert start.waited_s + layout.ttft_s <= start.slo_ttft_s
        assert layout.tpot_s <= start.slo_tpot_s


@given(STARTS, servers(), st.randoms(use_true_random=False))
def test_the_order_of_servers_changes_nothing(start, offers, chance):
    turned = list(offers)
    chance.shuffle(turned)
    assert allocate(start, offers, 0.0) == allocate(start, turned, 0.0)


@given(STARTS, servers(), st.floats(0.1, 20))
def test_a_looser_objective_is_met_where_a_tight_one_was(start, offers, more):
    tight = allocate(start, offers, 0.0)
    loose = allocate(replace(start, slo_ttft_s=start.slo_ttft_s + more), offers, 0.0)
    if tight is not None and tight.meets_slo:
        assert loose is not None and loose.meets_slo


@given(FETCHES, st.floats(1, 1e10), st.floats(0.1, 60))
def test_who_was_admitted_is_in_time_under_equal_shares(fetches, num_bytes, deadline):
    """Eq. 3 never over-admits: with shares that only grow, all bytes arrive in time."""
    ledger = LinkLedger(bytes_per_s=2e9)
    for at, (left, due) in enumerate([*fetches, (num_bytes, deadline)]):
        if admits(ledger, left, due, 0.0):
            ledger = begin(ledger, Fetch(fetch_id=str(at), left_bytes=left, deadline_at=due), 0.0)
    for at_s in sorted({f.deadline_at for f in ledger.fetches}):
        ledger = settle(ledger, at_s + 1e-6)
        assert all(f.deadline_at > at_s or f.left_bytes < 1e-3 * 2e9 for f in ledger.fetches)


@given(FETCHES, st.floats(0, 10), st.floats(0, 10))
def test_settling_in_two_steps_never_leaves_more(fetches, first, second):
    """A fetch that ends between two looks leaves its share to the others."""
    made = tuple(Fetch(fetch_id=str(at), left_bytes=left, deadline_at=due) for at, (left, due) in enumerate(fetches))
    ledger = LinkLedger(bytes_per_s=2e9, fetches=made)
    once = {f.fetch_id: f.left_bytes for f in settle(ledger, first + second).fetches}
    twice = {f.fetch_id: f.left_bytes for f in settle(settle(ledger, first), first + second).fetches}
    for name, left in twice.items():
        assert left <= once.get(name, 0.0) + 1e-3 * max(1.0, left)


@st.composite
def small_servers(draw):
    free = draw(st.lists(st.lists(st.integers(5, 95), min_size=1, max_size=4), min_size=2, max_size=6))
    return [
        a_node(
            f"n{n}",
            gpus_mib=(100,) * len(free_mib),
            grants={g: [("x", 100 - mib)] for g, mib in enumerate(free_mib)},
            abilities=("emulated:stages",),
        )
        for n, free_mib in enumerate(free)
    ]


OVER_TENSOR = AllocationParams(pipeline_over_tensor=True)


@pytest.mark.parametrize(
    ("place", "params"),
    [
        (hydraserve.place, HydraserveParams(allocation=OVER_TENSOR)),
        (union.place, replace(union.PARAMS, allocation=OVER_TENSOR)),
    ],
)
@given(nodes=small_servers(), num_gpus=st.integers(2, 4), mib=st.integers(20, 380), num_bytes=st.integers(4, 10**9))
def test_stages_of_tensor_groups_share_out_every_byte_of_the_model_once(place, params, nodes, num_gpus, mib, num_bytes):
    """Section 7: a stage's GPUs share a server, none is taken twice, and each rank has an equal part of its stage."""
    model = a_model(weights_bytes=mib * MIB * 2 // 3, kv_bytes=mib * MIB // 3, num_gpus=num_gpus)
    model = replace(model, weights=replace(model.weights, num_bytes=num_bytes))
    decision = place(PlaceRequest(instance_id="i", model=model), PlacementView(now_s=0.0, nodes=nodes), params)
    free = sorted((_nth(node, num_gpus) for node in nodes), reverse=True)
    fits = [num for num in range(1, min(4, len(free)) + 1) if free[num - 1] * num * num_gpus >= model.memory_bytes]
    assert len(decision.stages) == min(fits, default=0)
    share_out_the_model(decision.stages, model, nodes)


def _nth(node, num_gpus):
    free = sorted((gpu.free_bytes for gpu in node.gpus), reverse=True)
    return free[num_gpus - 1] if len(free) >= num_gpus else 0


@pytest.mark.parametrize("place", [hydraserve.place, union.place])
@given(free=st.lists(st.integers(15, 79), min_size=2, max_size=6), num_bytes=st.integers(4, 10**9))
def test_stages_share_out_every_byte_of_the_model_once(place, free, num_bytes):
    """Section 4.1: each fetches its own part first. No GPU has 80 MiB free: stages, or none."""
    nodes = [
        a_node(f"n{n}", gpus_mib=(100,), grants={0: [("x", 100 - mib)]}, abilities=("emulated:stages",))
        for n, mib in enumerate(free)
    ]
    model = a_model(weights_bytes=50 * MIB, kv_bytes=30 * MIB)
    model = replace(model, weights=replace(model.weights, num_bytes=num_bytes))
    decision = place(PlaceRequest(instance_id="i", model=model), PlacementView(now_s=0.0, nodes=nodes))
    fits = any(sum(mib * num >= 80 for mib in free) >= num for num in range(2, 5))
    assert (len(decision.stages) > 1) == fits and not decision.is_late
    assert fits or decision.stages == ()
    share_out_the_model(decision.stages, model, nodes)


def share_out_the_model(stages, model, nodes):
    """Each on its own server, with room."""
    free = {gpu.gpu_id: gpu.free_bytes for node in nodes for gpu in node.gpus}
    taken = [gpu_id for stage in stages for gpu_id in stage.gpu_ids]
    assert len(set(taken)) == len(taken) == model.num_gpus * len(stages)
    assert len({stage.node_id for stage in stages}) == len(stages)
    for stage in stages:
        assert all(g.startswith(f"{stage.node_id}/") and stage.bytes_per_gpu <= free[g] for g in stage.gpu_ids)
    if stages:
        assert sum(stage.bytes_per_gpu for stage in stages) * model.num_gpus >= model.memory_bytes
    if len(stages) > 1:
        ends = [stage.first_byte + stage.fetch_bytes for stage in stages]
        assert [stage.first_byte for stage in stages] == [0, *ends[:-1]] and ends[-1] == model.weights.num_bytes
