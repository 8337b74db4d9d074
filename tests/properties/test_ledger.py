"""Bytes are conserved; ranges and rates keep their invariants."""

from hypothesis import given
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


KEYS = {"a": 45, "b": 20}  # shared weights -> bytes
SHARERS = st.sampled_from(["i-1", "i-2", "r-3", "i-4"])
SHARING = st.lists(
    st.one_of(
        st.tuples(
            st.just("grant"),
            st.sets(SHARERS),
            SHARERS,
            st.sampled_from(sorted(SIZES)),
            st.sampled_from(["", *KEYS]),
            st.tuples(st.sampled_from([0, 1, 7]), st.sampled_from([0, 5, 30]), st.booleans()),
        ),
        st.tuples(st.just("release"), SHARERS),
    ),
    max_size=24,
)


@given(SHARING)
def test_what_several_holders_share_counts_once_whoever_comes_and_goes(deeds):
    """A GPU's use is each holder's private bytes plus one copy of each shared part."""
    ledger, model = ByteLedger([Gpu(gpu_id=gpu_id, total_bytes=total) for gpu_id, total in SIZES.items()]), {}
    for verb, *given_ in deeds:
        before = ledger.gpus
        if verb == "release":
            left = _less(model, given_)
            assert ledger.release(given_[0]) == _used(model) - _used(left)
            model = left
        else:
            gone, holder, gpu_id, key, (own, kv, replica) = given_
            owner = GrantOwner.PREWARM if replica else GrantOwner.WEIGHTS
            wanted = _less(model, gone) | {holder: (gpu_id, key, own if replica else own + kv)}
            shared = (key, KEYS[key]) if key else None
            share = {owner: own + KEYS.get(key, 0)} | ({} if replica else {GrantOwner.KV: kv})
            try:
                ledger.exchange(sorted({*gone, holder}), holder, {gpu_id: share}, shared)
            except OutOfMemory:
                assert ledger.gpus == before and any(_used(wanted, at) > SIZES[at] for at in SIZES)
                continue
            model = {name: has for name, has in wanted.items() if has[1] or has[2]}
        for gpu in ledger.gpus:
            assert gpu.used_bytes == _used(model, gpu.gpu_id) <= gpu.total_bytes
            assert all(grant.num_bytes >= 0 for grant in gpu.grants)
            there = {name: has[1] for name, has in model.items() if has[0] == gpu.gpu_id}
            keys = {key: {name for name, its in there.items() if its == key} for key in there.values() if key}
            assert {one.key: {*one.holders} for one in gpu.shared} == keys
            assert {grant.holder for grant in gpu.grants} == there.keys()
            for going in ([], ["i-1"], ["i-1", "i-2"], sorted(there)):
                left = _used(_less(model, going), gpu.gpu_id)
                assert gpu.freed_by(going) == gpu.used_bytes - left
            for key, num_bytes in KEYS.items():
                seen = gpu.seen_by(key)
                assert seen.free_bytes - gpu.free_bytes == (num_bytes if key in keys else 0)


def _less(model, gone):
    return {name: has for name, has in model.items() if name not in gone}


def _used(model, gpu_id=None):
    here = [has for has in model.values() if gpu_id in (None, has[0])]
    return sum(own for *_, own in here) + sum(KEYS[key] for _, key in {has[:2] for has in here if has[1]})


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
        assert passed <= 500 + rate * now_s + 1e-3  # earlier chunks were paid for
        bucket.spend(chunk)
        passed += chunk
    assert now_s <= (passed / rate) + 1e-6  # and the wait is for no more than was asked


@given(st.lists(st.integers(1, 10**9), max_size=10))
def test_no_rate_is_no_limit(chunks: list[int]) -> None:
    bucket = TokenBucket(0, burst_bytes=0)
    for chunk in chunks:
        assert bucket.wait_s(0.0) == 0.0
        bucket.spend(chunk)
