"""HydraServe's published formulas with hand-worked numbers."""

import math
from dataclasses import replace

import pytest

from glowplug.domain.model import WeightsRef
from glowplug.policies.placement.hydraserve_allocation import (
    AllocationParams,
    ColdStart,
    ServerOffer,
    StageSeconds,
    after_fetch_s,
    allocate,
    ready_s,
)
from glowplug.policies.placement.links import Fetch, LinkLedger, admits, begin, finish, settle
from glowplug.policies.placement.shape import bytes_per_gpu, parts_of, stage_bytes, weights_per_gpu
from tests.fleet_builder import a_model

GB = 10**9
GBIT16 = 2e9  # bytes a second
STAGES = StageSeconds(container_s=0.5, cuda_s=0.5, library_s=1.0, hop_s=0.001, prefill_s=1.5, decode_s=0.042)
LLAMA_7B = ColdStart(weight_bytes=int(12.5 * GB), kv_bytes=5 * GB, slo_ttft_s=7.5, slo_tpot_s=0.2, stages=STAGES)


def a_server(name, gpus=1, free=24 * GB, rate=GBIT16, fetches=(), shared=False):
    ids = [f"{name}/{n}" for n in range(gpus)]
    return ServerOffer(
        node_id=name,
        link=LinkLedger(bytes_per_s=rate, fetches=tuple(fetches)),
        pcie_bytes_per_s=12e9,
        gpus=tuple((gpu, free) for gpu in ids),
        empty_gpus=frozenset() if shared else frozenset(ids),
    )


FOUR = [a_server(f"n{n}") for n in range(4)]
EVEN = AllocationParams(skew=1.0, chunk_bytes=0)


# section 4.2


def test_every_fetch_must_be_in_time_when_one_more_comes():
    """Eq. 3: with 8 s left, half of 2 GB/s is enough for 8 GB, not for 8.1."""
    for left, wanted in ((8.0e9, True), (8.1e9, False)):
        ledger = LinkLedger(
            bytes_per_s=GBIT16, since_s=1.0, fetches=(Fetch(fetch_id="a", left_bytes=left, deadline_at=9.0),)
        )
        assert admits(ledger, 1e9, 100.0, 1.0) is wanted


def test_the_newcomer_must_be_in_time_too():
    """Erratum E17."""
    empty = LinkLedger(bytes_per_s=GBIT16)
    assert admits(empty, 6e9, 3.0, 0.0)
    assert not admits(empty, 6.1e9, 3.0, 0.0)
    assert not admits(empty, 6e9, 3.0, 0.1)
    assert admits(empty, 6.1e9, 3.0, 0.0, check_newcomer=False)


def test_pending_bytes_shrink_by_the_share_of_the_time():
    """Eq. 4: two on 2 GB/s get 3 GB each in 3 s; a finished one is gone."""
    ledger = begin(LinkLedger(bytes_per_s=GBIT16), Fetch(fetch_id="a", left_bytes=2.5e9, deadline_at=9), 0.0)
    ledger = begin(ledger, Fetch(fetch_id="b", left_bytes=5e9, deadline_at=9), 0.0)
    later = settle(ledger, 3.0)
    assert [(f.fetch_id, f.left_bytes) for f in later.fetches] == [("b", 2e9)]
    assert settle(later, 1.0) == later
    assert finish(later, "b", 3.0).fetches == ()
    assert settle(finish(later, "b", 3.0), 4.0) == LinkLedger(bytes_per_s=GBIT16, since_s=4.0)
    assert [f.left_bytes for f in settle(ledger, 0.5).fetches] == [2e9, 4.5e9]
    assert [f.fetch_id for f in settle(ledger, 2.5).fetches] == ["b"], "a has just ended"
    assert later.share() == 1e9


# sections 4.1 and 5.2


def laid_out(servers=FOUR, params=EVEN, **start):
    return allocate(replace(LLAMA_7B, **start), servers, 0.0, params)


SMALL = [a_server(f"n{n}", free=9 * GB) for n in range(4)]
LAYOUTS = {  # servers, what is asked for -> stages, full-memory workers, seconds to the first token and to each further
    "at 16 Gbit/s one worker takes 6.25 s to fetch": (FOUR[:1], {}, 1, 1, 6.25 + 1.5, 0.042),
    # s = 2, w = 1: max(t_cc + t_cu + max(M/sp, t_l), M/sb) + t_p (s - w + w/s) + t_n (s - 1); t_d (s - w + w/s) + t_n s
    "two stages meet what one misses (Eq. 5, E13, E20)": (FOUR, {}, 2, 1, 3.125 + 2.25 + 0.001, 0.063 + 0.002),
    "and two servers are enough for them": (FOUR[:2], {}, 2, 1, 3.125 + 2.25 + 0.001, 0.063 + 0.002),
    "full workers compute their share (t_d (0 + 2/2))": (
        FOUR,
        {"slo_tpot_s": 0.06},
        2,
        2,
        3.125 + 1.501,
        0.042 + 0.002,
    ),
    "one full worker is as many as 70 ms take": (FOUR, {"slo_tpot_s": 0.07}, 2, 1, 5.376, 0.065),
    "stages that only fit when small": (SMALL, {}, 2, 0, 3.125 + 3.0 + 0.001, 0.084 + 0.002),
    "a group as large as wanted (6.1)": (FOUR, {"num_required": 4, "slo_ttft_s": 12}, 4, 4, 2.0 + 1.503, 0.046),
}


@pytest.mark.parametrize(("servers", "asked", "stages", "full", "ttft_s", "tpot_s"), LAYOUTS.values(), ids=LAYOUTS)
def test_how_a_start_is_laid_out(servers, asked, stages, full, ttft_s, tpot_s):
    layout = laid_out(servers, **asked)
    assert (layout.num_stages, layout.num_full) == (stages, full)
    assert (layout.ttft_s, layout.tpot_s) == (pytest.approx(ttft_s), pytest.approx(tpot_s))
    assert layout.meets_slo is (stages > 1)
    assert len({worker.node_id for worker in layout.workers}) == stages
    assert [worker.is_full for worker in layout.workers] == [True] * full + [False] * (stages - full)
    assert {worker.num_bytes for worker in layout.workers if worker.is_full} <= {int(17.5 * GB)}
    assert {worker.num_bytes for worker in layout.workers if not worker.is_full} <= {int(17.5 * GB) // stages}


def test_an_objective_is_met_to_the_last_moment():
    just = {"slo_ttft_s": 7.75, "slo_tpot_s": 0.042}
    assert laid_out(FOUR[:1], **just).meets_slo
    assert not laid_out(FOUR[:1], **just | {"slo_tpot_s": 0.0419}).meets_slo


def test_a_layout_says_what_it_takes_and_whether_that_is_enough():
    def said(**asked):
        return laid_out(FOUR[:2], **asked).reason

    two = "2 stages (1 with full memory) are expected to give the first token after 5.38 s and each further one 0.065 s"
    assert said() == f"{two} later, which meets its objectives"
    one = "one worker is expected to give the first token after 7.75 s and each further one 0.042 s later"
    assert laid_out(FOUR[:1]).reason == f"{one}, which misses its objectives"
    assert laid_out(FOUR[:1], slo_ttft_s=math.inf).reason == f"{one}, which meets its objectives"
    assert said(slo_ttft_s=math.inf, slo_tpot_s=math.inf) == f"{one}, and it has no objectives to meet"
    assert said(slo_ttft_s=20.0, stages=replace(STAGES, decode_s=0.0)).endswith(
        "after 7.75 s, which meets its objectives"
    )


def rivals(*args, **asked):
    return {rival.name: rival.why for rival in laid_out(*args, **asked).rivals}


def test_layouts_are_rivals_whose_fetches_would_be_in_time():
    """One worker's 6.25 s are not, of 7.5 s with 1.5 of prefill; two stages without full memory have 7.5 - 3 s."""
    assert rivals(FOUR[:2]) == {f"2 stages ({w} with full memory)": "it meets the objectives" for w in ("none", 1, 2)}
    tight = rivals(FOUR[:2], slo_tpot_s=0.06)
    assert tight["2 stages (1 with full memory)"] == "it misses the objectives"
    assert list(rivals(FOUR[:1], slo_ttft_s=20)) == ["one worker", LITTLE]


def test_a_layout_is_admitted_by_its_largest_part():
    """Two full workers have 6 s to fetch and, without streaming, to load."""
    alone = ["one worker on n0", "one worker on n1"]
    parts = {2: [int(10.5 * GB), 2 * GB]}
    assert list(rivals(FOUR[:2], parts=parts)) == ["2 stages (2 with full memory)"], "5.25 s"
    assert list(rivals([replace(server, streams=False) for server in FOUR[:2]], parts=parts)) == alone, "0.9 s more"
    assert list(rivals(FOUR[:2], parts={2: [int(12.1 * GB), GB]})) == alone


LITTLE = "one worker with little memory"


@pytest.mark.parametrize(("num_gpus", "names"), [(1, ["one worker on n0"]), (4, ["one worker", LITTLE])])
def test_an_engine_that_loads_after_the_fetch_needs_its_bytes_that_much_sooner(num_gpus, names):
    """8.5 s less 1.5 of prefill and 1.04 of loading, a quarter of that on four GPUs; the fetch takes 6.25."""
    server = replace(a_server("n0", gpus=4), streams=False)
    assert list(rivals([server], slo_ttft_s=8.5, num_gpus=num_gpus)) == names


def test_a_fetch_that_has_ended_takes_nothing_of_its_link():
    ended = a_server("n0", fetches=(Fetch(fetch_id="x", left_bytes=4e9, deadline_at=9.0),))
    assert allocate(LLAMA_7B, [ended], 2.0, EVEN).ttft_s == pytest.approx(6.25 + 1.5)


@pytest.mark.parametrize(
    ("one", "other"), [((0.5, 0.25), (0.6, 0.1)), ((0.5, 0.25), (0.3, 0.4))], ids=["slower link", "slower PCIe"]
)
def test_the_nearest_server_is_the_one_with_the_least_seconds_over_link_and_pcie(one, other):
    offers = [
        replace(a_server(name, rate=1e9 / link_s), pcie_bytes_per_s=1e9 / pcie_s)
        for name, (link_s, pcie_s) in (("n0", one), ("n1", other))
    ]
    assert [w.node_id for w in laid_out(offers, slo_ttft_s=math.inf).workers] == ["n1"]


def test_on_a_server_least_is_lost_then_an_empty_gpu_is_taken_then_the_fullest_that_fits():
    def taken(gpus, empty, num_gpus=1, **lost):
        offer = replace(
            a_server("n0"), gpus=tuple((g, gb * GB) for g, gb in gpus.items()), empty_gpus=frozenset(empty), lost=lost
        )
        (worker,) = laid_out([offer], replace(EVEN, max_stages=1), kv_bytes=int(5.5 * GB), num_gpus=num_gpus).workers
        return worker.gpu_ids

    assert taken({"a": 20, "b": 24, "c": 24}, "bc", b=1.0) == ("c",)
    assert taken({"a": 20, "b": 24}, "b") == ("b",)
    assert taken({"a": 24, "b": 18, "c": 17}, "abc") == ("b",)
    assert taken({"c": 9, "b": 24, "a": 24, "d": 20}, "abc", num_gpus=2) == ("a", "c")


SOONEST = replace(EVEN, soonest=True)


def test_without_an_objective_the_smallest_of_the_soonest_layouts():
    """Four full stages are there after 3.50 s, three after 3.59."""
    alone = laid_out(slo_ttft_s=math.inf)
    assert (alone.num_stages, alone.ttft_s) == (1, pytest.approx(7.75)), "the paper's: as few as meet the objectives"
    assert laid_out(slo_ttft_s=math.inf, params=SOONEST) == alone, "no request waits for it"
    found = laid_out(slo_ttft_s=math.inf, is_awaited=True, params=SOONEST)
    assert (found.num_stages, found.num_full, found.ttft_s) == (3, 3, pytest.approx(12.5 / 3 / 2 + 1.502))
    assert laid_out(is_awaited=True, params=SOONEST).num_stages == 2, "an objective says when it is soon enough"
    kept = laid_out(slo_ttft_s=math.inf, slo_tpot_s=0.0445, is_awaited=True, params=SOONEST)
    assert (kept.num_stages, kept.num_full) == (2, 2), "further tokens have an objective of their own"


def test_without_an_objective_stages_lie_where_they_can_grow():
    mixed = [*FOUR[:1], *SMALL[1:]]
    awaited = {"slo_ttft_s": math.inf, "is_awaited": True, "params": SOONEST}
    assert laid_out(mixed, **awaited).num_full == 1
    quick = replace(STAGES, prefill_s=0.0)
    assert laid_out(stages=quick, **awaited).num_full == 3, "as many as can"
    assert laid_out(mixed, stages=quick, **awaited).num_full == 1
    assert laid_out(SMALL, **awaited).num_full == 0


def test_without_an_objective_one_worker_where_stages_save_little():
    near = [replace(server, link=LinkLedger(bytes_per_s=50e9)) for server in FOUR]
    assert laid_out(near, slo_ttft_s=math.inf, is_awaited=True, params=SOONEST).num_stages == 1


@pytest.mark.parametrize(
    ("params", "ttft_s"),
    [({"overlap": False}, 0.5 + 0.5 + 1.0 + 6.25 + 12.5 / 12 + 1.5), ({"chunk_bytes": 1.2e9}, 6.25 + 0.1 + 1.5)],
    ids=["the serial start of Eq. 1, without overlapping (E14)", "loading ends after the last chunk has come (E15)"],
)
def test_what_one_worker_takes_otherwise(params, ttft_s):
    assert laid_out(FOUR[:1], replace(EVEN, **params)).ttft_s == pytest.approx(ttft_s)


def test_the_largest_stage_is_a_ninth_above_the_mean():
    """Erratum E20: the published code divides by 0.9."""
    for num in (2, 4):
        layout = allocate(replace(LLAMA_7B, num_required=num, slo_ttft_s=20.0), FOUR, 0.0)
        assert [worker.fetch_bytes for worker in layout.workers] == pytest.approx([12.5e9 / num / 0.9] * num)
    serial = replace(EVEN, overlap=False, skew=0.9, max_stages=2)
    took = laid_out(params=serial, num_required=2, slo_ttft_s=20.0, file_bytes=10 * GB)
    assert took.ttft_s == pytest.approx(2.0 + 5 / 0.9 / 2 + 6.25 / 0.9 / 12 + 1.501), "fetched and loaded"
    parts = {2: [6 * GB, 4 * GB]}
    took = laid_out(params=serial, num_required=2, slo_ttft_s=20.0, file_bytes=10 * GB, parts=parts)
    assert took.ttft_s == pytest.approx(2.0 + 3.0 + 12.5 * 0.6 / 12 + 1.501)


def test_stages_of_layers_whose_sizes_are_known_are_taken_as_they_are():
    """Embeddings enlarge the ends: 5 GB at 2 GB/s, more than the 2 s that the process takes."""
    parts = [5 * GB, int(2.5 * GB), int(2.5 * GB), 5 * GB]
    layout = allocate(replace(LLAMA_7B, num_required=4, parts={4: parts}), FOUR, 0.0)
    assert [worker.fetch_bytes for worker in layout.workers] == parts
    equal = allocate(replace(LLAMA_7B, num_required=4, parts={2: [1, 1]}), FOUR, 0.0)
    assert layout.ttft_s - equal.ttft_s == pytest.approx(2.5 - 2.0, abs=0.01)


def test_section_7_a_stage_is_a_tensor_group_of_one_server():
    """70B on four GPUs: one fetch a server; each of four lanes carries a quarter of a half."""
    large = replace(LLAMA_7B, weight_bytes=128 * GB, kv_bytes=64 * GB, num_gpus=4, slo_ttft_s=40.0)
    crowded = ServerOffer(
        node_id="n0",
        link=LinkLedger(bytes_per_s=GBIT16),
        pcie_bytes_per_s=12e9,
        gpus=tuple((f"n0/{n}", (80 if n < 3 else 20) * GB) for n in range(8)),
    )
    servers = [crowded, *(a_server(f"n{n}", gpus=8, free=80 * GB) for n in (1, 2, 3))]
    alone = allocate(large, servers, 0.0, replace(EVEN, max_stages=1))
    assert not alone.meets_slo and alone.ttft_s == pytest.approx(64.0 + 1.5)
    layout = allocate(large, servers, 0.0, EVEN)
    assert [(w.node_id, w.gpu_ids) for w in layout.workers] == [
        (node, tuple(f"{node}/{n}" for n in range(4))) for node in ("n1", "n2")
    ]
    assert [w.num_bytes for w in layout.workers] == [48 * GB, 24 * GB] and layout.num_full == 1
    assert layout.ttft_s == pytest.approx(32.0 + 1.5 * 1.5 + 0.001)
    fast = [replace(s, link=LinkLedger(bytes_per_s=1e12)) for s in servers]
    assert allocate(large, fast, 0.0, EVEN).ttft_s == pytest.approx(1.0 + 128 / 4 / 12 + 1.5)


def test_section_7_groups_of_one_server_share_its_card():
    """Eq. 3 counts one fetch per server."""
    large = replace(LLAMA_7B, weight_bytes=32 * GB, num_gpus=4, slo_ttft_s=20.0)
    busy = Fetch(fetch_id="other group", left_bytes=30e9, deadline_at=100.0)
    servers = [a_server("n1", gpus=8, fetches=[busy]), a_server("n2", gpus=8)]
    assert [w.node_id for w in allocate(large, servers, 0.0, EVEN).workers] == ["n2"]
    assert allocate(large, servers[:1], 0.0, EVEN).ttft_s == pytest.approx(32.0 + 1.5)


def test_fetches_under_way_halve_what_a_newcomer_gets():
    """Erratum E16."""
    busy = a_server("n0", fetches=[Fetch(fetch_id="x", left_bytes=1e9, deadline_at=100.0)])
    layout = laid_out([busy, *FOUR[1:3]])
    assert {w.node_id for w in layout.workers} == {"n1", "n2"}


def test_a_server_whose_fetch_would_be_late_is_not_used():
    """Eq. 3 as a filter: its 4 GB are due in 2.5 s and would get half the link."""
    tight = a_server("n0", rate=4e9, fetches=[Fetch(fetch_id="x", left_bytes=6e9, deadline_at=2.5)])
    layout = laid_out([tight, *FOUR[1:3]])
    assert {w.node_id for w in layout.workers} == {"n1", "n2"}
    careless = laid_out([tight, *FOUR[1:3]], replace(EVEN, check_contention=False))
    assert "n0" in {w.node_id for w in careless.workers}


def test_who_is_late_anyway_goes_where_nobody_else_becomes_late_and_says_so_where_it_must():
    """Eq. 3 binds Algorithm 1's fallback too (erratum E19)."""
    tight = Fetch(fetch_id="a", left_bytes=11e9, deadline_at=5.0)
    loose = Fetch(fetch_id="b", left_bytes=7e9, deadline_at=50.0)
    late = replace(LLAMA_7B, waited_s=7.4)
    fast_but_tight, slow = a_server("n0", rate=4e9, fetches=(tight,)), a_server("n1", fetches=(loose, loose))
    layout = allocate(late, [fast_but_tight, slow], 0.0)
    assert not layout.meets_slo and layout.workers[0].node_id == "n1" and "another" not in layout.reason
    layout = allocate(late, [fast_but_tight], 0.0)
    assert layout.workers[0].node_id == "n0" and "makes another start late" in layout.reason


def test_who_is_late_everywhere_is_told_what_each_server_would_have_taken():
    """Alone on a link 6.25 s and the prefill."""
    busy = a_server("n1", fetches=(Fetch(fetch_id="a", left_bytes=1e9, deadline_at=50.0),))
    full = a_server("n2", free=GB)
    layout = allocate(replace(LLAMA_7B, waited_s=7.4), [busy, a_server("n0"), full], 0.0, replace(EVEN, max_stages=1))
    assert [(r.name, pytest.approx(r.score)) for r in layout.rivals] == [
        ("one worker on n0", 6.25 + 1.5),
        ("one worker on n1", 12.5 + 1.5),
    ]


def test_no_server_no_layout():
    """Erratum E19."""
    assert laid_out([a_server("n0", free=4 * GB)]) is None
    assert laid_out([]) is None


def test_what_was_waited_counts_against_the_objective():
    late = laid_out(waited_s=2.0)
    assert late.num_stages > 2 or late.num_full > 0
    assert not laid_out(waited_s=20.0).meets_slo


def test_a_fetch_in_the_background_takes_what_others_leave_and_delays_none():
    """Neither in Eq. 3 nor in the shares of Eq. 4."""
    rest = Fetch(fetch_id="rest", left_bytes=8e9, deadline_at=float("inf"), is_background=True)
    urgent = Fetch(fetch_id="u", left_bytes=4e9, deadline_at=4.0)
    ledger = begin(begin(LinkLedger(bytes_per_s=1e9), rest, 0.0), urgent, 0.0)
    assert ledger.share() == 0.5e9 and not admits(ledger, 1.0, 100.0, 0.0), "u needs the link to itself"
    assert [f.left_bytes for f in settle(ledger, 1.0).fetches] == [8e9, 3e9]
    assert [f.left_bytes for f in settle(ledger, 5.0).fetches] == [8e9]
    alone = finish(ledger, "u", 2.0)
    assert alone.share() == 1e9 and [f.left_bytes for f in settle(alone, 4.0).fetches] == [6e9]
    assert admits(alone, 1e9, 3.5, 2.0)


def test_what_is_fetched_may_be_less_than_what_is_loaded():
    """Packed files: Eq. 5 with the bytes of each way."""
    server = ServerOffer(node_id="n", link=LinkLedger(bytes_per_s=1e9), pcie_bytes_per_s=2e9, streams=False)
    assert ready_s(StageSeconds(), 4e9, server, AllocationParams()) == pytest.approx(4.0 + 2.0)
    assert ready_s(StageSeconds(), 1e9, server, AllocationParams(), loaded_bytes=4e9) == pytest.approx(1.0 + 2.0)


WARM = StageSeconds(container_s=1.0, cuda_s=2.0, library_s=4.0, warmup_s=8.0)
READY = {  # streams, overlaps, bytes to fetch and to load, chunk -> seconds on two GPUs, with 8 of warm-up
    "all one after another": (True, False, 16, 64, 1, 7 + 16 + 16 + 8),
    "process before fetch, then the load": (False, True, 6, 64, 1, 7 + 16 + 8),
    "fetch before process, then the load": (False, True, 16, 64, 1, 16 + 16 + 8),
    "libraries beside the load": (True, True, 1, 4, 1, 3 + 4 + 8),
    "the load": (True, True, 1, 64, 1, 3 + 16 + 8),
    "the fetch and its last chunk": (True, True, 32, 64, 6, 32 + 3 + 8),
    "the fetch and all, of less than a chunk": (True, True, 32, 64, 100, 32 + 16 + 8),
}


@pytest.mark.parametrize(("streams", "overlap", "fetched", "loaded", "chunk", "seconds"), READY.values(), ids=READY)
def test_a_worker_is_warm_when_the_slowest_of_its_ways_ends(streams, overlap, fetched, loaded, chunk, seconds):
    server = ServerOffer(node_id="n", link=LinkLedger(bytes_per_s=1e9), pcie_bytes_per_s=2e9, streams=streams)
    params = AllocationParams(overlap=overlap, chunk_bytes=chunk * 1e9)
    assert ready_s(WARM, fetched * 1e9, server, params, 2, loaded * 1e9) == pytest.approx(seconds)
    assert ready_s(StageSeconds(), fetched * 1e9, replace(server, stages=WARM), params, 2, loaded * 1e9) == seconds


def test_what_follows_the_last_byte_is_the_load_or_a_streamed_ones_tail_and_the_warm_up():
    server = ServerOffer(node_id="n", link=LinkLedger(bytes_per_s=1e9), pcie_bytes_per_s=2e9)
    assert after_fetch_s(replace(WARM, tail_s=0.5), 4e9, server) == 8.5
    assert after_fetch_s(replace(WARM, tail_s=0.5), 4e9, replace(server, streams=False)) == 10.0


@pytest.mark.parametrize(
    ("known", "num_stages", "parts"),
    [
        ((7, 5), 2, (7, 5)),
        ((7, 5, 4, 4, 4, 3, 3, 3, 3), 4, (3, 3, 3, 3)),
        ((7, 5, 4, 4, 4), 3, (4, 4, 4)),
        ((7, 5, 4, 4), 3, ()),
        ((7, 5, 4, 0, 8), 3, ()),
        ((7, 5), 1, ()),
        ((), 2, ()),
        ((11, 1), 2, (11, 1)),
    ],
)
def test_each_number_of_stages_has_its_parts_where_all_are_known(known, num_stages, parts):
    assert parts_of(known, num_stages) == parts


def test_bytes_are_divided_among_the_gpus_of_all_stages_and_rounded_up():
    model = a_model(weights_bytes=25, kv_bytes=11, num_gpus=2)
    assert [weights_per_gpu(model, num) for num in (1, 2, 4)] == [13, 7, 4]
    assert [bytes_per_gpu(model, num) for num in (1, 2, 4)] == [18, 9, 5]


@pytest.mark.parametrize(("num_bytes", "num_stages"), [(1, 4), (10, 3), (40_000_000, 4), (7, 1)])
def test_the_parts_of_the_stages_are_the_whole(num_bytes: int, num_stages: int):
    model = a_model(weights=WeightsRef(uri="s3://w", num_bytes=num_bytes))
    parts = [stage_bytes(model, number, num_stages) for number in range(num_stages)]
    assert parts[0][0] == 0 and parts[-1][1] == 0, "the last one ends where the weights do"
    assert [last for _, last in parts[:-1]] == [first for first, _ in parts[1:]]
