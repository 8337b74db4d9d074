"""Bytes are conserved: what a GPU has is free or held by somebody; byte ranges and rates hold what they must."""

from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import Gpu, GrantOwner
from glowplug.memory.ledger import ByteLedger
from glowplug.weights.link import TokenBucket
from glowplug.weights.writer import Intervals

SIZES = {"n/0": 100, "n/1": 60}
HOLDERS = st.sampled_from(["i-1", "r-1"])
OWNERS = st.sampled_from([GrantOwner.WEIGHTS, GrantOwner.KV, GrantOwner.PREWARM])
SOME = st.sampled_from([0, 1, 20, 45, 70])
SHARES = st.dictionaries(OWNERS, SOME, max_size=3)
DEEDS = st.lists(
    st.one_of(
        st.tuples(
            st.just("exchange"),
            st.just([]) | st.sets(HOLDERS).map(sorted),
            HOLDERS,
            st.dictionaries(st.sampled_from(sorted(SIZES)), SHARES),
        ),
        st.tuples(st.just("shrink"), st.sampled_from(sorted(SIZES)), HOLDERS, OWNERS, SOME),
        st.tuples(st.just("release"), HOLDERS),
    ),
    max_size=20,
)
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@settings(max_examples=400, deadline=None)
@given(DEEDS)
def test_every_byte_is_free_or_somebodys_and_what_is_refused_changes_nothing(deeds):
    ledger = ByteLedger([Gpu(gpu_id=gpu_id, total_bytes=total) for gpu_id, total in SIZES.items()])
    for verb, *given_ in deeds:
        before, held = ledger.gpus, {h: ledger.held_bytes(h) for h in ledger.holders}
        try:
            freed = getattr(ledger, verb)(*given_)
        except (OutOfMemory, ValueError):
            assert ledger.gpus == before
            continue
        after = {h: ledger.held_bytes(h) for h in ledger.holders}
        for gpu in ledger.gpus:
            assert 0 <= sum(grant.num_bytes for grant in gpu.grants) == SIZES[gpu.gpu_id] - gpu.free_bytes
            assert gpu.free_bytes >= 0 and all(grant.num_bytes > 0 for grant in gpu.grants)
        if verb == "exchange":
            gone, holder, shares = given_
            wanted = {h: n for h, n in held.items() if h not in gone}
            wanted[holder] = wanted.get(holder, 0) + sum(n for share in shares.values() for n in share.values())
            assert after == {h: n for h, n in wanted.items() if n}
        elif verb == "release":
            assert freed == held.get(given_[0], 0)
            assert after == {h: n for h, n in held.items() if h != given_[0]}
        else:
            gpu_id, holder, owner, keep = given_
            assert freed == _of(before, gpu_id, holder, owner) - keep >= 0
            assert _of(ledger.gpus, gpu_id, holder, owner) == keep
            assert after == {h: n for h, n in (held | {holder: held.get(holder, 0) - freed}).items() if n}


def _of(gpus, gpu_id, holder, owner):
    grants = next(gpu.grants for gpu in gpus if gpu.gpu_id == gpu_id)
    return sum(g.num_bytes for g in grants if (g.holder, g.owner) == (holder, owner))


@given(spans, st.integers(0, 60), st.integers(0, 60))
def test_intervals_are_a_set_of_bytes(ranges: list[tuple[int, int]], first: int, last: int) -> None:
    have, model = Intervals(ranges), {b for low, high in ranges for b in range(low, high)}
    assert have.total == len(model)
    assert {b for low, high in have.as_list() for b in range(low, high)} == model
    assert have.as_list() == sorted(have.as_list())
    assert all(a[1] < b[0] for a, b in zip(have.as_list(), have.as_list()[1:], strict=False))
    missing = {b for low, high in have.gaps(first, last) for b in range(low, high)}
    assert missing == set(range(first, last)) - model
    assert have.prefix_end == next(b for b in range(100) if b not in model)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(100, 10_000))
def test_a_bucket_never_lets_more_through_than_its_rate(chunks: list[int], rate: int) -> None:
    bucket, now_s, passed = TokenBucket(rate, burst_bytes=500), 0.0, 0
    for chunk in chunks:
        now_s += bucket.wait_s(now_s)
        assert bucket.wait_s(now_s) <= 1e-6
        assert passed <= 500 + rate * now_s + 1e-3  # what passed before this chunk was paid for
        bucket.spend(chunk)
        passed += chunk
    assert now_s <= (passed / rate) + 1e-6  # and never waits for more than it was asked to carry


@given(st.lists(st.integers(1, 10**9), max_size=10))
def test_no_rate_is_no_limit(chunks: list[int]) -> None:
    bucket = TokenBucket(0, burst_bytes=0)
    for chunk in chunks:
        assert bucket.wait_s(0.0) == 0.0
        bucket.spend(chunk)
