"""Traces: W3C traceparent, span times, failures."""

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags

from glowplug.telemetry.tracing import NANO, SpanCounts, Tracing, format_traceparent, is_sampled, parse_traceparent

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
contexts = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.just(True),
    st.sampled_from([TraceFlags(0), TraceFlags(1)]),
)


@given(contexts)
def test_parse_reverses_format(context: SpanContext) -> None:
    again = parse_traceparent(format_traceparent(context))
    assert again == context
    assert is_sampled(format_traceparent(context)) == bool(context.trace_flags.sampled)


@given(st.text() | st.text("0123456789abcdef-", max_size=60))
def test_whatever_comes_in_a_header_is_a_valid_context_or_none(text: str) -> None:
    context = parse_traceparent(text)
    assert context is None or context.is_valid


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


class Traced:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing("placer", "placer-1", exporter=self.exporter)

    def one(self) -> ReadableSpan:
        self.tracing.shutdown()
        (span,) = self.exporter.get_finished_spans()
        return span


def test_record_keeps_times_parent_and_attributes() -> None:
    traced = Traced()
    own = traced.tracing.record(
        "cold_start.fetch", PARENT, 1000.25, 1002.5, {"glowplug.bytes": 7}, kind=SpanKind.SERVER
    )
    span = traced.one()
    assert (span.name, span.start_time, span.end_time) == ("cold_start.fetch", 1000.25 * NANO, 1002.5 * NANO)
    assert span.parent is not None
    assert span.context is not None
    assert format_traceparent(span.parent) == PARENT
    assert format_traceparent(span.context) == own
    assert (dict(span.attributes or {}), span.kind) == ({"glowplug.bytes": 7}, SpanKind.SERVER)
    assert span.status.status_code is StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "glowplug-placer"
    assert span.resource.attributes["service.instance.id"] == "placer-1"


def test_record_marks_an_error() -> None:
    traced = Traced()
    traced.tracing.record("x", PARENT, 1.0, 2.0, error="no space")
    span = traced.one()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "no space")


def test_a_span_without_a_parent_begins_a_trace() -> None:
    traced = Traced()
    own = traced.tracing.record("x", "", 1.0, 2.0)
    assert traced.one().parent is None
    assert parse_traceparent(own) is not None


def test_a_span_goes_around_a_block_and_takes_attributes_until_it_ends() -> None:
    traced = Traced()
    with traced.tracing.span("x", PARENT, {"a": 1}) as handle:
        handle.attributes["b"] = 2
        child = handle.traceparent
    span = traced.one()
    assert dict(span.attributes or {}) == {"a": 1, "b": 2}
    assert child.split("-")[1] == "a" * 32


def test_an_exception_marks_the_span_and_goes_on() -> None:
    traced = Traced()
    with pytest.raises(KeyError), traced.tracing.span("x", PARENT):
        raise KeyError("k")
    assert traced.one().status.description == "KeyError('k')"


def test_what_is_not_sampled_is_not_exported_and_its_trace_travels_on() -> None:
    traced = Traced()
    own = traced.tracing.record("x", PARENT[:-2] + "00", 1.0, 2.0)
    traced.tracing.shutdown()
    assert traced.exporter.get_finished_spans() == ()
    assert own.split("-")[1] == "a" * 32
    assert not is_sampled(own)


def test_without_an_endpoint_contexts_still_travel() -> None:
    tracing = Tracing("placer", "placer-1")
    own = tracing.record("x", PARENT, 1.0, 2.0)
    assert own.split("-")[1] == "a" * 32
    assert own != PARENT
    tracing.shutdown()


class Refusing(InMemorySpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE


def test_spans_taken_and_spans_refused_are_counted() -> None:
    counts = SpanCounts()
    for exporter in (InMemorySpanExporter(), Refusing()):
        tracing = Tracing("placer", "placer-1", exporter=exporter, counts=counts)
        for _ in range(3):
            tracing.record("x", PARENT, 1.0, 2.0)
        tracing.record("x", PARENT[:-2] + "00", 1.0, 2.0)  # unsampled
        tracing.shutdown()
    assert (counts.num_exported, counts.num_dropped) == (3, 3)


def test_what_a_full_queue_pushes_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "512")
    going = threading.Event()

    class Slow(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            going.wait(20)
            return super().export(spans)

    tracing = Tracing("placer", "placer-1", exporter=Slow())
    for _ in range(3000):
        tracing.record("x", PARENT, 1.0, 2.0)
    going.set()
    tracing.shutdown()
    batch = 512  # tolerance: the queue belongs to another thread
    assert tracing.counts.num_dropped >= 3000 - 2 * 512 - batch
    assert abs(tracing.counts.num_exported + tracing.counts.num_dropped - 3000) <= batch
