"""Bytes are conserved: what a GPU has is free or held by somebody, whatever is granted, exchanged, cut and freed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import Gpu, GrantOwner
from glowplug.memory.ledger import ByteLedger

SIZES = {"n/0": 100, "n/1": 60}
HOLDERS = st.sampled_from(["i-1", "r-1"])
OWNERS = st.sampled_from([GrantOwner.WEIGHTS, GrantOwner.KV, GrantOwner.PREWARM])
SOME = st.sampled_from([0, 1, 20, 45, 70])
SHARES = st.dictionaries(OWNERS, SOME, max_size=3)
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.sampled_from(sorted(SIZES)), HOLDERS, SHARES),
        st.tuples(
            st.just("exchange"),
            st.just([]) | st.sets(HOLDERS).map(sorted),
            HOLDERS,
            st.fixed_dictionaries(dict.fromkeys(SIZES, SHARES)),
        ),
        st.tuples(st.just("shrink"), st.sampled_from(sorted(SIZES)), HOLDERS, OWNERS, SOME),
        st.tuples(st.just("release"), HOLDERS),
    ),
    max_size=20,
)


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
        if verb in ("grant", "exchange"):
            shares = given_[2].values() if verb == "exchange" else (given_[2],)
            gone = given_[0] if verb == "exchange" else ()
            wanted = {h: n for h, n in held.items() if h not in gone}
            wanted[given_[1]] = wanted.get(given_[1], 0) + sum(n for share in shares for n in share.values())
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
