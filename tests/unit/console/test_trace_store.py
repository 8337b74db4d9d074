"""The ring: what it keeps, what it lets go, and that its bytes are bounded whatever comes."""

import tracemalloc

import msgspec

from services.console import otlp
from services.console.spans import Resource, Span
from services.console.trace_store import TraceStore
from tests import console_story as story

RESOURCE = Resource("svc", (("service.instance.id", "svc-1"),))


def span(trace: int, span_id: int, *, parent: int = 0, start: int = 1, request_id: str = "", pad: int = 0) -> Span:
    attributes = [("glowplug.request_id", request_id)] if request_id else []
    attributes += [("pad", "x" * pad)] if pad else []
    return Span(
        trace_id=f"{trace:032x}",
        span_id=f"{span_id:016x}",
        parent_id=f"{parent:016x}" if parent else "",
        name=f"s{span_id}",
        kind=1,
        start_ns=start,
        end_ns=start + 10,
        attributes=tuple(attributes),
    )


def add(store: TraceStore, *spans: Span) -> None:
    store.add((one, RESOURCE) for one in spans)


def test_late_spans_join_their_trace_and_the_summary_grows() -> None:
    store = TraceStore()
    add(store, span(1, 2, parent=1, start=5))
    first = store.summary("1")
    assert first is not None and first.name == "s2" and not first.has_root and first.revision == 1
    add(store, span(1, 1, start=3, request_id="r-1"))
    summary = store.summary("1")
    assert summary is not None and summary.has_root
    assert (summary.name, summary.num_spans, summary.start_ns, summary.end_ns) == ("s1", 2, 3, 15)
    assert store.trace_of_request("r-1") == f"{1:032x}"
    assert [one.span_id[-1] for one, _ in store.get("1") or ()] == ["1", "2"]


def test_a_span_sent_twice_is_kept_once() -> None:
    store = TraceStore()
    add(store, span(1, 1))
    before = store.num_bytes
    add(store, span(1, 1))
    assert (store.num_spans, store.num_bytes) == (1, before)
    summary = store.summary("1")
    assert summary is not None and (summary.num_spans, summary.revision) == (1, 1)


def test_the_oldest_trace_leaves_with_all_that_points_at_it() -> None:
    store = TraceStore(max_traces=2)
    for trace in (1, 2, 3):
        add(store, span(trace, 1, request_id=f"r-{trace}"))
    assert store.get("1") is None and store.trace_of_request("r-1") is None
    assert [line.request_ids for line in store.newest()] == [("r-3",), ("r-2",)]
    assert (len(store), store.num_spans, store.num_evicted) == (2, 2, 1)


def test_bytes_are_bounded_and_counted_down_again() -> None:
    store = TraceStore(max_bytes=100_000)
    for trace in range(500):
        add(store, span(trace + 1, 1, pad=900), span(trace + 1, 2, pad=900))
        assert store.num_bytes <= 100_000
    assert store.num_evicted > 400
    assert len(store) * 2 == store.num_spans


def test_one_endless_trace_cannot_push_out_the_others() -> None:
    store = TraceStore(max_bytes=200_000, max_spans_per_trace=50)
    add(store, span(1, 1))
    add(store, *(span(2, i + 1, parent=1 if i else 0) for i in range(200)))
    summary = store.summary("2")
    assert summary is not None and (summary.num_spans, summary.num_dropped) == (50, 150)
    add(store, *(span(3, i + 1, pad=1000) for i in range(50)))
    assert store.num_bytes <= 200_000
    assert store.get("1") is not None


def test_what_it_counts_is_what_it_costs() -> None:
    """`num_bytes` is an upper bound of what the allocator sees, so the setting bounds the process."""
    batches = [
        otlp.decode(story.cold_trace(i, 1000.0, "m", f"r-{i}").SerializeToString(), otlp.PROTOBUF) for i in range(200)
    ]
    tracemalloc.start()
    store = TraceStore()
    for batch in batches:
        store.add(batch.spans)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used <= store.num_bytes
    assert store.num_spans == 200 * 15


def test_the_model_is_that_of_the_request() -> None:
    """Stopping another model to make room is part of the trace, but not what it is about."""
    store = TraceStore()
    victim = about(span(1, 5, parent=1), model="victim")
    add(store, victim, about(span(1, 1, request_id="r"), model="wanted"))
    add(store, about(span(1, 6, parent=1), model="victim-2"))
    summary = store.summary("1")
    assert summary is not None and summary.model == "wanted"


def about(one: Span, *, model: str) -> Span:
    return msgspec.structs.replace(one, attributes=(*one.attributes, ("glowplug.model", model)))


def test_summary_of_a_whole_story() -> None:
    store = TraceStore()
    store.add(otlp.decode(story.cold_trace(0, 1.0, "m", "r").SerializeToString(), otlp.PROTOBUF).spans)
    store.add(otlp.decode(story.failed_trace(1, 1.0, "m", "q").SerializeToString(), otlp.PROTOBUF).spans)
    failed, cold = store.newest()
    assert cold.is_cold and not cold.num_errors and not cold.is_emulated and cold.model == "m"
    assert cold.services[0] == "glowplug-agent" and len(cold.services) == 6
    assert failed.num_errors == 2 and failed.is_emulated and not failed.is_cold
    assert store.services() == list(cold.services)
