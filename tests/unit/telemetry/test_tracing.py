"""W3C trace contexts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.telemetry.tracing import TraceContext, is_sampled, parse_traceparent

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
contexts = st.tuples(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())


@given(contexts)
def test_a_context_is_read_with_its_flag(context: tuple[int, int, bool]) -> None:
    trace, span, sampled = context
    text = f"00-{trace:032x}-{span:016x}-{sampled:02x}"
    assert parse_traceparent(text) == TraceContext(f"{trace:032x}", f"{span:016x}", sampled)
    assert is_sampled(text) is sampled


@given(st.text() | st.text("0123456789abcdef-", max_size=60))
def test_whatever_comes_in_a_header_is_a_valid_context_or_none(text: str) -> None:
    context = parse_traceparent(text)
    assert context is None or (int(context.trace_id, 16) and int(context.span_id, 16))


MALFORMED = [
    *("", "00", PARENT.replace("00-", "ff-", 1), f"{PARENT}-extra", PARENT.removesuffix("-01"), PARENT[:-2]),
    *(f"00-{trace}-{'b' * 16}-01" for trace in ("0" * 32, "g" * 32, "a" * 31, "A" * 32, f"+{'a' * 31}")),
    *(f"00-{'a' * 15}_{'a' * 16}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01"),
]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_traceparent_is_none(text: str) -> None:
    assert parse_traceparent(text) is None
    assert not is_sampled(text)


def test_a_version_yet_to_come_may_carry_more() -> None:
    assert parse_traceparent(PARENT.replace("00-", "01-", 1) + "-more") is not None
