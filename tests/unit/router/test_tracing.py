"""Request ids, trace contexts and head sampling."""

import pytest

from glowplug.services.router import tracing
from glowplug.telemetry.tracing import parse_traceparent

GOOD = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_safe_id_is_kept_and_an_unsafe_one_is_replaced() -> None:
    assert tracing.request_id(b"abc-1.2:3") == "abc-1.2:3"
    for given in (None, b"", b"a b", b"a\r\nx: y", b"x" * 129, "é".encode()):
        assert tracing.request_id(given).startswith("req-")
    assert tracing.request_id(None) != tracing.request_id(None)


@pytest.mark.parametrize(
    "given",
    [None, b"", b"x", GOOD.upper(), GOOD[:-1], GOOD.replace(b"00-", b"ff-"), b"00-" + b"0" * 32 + GOOD[35:]],
)
def test_a_malformed_context_is_none(given: bytes | None) -> None:
    assert tracing.parent_context(given) is None


def test_a_good_context_is_taken_with_its_flag() -> None:
    assert tracing.parent_context(GOOD) == (GOOD.decode(), True)
    assert tracing.parent_context(GOOD[:-1] + b"0") == (GOOD[:-1].decode() + "0", False)


def test_a_new_context_is_valid_and_not_sampled() -> None:
    made = parse_traceparent(tracing.new_context())
    assert made is not None and not made.sampled


def test_a_sampled_request_has_a_span_of_its_own_in_its_clients_trace() -> None:
    made, theirs = parse_traceparent(tracing.new_context(GOOD.decode(), sampled=True)), parse_traceparent(GOOD.decode())
    assert made is not None and theirs is not None and made.sampled
    assert made.trace_id == theirs.trace_id and made.span_id != theirs.span_id


def test_the_sampler_takes_a_burst_and_then_its_rate() -> None:
    sampler = tracing.Sampler(ratio=1.0, per_s=10.0)
    assert sum(sampler.root(100.0) for _ in range(50)) == 10
    assert sum(sampler.root(100.5) for _ in range(50)) == 5


def test_a_ratio_of_zero_samples_nothing() -> None:
    sampler = tracing.Sampler(ratio=0.0, per_s=1000.0)
    assert not any(sampler.root(100.0 + i) for i in range(100))
