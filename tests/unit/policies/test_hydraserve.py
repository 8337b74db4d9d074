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
    allocate,
    ready_s,
)
from glowplug.policies.placement.links import Fetch, LinkLedger, admits, begin, finish, settle
from glowplug.policies.placement.shape import stage_bytes
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
        ledger = LinkLedger(bytes_per_s=GBIT16, fetches=(Fetch(fetch_id="a", left_bytes=left, deadline_at=8.0),))
        assert admits(ledger, 1e9, 100.0, 0.0) is wanted


def test_the_newcomer_must_be_in_time_too():
    """Erratum E17."""
    empty = LinkLedger(bytes_per_s=GBIT16)
    assert admits(empty, 6e9, 3.0, 0.0)
    assert not admits(empty, 6.1e9, 3.0, 0.0)
    assert admits(empty, 6.1e9, 3.0, 0.0, check_newcomer=False)


def test_pending_bytes_shrink_by_the_share_of_the_time():
    """Eq. 4: two on 2 GB/s get 3 GB each in 3 s; a finished one is gone."""
    ledger = begin(LinkLedger(bytes_per_s=GBIT16), Fetch(fetch_id="a", left_bytes=2.5e9, deadline_at=9), 0.0)
    ledger = begin(ledger, Fetch(fetch_id="b", left_bytes=5e9, deadline_at=9), 0.0)
    later = settle(ledger, 3.0)
    assert [(f.fetch_id, f.left_bytes) for f in later.fetches] == [("b", 2e9)]
    assert settle(later, 1.0) == later
    assert finish(later, "b", 3.0).fetches == ()
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
    layout = allocate(replace(LLAMA_7B, num_required=4), FOUR, 0.0)
    assert [worker.fetch_bytes for worker in layout.workers] == pytest.approx([12.5e9 / 4 / 0.9] * 4)


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
    alone = finish(ledger, "u", 2.0)
    assert alone.share() == 1e9 and [f.left_bytes for f in settle(alone, 4.0).fetches] == [6e9]
    assert admits(alone, 1e9, 3.5, 2.0)


def test_what_is_fetched_may_be_less_than_what_is_loaded():
    """Packed files: Eq. 5 with the bytes of each way."""
    server = ServerOffer(node_id="n", link=LinkLedger(bytes_per_s=1e9), pcie_bytes_per_s=2e9, streams=False)
    assert ready_s(StageSeconds(), 4e9, server, AllocationParams()) == pytest.approx(4.0 + 2.0)
    assert ready_s(StageSeconds(), 1e9, server, AllocationParams(), loaded_bytes=4e9) == pytest.approx(1.0 + 2.0)


@pytest.mark.parametrize(("num_bytes", "num_stages"), [(1, 4), (10, 3), (40_000_000, 4), (7, 1)])
def test_the_parts_of_the_stages_are_the_whole(num_bytes: int, num_stages: int):
    model = a_model(weights=WeightsRef(uri="s3://w", num_bytes=num_bytes))
    parts = [stage_bytes(model, number, num_stages) for number in range(num_stages)]
    assert parts[0][0] == 0 and parts[-1][1] == 0, "the last one ends where the weights do"
    assert [last for _, last in parts[:-1]] == [first for first, _ in parts[1:]]
