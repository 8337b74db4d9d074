"""What HydraServe's placement must keep whatever the servers."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.placement.hydraserve_allocation import ColdStart, ServerOffer, StageSeconds, allocate
from glowplug.policies.placement.hydraserve_contention import Fetch, LinkLedger, admits, begin, settle

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
    model_key=st.just("m"),
    weight_bytes=st.integers(1, 24),
    kv_bytes=st.integers(0, 6),
    slo_ttft_s=st.floats(0.5, 20),
    slo_tpot_s=st.floats(0.02, 0.3),
    stages=st.just(StageSeconds(container_s=0.5, cuda_s=0.3, library_s=1, hop_s=0.001, prefill_s=0.5, decode_s=0.04)),
    waited_s=st.floats(0, 5),
    num_required=st.integers(1, 6),
)


@given(STARTS, servers())
def test_a_layout_fits_its_gpus_on_servers_of_their_own(start, offers):
    layout = allocate(start, offers, 0.0)
    free = {gpu: num for offer in offers for gpu, num in offer.gpus}
    if layout is None:
        assert max(free.values()) < start.weight_bytes + start.kv_bytes
        return
    assert 1 <= layout.num_stages <= 4
    assert len({w.node_id for w in layout.workers}) == layout.num_stages
    for worker in layout.workers:
        assert worker.num_bytes <= free[worker.gpu_id]
        assert worker.gpu_id.startswith(worker.node_id)
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
    """Eq. 3 never over-admits: with shares that only grow, everybody's bytes are there by their deadline."""
    ledger = LinkLedger(bytes_per_s=2e9)
    for at, (left, due) in enumerate([*fetches, (num_bytes, deadline)]):
        if admits(ledger, left, due, 0.0):
            ledger = begin(ledger, Fetch(fetch_id=str(at), left_bytes=left, deadline_at=due), 0.0)
    for at_s in sorted({f.deadline_at for f in ledger.fetches}):
        ledger = settle(ledger, at_s + 1e-6)
        assert all(f.deadline_at > at_s or f.left_bytes < 1e-3 * 2e9 for f in ledger.fetches)


@given(FETCHES, st.floats(0, 10), st.floats(0, 10))
def test_settling_in_two_steps_never_leaves_more(fetches, first, second):
    """Between two looks a fetch may end and leave its share to the others."""
    made = tuple(Fetch(fetch_id=str(at), left_bytes=left, deadline_at=due) for at, (left, due) in enumerate(fetches))
    ledger = LinkLedger(bytes_per_s=2e9, fetches=made)
    once = {f.fetch_id: f.left_bytes for f in settle(ledger, first + second).fetches}
    twice = {f.fetch_id: f.left_bytes for f in settle(settle(ledger, first), first + second).fetches}
    for name, left in twice.items():
        assert left <= once.get(name, 0.0) + 1e-3 * max(1.0, left)
