"""HydraServe's layouts and ServerlessLLM's choice as placements."""

from dataclasses import replace

import pytest

from glowplug.controllers.placer.network import configured
from glowplug.domain.hardware import CachedWeights, Link
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Slo, WeightsRef
from glowplug.fleet.start_times import StartTimes
from glowplug.policies.placement import hydraserve, serverlessllm, union
from glowplug.policies.placement.expect import expect
from glowplug.policies.placement.hydraserve_allocation import AllocationParams, StageSeconds
from glowplug.policies.placement.links import Fetch, LinkLedger, link_of
from glowplug.policies.placement.port import PlacementView, PlaceRequest, wants_seconds
from glowplug.policies.registry import choose, installed
from tests.fleet_builder import MIB, a_model, a_node, an_instance

GB = 10**9
WEIGHTS = 12 * GB
STAGES = StageSeconds(container_s=1.0, cuda_s=0.5, library_s=0.5, hop_s=0.001, prefill_s=1.5, decode_s=0.042)
SEVEN_B = a_model(
    "llama",
    weights=WeightsRef(uri="s3://w", num_bytes=WEIGHTS),
    weights_bytes=WEIGHTS,
    kv_bytes=5 * GB,
    slo=Slo(ttft_s=7.5, tpot_s=0.2),
)
COPY = CachedWeights(digest=SEVEN_B.weights.digest, num_bytes=WEIGHTS)
SEVENTY_B = replace(
    SEVEN_B,
    weights=WeightsRef(uri="s3://w", num_bytes=128 * GB),
    weights_bytes=128 * GB,
    kv_bytes=64 * GB,
    num_gpus=4,
    slo=Slo(ttft_s=40.0, tpot_s=0.2),
)
EIGHT_OF_80_GB = (80,) * 8
GROUPS = AllocationParams(pipeline_over_tensor=True)
HYDRASERVE_GROUPS = hydraserve.HydraserveParams(allocation=GROUPS)
UNION_GROUPS = replace(union.PARAMS, allocation=GROUPS)


def server(node_id, *, abilities=("emulated:stages", "emulated:stream"), gbps=16, gpus_gb=(24,), **fields):
    link = Link(link_id=f"{node_id}/nic", bytes_per_s=gbps * 1e9 / 8)
    gpus_mib = tuple(gb * GB // MIB for gb in gpus_gb)
    return a_node(node_id, gpus_mib=gpus_mib, links=(link,), abilities=abilities, **fields)


def servers(num, **fields):
    return [server(f"node-{n}", **fields) for n in range(num)]


def place(policy, nodes, *params, model=SEVEN_B, is_awaited=True, **fields):
    times = StartTimes(priors={}, otherwise=configured(STAGES))
    view = PlacementView(now_s=0.0, nodes=nodes, start_stages=STAGES, times=times, **fields)
    request = PlaceRequest(instance_id="i", model=model, is_awaited=is_awaited)
    return getattr(policy, "place", policy)(request, view, *params)


def place_large(nodes, params=HYDRASERVE_GROUPS, policy=hydraserve, **fields):
    return place(policy, nodes, params, model=SEVENTY_B, **fields)


def test_two_stages_where_one_server_would_be_late_each_with_its_half():
    """Section 4.1, Algorithm 1: 12 GB at 16 Gbit/s take 6 s, which leaves a 7.5 s objective no prefill."""
    decision = place(hydraserve, servers(3))
    assert [(s.first_byte, s.fetch_bytes) for s in decision.stages] == [(0, WEIGHTS // 2), (WEIGHTS // 2, WEIGHTS // 2)]
    assert len({s.node_id for s in decision.stages}) == 2
    assert [s.bytes_per_gpu for s in decision.stages] == [17 * GB, 17 * GB // 2]  # the first may grow whole


def test_the_union_uses_every_link_where_a_request_without_an_objective_waits():
    """12 GB at 2 GB/s take 6 s over one link, 3 s over two. HydraServe alone takes one worker."""
    free = replace(SEVEN_B, slo=Slo())
    assert len(place(hydraserve, servers(2), model=free).stages) == 1
    assert len(place(union, servers(2), model=free, is_awaited=False).stages) == 1
    decision = place(union, servers(2), model=free)
    assert [(s.fetch_bytes, s.node_id) for s in decision.stages] == [(6 * GB, "node-0"), (6 * GB, "node-1")]
    fast = server("node-9", gbps=64, abilities=("emulated:stream",))
    assert [s.node_id for s in place(union, [*servers(2), fast], model=free).stages] == ["node-9"]
    copy = server("node-9", cached=(COPY,))
    assert [s.node_id for s in place(union, [*servers(2), copy], model=free).stages] == ["node-9"]


@pytest.mark.parametrize("policy", [hydraserve, union])
def test_a_copy_that_is_to_sleep_is_one_worker_however_late(policy):
    view = PlacementView(now_s=0.0, nodes=servers(3), start_stages=STAGES)
    request = PlaceRequest(instance_id="i", model=SEVEN_B)
    assert len(policy.place(request, view).stages) == 2
    asleep = replace(request, is_to_sleep=True)
    assert [s.fetch_bytes for s in policy.place(asleep, view).stages] == [0], "all of it"
    small = replace(view, nodes=servers(3, gpus_gb=(9,)))
    assert len(policy.place(request, small).stages) > 1 and not policy.place(asleep, small).stages


@pytest.mark.parametrize(("gbps", "num_required", "num_stages"), [(31, 1, 1), (25, 1, 2), (64, 2, 2)])
def test_a_node_without_stages_is_taken_for_one_instance_where_it_is_about_as_soon(gbps, num_required, num_stages):
    """12 GB take 3 s over two links of 16 Gbit/s, beside 1.5 s of prefill in two full stages: 3.1 s over one of 31."""
    fast = server("node-9", gbps=gbps, abilities=("emulated:stream",))
    view = PlacementView(now_s=0.0, nodes=[*servers(2), fast], start_stages=STAGES)
    free = replace(SEVEN_B, slo=Slo(), kv_bytes=GB)
    request = PlaceRequest(instance_id="i", model=free, num_required=num_required, is_awaited=True)
    view = replace(view, times=StartTimes(priors={}, otherwise=configured(STAGES)))
    assert len(union.place(request, view).stages) == num_stages


def test_stages_are_predicted_by_the_layers_that_they_fetch():
    seen = {SEVEN_B.weights.digest: (7 * GB, 5 * GB)}
    decision = place(hydraserve, servers(3), stage_bytes=seen)
    assert [(s.first_byte, s.fetch_bytes) for s in decision.stages] == [(0, WEIGHTS // 2), (WEIGHTS // 2, WEIGHTS // 2)]
    assert [s.part_bytes for s in decision.stages] == [7 * GB, 5 * GB]
    request = PlaceRequest(instance_id="i-1", model=SEVEN_B)
    view = PlacementView(now_s=0.0, nodes=servers(3), stage_bytes=seen)
    expected = expect(decision, request, view)
    assert [phases["fetch"] for phases in expected.by_phase] == pytest.approx([3.5, 2.5])
    assert expected.by_phase[0]["load"] == pytest.approx(expected.by_phase[1]["load"] * 7 / 5)


def test_stages_that_would_be_late_by_their_layers_are_not_made():
    seen = {SEVEN_B.weights.digest: (12 * GB, 11 * GB)}
    assert len(place(hydraserve, servers(2)).stages) == 2
    assert len(place(hydraserve, servers(2), stage_bytes=seen).stages) == 1
    by_layers = {SEVEN_B.weights.digest: (6 * GB, 6 * GB, 4 * GB, 4 * GB, 4 * GB, 6 * GB, 2 * GB, 2 * GB, 2 * GB)}
    params = hydraserve.HydraserveParams(allocation=AllocationParams(max_rivals=99))
    request = PlaceRequest(instance_id="i", model=replace(SEVEN_B, slo=Slo(ttft_s=99.0)), num_required=4)
    times = StartTimes(priors={}, otherwise=configured(STAGES))
    view = PlacementView(now_s=0.0, nodes=servers(4), start_stages=STAGES, times=times)
    told, even = (
        {r.name: r.score for r in hydraserve.place(request, replace(view, stage_bytes=known), params).rivals}
        for known in (by_layers, {})
    )
    longer_s = {num: told[f"{num} stages ({num} with full memory)"] - even[f"{num} stages ({num} with full memory)"]
                for num in (2, 3, 4)}  # fmt: skip
    assert longer_s == pytest.approx({2: 3.0 - 3.333, 3: 2.0 - 2.222, 4: 3.0 - 2.0}, abs=0.01), "the skew is a guess"


def test_one_server_where_its_link_is_fast_enough():
    decision = place(hydraserve, [server("node-1"), server("node-2", gbps=64), server("node-3")])
    assert [s.node_id for s in decision.stages] == ["node-2"]
    assert decision.stages[0].fetch_bytes == 0, "all of it"


@pytest.mark.parametrize("policy", [hydraserve, union, serverlessllm])
def test_nodes_that_are_given_no_limit_are_reckoned_with_the_rate_of_those_that_tell_none(policy):
    """A live node's prefetcher says 0, no limit."""
    decision = place(policy, [server("node-1", abilities=("emulated:stream",), gbps=0)])
    assert [s.node_id for s in decision.stages] == ["node-1"]
    assert {round(rival.score, 1) for rival in decision.rivals} == {6.4 if policy is serverlessllm else 7.5}


def test_a_link_whose_fetches_would_be_late_is_left_alone():
    """Section 4.2, Eq. 3."""
    busy = LinkLedger(bytes_per_s=8e9, fetches=(Fetch(fetch_id="f", left_bytes=20e9, deadline_at=3.0),))
    nodes = [server("node-1", gbps=64), server("node-2", gbps=64)]
    assert place(hydraserve, nodes, links={"node-1": busy}).node_id == "node-2"


def test_engines_that_serve_no_stages_get_none():
    assert len(place(hydraserve, servers(3, abilities=())).stages) == 1


def test_weights_in_host_memory_make_one_worker_of_it():
    """Section 8.3, the cache option."""
    cached = server("node-9", cached=(COPY,))
    decision = place(hydraserve, [server("node-1"), server("node-2"), cached])
    assert [s.node_id for s in decision.stages] == ["node-9"]
    assert decision.rivals[0].score == pytest.approx(2.0 + 1.5, abs=0.01), "nothing is fetched"
    assert place(serverlessllm, [server("node-1", gbps=64), cached]).node_id == "node-9"
    request = PlaceRequest(instance_id="i", model=SEVEN_B, num_required=2)
    view = PlacementView(now_s=0.0, nodes=[cached, server("node-8", cached=cached.cached)], start_stages=STAGES)
    assert len(hydraserve.place(request, view).stages) == 1, "stages would save nothing"


@pytest.mark.parametrize("policy", [hydraserve, union, serverlessllm])
def test_weights_on_a_fast_disk_make_one_worker_of_it_beside_busy_links(policy):
    """12 GB at 6 GB/s take 2 s."""
    nodes = [server(f"node-{n}") for n in range(40)]
    nodes[33] = server("node-33", on_disk=(COPY,), disk_bytes_per_s=6e9)
    busy = LinkLedger(bytes_per_s=2e9, fetches=(Fetch(fetch_id="f", left_bytes=20e9, deadline_at=3.0),))
    decision = place(policy, nodes, links={"node-33": busy})
    assert [s.node_id for s in decision.stages] == ["node-33"]


@pytest.mark.parametrize("policy", [hydraserve, serverlessllm])
def test_a_disk_that_is_slower_than_the_network_decides_nothing(policy):
    nodes = [server("node-1", on_disk=(COPY,), disk_bytes_per_s=0.2e9), server("node-2"), server("node-3")]
    assert "node-1" not in {s.node_id for s in place(policy, nodes).stages}


def test_where_nothing_fits_it_waits():
    """Erratum E19: never on a server that cannot hold it."""
    full = [replace(server("node-1"), gpus=a_node("node-1", gpus_mib=(24000,), grants={0: [("x", 20000)]}).gpus)]
    decision = place(hydraserve, full)
    assert decision.stages == () and decision.possible and not decision.is_late
    assert place(serverlessllm, full).reason == decision.reason


@pytest.mark.parametrize(
    ("gpus_gb", "ttft_s", "num_stages", "late"),
    [
        ((9, 9, 9), 7.5, 2, False),
        ((9, 9, 5), 7.5, 2, False),
        ((9, 9, 9), 1.0, 0, True),
        ((16, 5, 5), 7.5, 0, False),
        ((9,), 7.5, 0, False),
    ],
    ids=["three halves", "two halves", "halves that would be late", "one half and no other", "one half"],
)
def test_a_start_that_fits_as_stages_alone_waits_if_it_would_be_late(gpus_gb, ttft_s, num_stages, late):
    """17 GB; 2 s for the process, 3.3 s for a half, 3 s of prefill in two stages without full memory."""
    model = replace(SEVEN_B, slo=Slo(ttft_s=ttft_s + 1.0, tpot_s=0.2))
    decision = place(hydraserve, [server(f"node-{n}", gpus_gb=(gb,)) for n, gb in enumerate(gpus_gb)], model=model)
    assert (len(decision.stages), decision.is_late) == (num_stages, late)
    assert decision.reason.endswith("and a start in stages would be late") is late


def test_a_gpu_that_holds_the_model_exactly_is_large_enough():
    exact = replace(SEVEN_B, kv_bytes=24 * GB // MIB * MIB - WEIGHTS, slo=Slo())
    nodes = [server("node-1", abilities=()), server("node-2", abilities=(), gpus_gb=(9,))]
    decision = place(hydraserve, nodes, model=exact)
    assert decision.node_id == "node-1" and decision.reason.startswith("one worker")


def test_the_fastest_link_is_taken_where_engines_serve_no_stages():
    nodes = [server("node-1", gpus_gb=(9,)), server("node-2"), server("node-3", gbps=32)]
    nodes = [replace(node, abilities=("emulated:stream",)) for node in nodes]
    assert place(hydraserve, nodes).node_id == "node-3"


def test_stages_lie_where_they_can_grow_to_the_whole_model():
    small = server("node-0", gpus_gb=(16,))
    large = [server(f"node-{n}", grants={0: [("x", 14_000)]}) for n in (1, 2)]
    assert [s.node_id for s in place(hydraserve, [small, *large]).stages] == ["node-1", "node-2"]
    gone = [small, server("node-1", gpus_gb=(9,)), server("node-2", draining=True)]
    assert [s.node_id for s in place(hydraserve, gone).stages] == ["node-0", "node-1"], "no other GPU is large enough"


@pytest.mark.parametrize("view", [{}, {"reserved": {"node-1/0": 1}}])
def test_an_empty_gpu_goes_before_one_that_is_shared_or_promised(view):
    gpu = server("node-1", gpus_gb=(24, 25), grants={} if view else {0: [("x", 1)]})
    assert place(hydraserve, [gpu], **view).gpu_id == "node-1/1"


def test_a_model_of_two_gpus_starts_whole_on_the_node_that_is_ready_soonest():
    pair = replace(SEVENTY_B, kv_bytes=0, num_gpus=2)
    nodes = [server("node-0", gpus_gb=(80, 80)), server("node-1", gpus_gb=(80, 80), gbps=17)]
    (stage,) = place(hydraserve, nodes, model=pair).stages
    assert stage.gpu_ids == ("node-1/0", "node-1/1")
    assert place(serverlessllm, nodes, model=pair).rivals[0].score == pytest.approx(128 / 2.125 + 64 / 32)


@pytest.mark.parametrize(
    ("num_slow", "num_required", "max_stages", "ttft_s", "nodes"),
    [
        (2, 1, 4, 7.5, ["node-9"]),
        (2, 2, 4, 7.5, ["node-0", "node-1"]),
        (2, 2, 2, 7.5, ["node-0", "node-1"]),
        (2, 2, 1, 9.9, ["node-9"]),
        (1, 2, 4, 9.9, ["node-9"]),
        (2, 1, 4, 0.5, ["node-9"]),
        (2, 2, 4, 0.5, ["node-9"]),
    ],
    ids=[
        "it meets",
        "two wanted",
        "two of two",
        "no stages asked for",
        "one node of stages",
        "late",
        "late, two wanted",
    ],
)
def test_a_fast_node_without_stages_is_one_worker_unless_more_are_wanted_in_time(
    num_slow, num_required, max_stages, ttft_s, nodes
):
    fast = server("node-9", gbps=64, abilities=("emulated:stream",))
    view = PlacementView(now_s=0.0, nodes=[*servers(num_slow), fast], start_stages=STAGES,
                         times=StartTimes(priors={}, otherwise=configured(STAGES)))  # fmt: skip
    model = replace(SEVEN_B, slo=Slo(ttft_s=ttft_s, tpot_s=0.2))
    request = PlaceRequest(instance_id="i", model=model, num_required=num_required)
    params = hydraserve.HydraserveParams(allocation=AllocationParams(max_stages=max_stages))
    assert [s.node_id for s in hydraserve.place(request, view, params).stages] == nodes


def test_serverlessllm_grows_from_a_copy():
    rows = {"node-2": [an_instance("r-1", "llama", InstanceState.PREWARMED, gpu_id="node-2/0", replica=True)]}
    assert place(serverlessllm, [server("node-1", gbps=64), server("node-2")], dormant=rows).source == "r-1"


def test_policies_that_lay_out_starts_read_the_seconds_of_warm_inference():
    marked = {name for name in installed("placement") if wants_seconds(choose("placement", name))}
    assert {"hydraserve", "union"} <= marked and not {"first_fit", "serverlessllm"} & marked


@pytest.mark.parametrize("policy", [union, serverlessllm])
def test_of_many_nodes_alike_the_one_where_least_is_lost(policy):
    names = [f"node-{n}" for n in range(10, 30)]
    nodes = [server(name, grants={0: [(f"r-{name}", 20_000)]}) for name in names]
    rows = {n: [an_instance(f"r-{n}", "other", InstanceState.PREWARMED, gpu_id=f"{n}/0", replica=True)] for n in names}
    scores = {f"r-{name}": 30.0 - at for at, name in enumerate(names)}
    decision = place(policy, nodes, model=replace(SEVEN_B, slo=Slo()), is_awaited=False, dormant=rows, scores=scores)
    assert (decision.node_id, decision.drops) == ("node-29", ("r-node-29",))


def test_a_links_ledger_follows_the_declared_rate():
    node, times = server("node-1"), StartTimes()
    known = LinkLedger(bytes_per_s=1e9, since_s=3.0, fetches=(Fetch(fetch_id="f", left_bytes=1.0, deadline_at=9.0),))
    assert link_of(node, SEVEN_B, times, known, 5.0) == replace(known, bytes_per_s=2e9)
    assert link_of(node, SEVEN_B, times, None, 5.0) == LinkLedger(bytes_per_s=2e9, since_s=5.0)


def test_serverlessllm_counts_what_is_on_its_way_over_a_link():
    nodes = [server("node-1"), server("node-2")]
    busy = LinkLedger(bytes_per_s=2e9, fetches=(Fetch(fetch_id="f", left_bytes=20e9, deadline_at=3.0),))
    assert place(serverlessllm, nodes, links={"node-1": busy}).node_id == "node-2"


def test_union_grows_from_a_copy_else_lays_out_where_least_is_lost():
    grants = {0: [("r-1", 1000)]}
    nodes = [server(f"node-{n}", grants=grants if n < 2 else {0: [(f"r-{n}", 20000)]}, gbps=64) for n in range(4)]
    dormant = {
        f"node-{n}": [an_instance(f"r-{n}", "other", InstanceState.PREWARMED, gpu_id=f"node-{n}/0", replica=True)]
        for n in (2, 3)
    }
    full = [replace(n, gpus=a_node(n.node_id, gpus_mib=(24000,), grants={0: [("i", 23000)]}).gpus) for n in nodes[:2]]
    decision = place(union, [*full, *nodes[2:]], dormant=dormant, scores={"r-2": 3.0, "r-3": 1.0})
    assert (decision.node_id, decision.drops) == ("node-3", ("r-3",))
    mine = {"node-2": [replace(dormant["node-2"][0], model_key="llama")], "node-3": dormant["node-3"]}
    assert place(union, [*full, *nodes[2:]], dormant=mine).source == "r-2"


def test_an_objective_no_worker_keeps_is_no_reason_against_a_pipeline():
    """Our reading, where Algorithm 1 falls back to one late worker."""
    slow = replace(STAGES, decode_s=0.3)
    decision = place(hydraserve, servers(4), seconds={"llama": slow})
    assert len(decision.stages) > 1


def test_section_7_a_model_of_several_gpus_starts_in_stages_where_that_is_asked_for():
    """128 GB at 16 Gbit/s take 64 s, halves 36 s (1/0.9 of the mean): 40 s are met by two groups of four GPUs."""
    nodes = servers(2, gpus_gb=EIGHT_OF_80_GB)
    assert [len(s.gpu_ids) for s in place_large(nodes, hydraserve.HydraserveParams()).stages] == [4]
    decision = place_large(nodes)
    assert [(s.first_byte, s.fetch_bytes) for s in decision.stages] == [(0, 64 * GB), (64 * GB, 64 * GB)]
    assert [s.bytes_per_gpu for s in decision.stages] == [48 * GB, 24 * GB]  # the first may grow whole
    for stage in decision.stages:
        assert len(set(stage.gpu_ids)) == 4 and {g.rpartition("/")[0] for g in stage.gpu_ids} == {stage.node_id}
    assert "which meets its objectives" in decision.reason
    by_union = place_large(nodes, UNION_GROUPS, union)
    assert [s.gpu_ids for s in by_union.stages] == [s.gpu_ids for s in decision.stages]


def test_section_7_a_group_has_the_bytes_of_its_fullest_gpu():
    pair = replace(SEVENTY_B, kv_bytes=0, num_gpus=2)
    mixed = place(hydraserve, servers(2, gpus_gb=(20, 80, 80, 20)), HYDRASERVE_GROUPS, model=pair)
    assert [s.gpu_ids for s in mixed.stages] == [(f"node-{n}/1", f"node-{n}/2") for n in (0, 1)]
    lame = place(hydraserve, servers(2, gpus_gb=(80, 20)), HYDRASERVE_GROUPS, model=pair)
    assert lame.stages == () and not lame.is_late, "20 GB, of 32 for a half"


def test_section_7_the_option_is_written_behind_the_name():
    policy = choose("placement", "hydraserve:allocation.pipeline_over_tensor=true")
    assert len(place(policy, servers(2, gpus_gb=EIGHT_OF_80_GB), model=SEVENTY_B).stages) == 2


def test_a_group_starts_whole_where_host_memory_has_its_weights():
    cached = (CachedWeights(digest=SEVENTY_B.weights.digest, num_bytes=128 * GB),)
    nodes = [*servers(2, gpus_gb=EIGHT_OF_80_GB), server("node-2", gpus_gb=EIGHT_OF_80_GB, cached=cached)]
    assert [s.node_id for s in place_large(nodes).stages] == ["node-2"]


def test_groups_take_the_gpus_where_replicas_are_worth_least_and_drop_them_once():
    grants = {n: [("r-1" if n < 2 else "r-2", 50_000)] for n in range(4)}
    node = server("node-0", gpus_gb=(80,) * 6, gbps=8000, abilities=(), grants=grants)
    rows = [an_instance(r, "other", InstanceState.PREWARMED, gpu_id="node-0/0", replica=True) for r in ("r-1", "r-2")]
    view = {"dormant": {"node-0": rows}, "scores": {"r-1": 3.0, "r-2": 1.0}}
    decision = place_large([node], UNION_GROUPS, hydraserve.lay_out, **view)
    assert decision.stages[0].gpu_ids == tuple(f"node-0/{n}" for n in (2, 3, 4, 5)) and decision.drops == ("r-2",)


def test_w_full_workers_keep_what_shared_ones_miss():
    """Section 4.1, Eq. 2 with w = s."""
    tight = replace(SEVEN_B, slo=Slo(ttft_s=7.5, tpot_s=0.05))
    decision = place(hydraserve, servers(4), model=tight)
    assert len(decision.stages) == 2 and all(s.bytes_per_gpu == tight.memory_bytes for s in decision.stages)
