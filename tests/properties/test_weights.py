"""What must hold of byte ranges and rates."""

from hypothesis import given
from hypothesis import strategies as st

from glowplug.weights.link import TokenBucket
from glowplug.weights.writer import Intervals

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


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
