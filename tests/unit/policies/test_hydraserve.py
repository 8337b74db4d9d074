"""HydraServe's published formulas, section by section, with numbers worked by hand."""

from dataclasses import replace

import pytest

from glowplug.policies.placement.hydraserve_allocation import (
    AllocationParams,
    ColdStart,
    ServerOffer,
    StageSeconds,
    allocate,
)
from glowplug.policies.placement.links import Fetch, LinkLedger, admits, begin, finish, settle

GB = 10**9
GBIT16 = 2e9  # bytes a second
STAGES = StageSeconds(container_s=0.5, cuda_s=0.5, library_s=1.0, hop_s=0.001, prefill_s=1.5, decode_s=0.042)
LLAMA_7B = ColdStart(
    weight_bytes=int(12.5 * GB),
    kv_bytes=5 * GB,
    slo_ttft_s=7.5,
    slo_tpot_s=0.2,
    stages=STAGES,
)


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
    """Eq. 4: two on 2 GB/s get 3 GB each in 3 s; the one that has it all is gone."""
    ledger = begin(LinkLedger(bytes_per_s=GBIT16), Fetch(fetch_id="a", left_bytes=2.5e9, deadline_at=9), 0.0)
    ledger = begin(ledger, Fetch(fetch_id="b", left_bytes=5e9, deadline_at=9), 0.0)
    later = settle(ledger, 3.0)
    assert [(f.fetch_id, f.left_bytes) for f in later.fetches] == [("b", 2e9)]
    assert settle(later, 1.0) == later
    assert finish(later, "b", 3.0).fetches == ()
    assert later.share() == 1e9


# sections 4.1 and 5.2


def test_one_worker_misses_what_four_meet():
    """At 16 Gbps a 7B takes 6.25 s to fetch by one worker; with the prefill that is past 7.5 s."""
    alone = allocate(LLAMA_7B, FOUR[:1], 0.0, EVEN)
    assert not alone.meets_slo and alone.num_stages == 1
    assert alone.ttft_s == pytest.approx(6.25 + 1.5)
    layout = allocate(LLAMA_7B, FOUR, 0.0, EVEN)
    assert layout.meets_slo and layout.num_stages == 2
    assert len({w.node_id for w in layout.workers}) == 2


def test_the_largest_stage_is_a_ninth_above_the_mean():
    """Stages are never equal; the published code divides by 0.9 (erratum E20)."""
    layout = allocate(replace(LLAMA_7B, num_required=4), FOUR, 0.0)
    assert [worker.fetch_bytes for worker in layout.workers] == pytest.approx([12.5e9 / 4 / 0.9] * 4)


def test_eq_5_term_by_term():
    """s = 2, w = 1: max(t_cc + t_cu + max(M/sp, t_l), M/sb) + t_p (s - w + w/s) + t_n (s - 1); TPOT t_d (s - w + w/s) +
    t_n s (erratum E13). One full-memory worker, since one instance is to become of it (erratum E20)."""
    layout = allocate(LLAMA_7B, FOUR[:2], 0.0, EVEN)
    assert (layout.num_stages, layout.num_full) == (2, 1)
    assert layout.ttft_s == pytest.approx(max(1.0 + max(6.25e9 / 12e9, 1.0), 3.125) + 1.5 * 1.5 + 0.001)
    assert layout.tpot_s == pytest.approx(0.042 * 1.5 + 0.001 * 2)


def test_section_7_a_stage_is_a_tensor_group_of_one_server():
    """70B on four GPUs: of servers of eight, three have four that are large enough; two halves meet what one start
    misses, with one fetch a server, and the four lanes of each carry a quarter of its half."""
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
    """Eq. 3 counts one fetch per server, whatever the GPUs of its group; a second group there gets half of the card."""
    large = replace(LLAMA_7B, weight_bytes=32 * GB, num_gpus=4, slo_ttft_s=20.0)
    busy = Fetch(fetch_id="other group", left_bytes=30e9, deadline_at=100.0)
    servers = [a_server("n1", gpus=8, fetches=[busy]), a_server("n2", gpus=8)]
    assert [w.node_id for w in allocate(large, servers, 0.0, EVEN).workers] == ["n2"]
    assert allocate(large, servers[:1], 0.0, EVEN).ttft_s == pytest.approx(32.0 + 1.5)


def test_full_memory_workers_compute_their_share():
    """TPOT 60 ms is met by two full workers (t_d (0 + 2/2)), not by low-memory ones (t_d 2)."""
    strict = replace(LLAMA_7B, slo_tpot_s=0.06)
    layout = allocate(strict, FOUR, 0.0, EVEN)
    assert (layout.num_stages, layout.num_full) == (2, 2)
    assert layout.tpot_s == pytest.approx(0.042 + 0.002)


def test_the_serial_start_of_eq_1_is_slower():
    """Erratum E14: the ablation without overlapping."""
    serial = allocate(LLAMA_7B, FOUR[:1], 0.0, replace(EVEN, overlap=False))
    assert serial.ttft_s == pytest.approx(0.5 + 0.5 + 1.0 + 6.25 + 12.5 / 12 + 1.5)


def test_loading_cannot_end_before_the_last_chunk_has_come():
    """Erratum E15."""
    layout = allocate(LLAMA_7B, FOUR[:1], 0.0, replace(EVEN, chunk_bytes=1.2e9))
    assert layout.ttft_s == pytest.approx(6.25 + 0.1 + 1.5)


def test_fetches_under_way_halve_what_a_newcomer_gets():
    """Erratum E16: the busy server is left alone."""
    busy = a_server("n0", fetches=[Fetch(fetch_id="x", left_bytes=1e9, deadline_at=100.0)])
    layout = allocate(LLAMA_7B, [busy, *FOUR[1:3]], 0.0, EVEN)
    assert {w.node_id for w in layout.workers} == {"n1", "n2"}


def test_a_server_whose_fetch_would_be_late_is_not_used():
    """Eq. 3 as a filter: its 4 GB are due in 2.5 s and would get half the link."""
    tight = a_server("n0", rate=4e9, fetches=[Fetch(fetch_id="x", left_bytes=6e9, deadline_at=2.5)])
    layout = allocate(LLAMA_7B, [tight, *FOUR[1:3]], 0.0, EVEN)
    assert {w.node_id for w in layout.workers} == {"n1", "n2"}
    careless = allocate(LLAMA_7B, [tight, *FOUR[1:3]], 0.0, replace(EVEN, check_contention=False))
    assert "n0" in {w.node_id for w in careless.workers}


def test_who_is_late_anyway_goes_where_nobody_else_becomes_late_and_says_so_where_it_must():
    """Eq. 3 binds the fallback of Algorithm 1 too (erratum E19)."""
    tight = Fetch(fetch_id="a", left_bytes=11e9, deadline_at=5.0)
    loose = Fetch(fetch_id="b", left_bytes=7e9, deadline_at=50.0)
    late = replace(LLAMA_7B, waited_s=7.4)
    fast_but_tight, slow = a_server("n0", rate=4e9, fetches=(tight,)), a_server("n1", fetches=(loose, loose))
    layout = allocate(late, [fast_but_tight, slow], 0.0)
    assert not layout.meets_slo and layout.workers[0].node_id == "n1" and "another" not in layout.reason
    layout = allocate(late, [fast_but_tight], 0.0)
    assert layout.workers[0].node_id == "n0" and "makes another start late" in layout.reason


def test_who_is_late_everywhere_is_told_what_each_server_would_have_taken():
    """Alone on a link 6.25 s and the prefill; beside one fetch the link is half."""
    busy = a_server("n1", fetches=(Fetch(fetch_id="a", left_bytes=1e9, deadline_at=50.0),))
    full = a_server("n2", free=GB)
    layout = allocate(replace(LLAMA_7B, waited_s=7.4), [busy, a_server("n0"), full], 0.0, replace(EVEN, max_stages=1))
    assert [(r.name, pytest.approx(r.score)) for r in layout.rivals] == [
        ("one worker on n0", 6.25 + 1.5),
        ("one worker on n1", 12.5 + 1.5),
    ]


def test_memory_of_full_and_low_workers():
    layout = allocate(replace(LLAMA_7B, slo_tpot_s=0.07), FOUR, 0.0, EVEN)
    assert (layout.num_stages, layout.num_full) == (2, 1)
    assert [w.num_bytes for w in layout.workers] == [int(17.5 * GB), int(8.75 * GB)]
    assert [w.is_full for w in layout.workers] == [True, False]


def test_stages_that_only_fit_when_small_are_found():
    small = [a_server(f"n{n}", free=9 * GB) for n in range(4)]
    layout = allocate(LLAMA_7B, small, 0.0, EVEN)
    assert (layout.num_stages, layout.num_full) == (2, 0)


def test_no_server_no_layout():
    """Erratum E19: nothing is oversubscribed in silence."""
    assert allocate(LLAMA_7B, [a_server("n0", free=4 * GB)], 0.0, EVEN) is None
    assert allocate(LLAMA_7B, [], 0.0, EVEN) is None


def test_a_group_is_no_smaller_than_the_workers_wanted():
    """Section 6.1."""
    layout = allocate(replace(LLAMA_7B, num_required=4, slo_ttft_s=12), FOUR, 0.0, EVEN)
    assert layout.num_stages == 4


def test_what_was_waited_counts_against_the_objective():
    late = allocate(replace(LLAMA_7B, waited_s=2.0), FOUR, 0.0, EVEN)
    assert late.num_stages > 2 or late.num_full > 0
    assert not allocate(replace(LLAMA_7B, waited_s=20.0), FOUR, 0.0, EVEN).meets_slo


def test_free_gpus_before_shared_ones():
    """Erratum E20: the sentence after Eq. 2 as an option."""
    mixed = [a_server("n0", shared=True), a_server("n1", shared=True), *(a_server(f"n{n}") for n in (2, 3))]
    layout = allocate(LLAMA_7B, mixed, 0.0, replace(EVEN, prefer_free=True))
    assert layout.num_stages == 2
    assert layout.rivals and all(r.score > 0 for r in layout.rivals)
