"""Stories become OpenTelemetry spans, each once."""

import asyncio
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from glowplug.events import Event
from glowplug.events.facts import InstanceReady
from glowplug.services.console.decisions import DecisionLog
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.span_export import MAX_WAITING, SETTLE_S, SpanExport, to_endpoint
from glowplug.services.console.stories import Stories
from tests import console_story as fleet
from tests.trace_sink import TraceSink

AT, SEED = 1000.0, 3


class Exporting:
    def __init__(self, endpoint: str = "", since: float = AT) -> None:
        self.kept, self.registry, self.now = InMemorySpanExporter(), CollectorRegistry(), since
        self.decisions = DecisionLog()
        self.stories = Stories(100, self.decisions, {})
        exporter = to_endpoint(endpoint) if endpoint else self.kept
        self.spans = SpanExport(self.stories, exporter, ConsoleMetrics(self.registry), lambda: self.now)

    def take(self, *events: Event) -> None:
        for event in events:
            self.decisions.take(event)
            self.stories.take(event)

    async def names(self) -> list[str]:
        await self.spans.flush(self.now)
        return sorted(span.name for span in self.kept.get_finished_spans())

    def counted(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"glowplug_spans_{name}_total", {"service": "console"})


async def test_a_story_is_sent_as_the_tree_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """To this machine, whatever proxy others are reached through."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with TraceSink() as sink:
        at = Exporting(sink.url)
        *decided, request = fleet.cold_trace(SEED, AT, "m", "r")
        fact, traceparent = next(request.data.traced())
        report = replace(request.data, requests=(replace(fact, parent_span="c" * 16),))
        at.take(*decided, replace(request, data=report))
        await at.spans.flush(AT)
        (root,), (generate,) = sink.spans("router.request"), sink.spans("engine.generate")
        (start,), (load,), (place,) = (sink.spans(name) for name in ("agent.start", "engine.load", "placer.place"))
    assert root.trace_id.hex() == fleet.trace_id(SEED) and root.parent_span_id.hex() == "c" * 16
    assert generate.span_id.hex() == traceparent[36:52] and generate.parent_span_id == root.span_id
    assert load.parent_span_id == start.span_id and start.parent_span_id == place.span_id
    assert generate.start_time_unix_nano == int((AT + 1.764) * 1e9) and generate.kind == 3
    assert [event.name for event in generate.events] == ["first token"]
    assert at.counted("exported") == 12 and at.counted("dropped") == 0


async def test_each_row_is_sent_once_and_later_ones_in_their_time() -> None:
    at = Exporting()
    *decided, request = fleet.cold_trace(SEED, AT, "m", "r")
    at.take(*decided)
    await at.spans.flush(at.now - SETTLE_S)
    assert not at.kept.get_finished_spans(), "its parts may still be on their way"
    before = await at.names()
    assert "router.request" not in before
    at.take(request, *decided)
    assert await at.names() == sorted([*before, "router.request", "router.hold", "engine.generate"])
    assert len({(s.context and s.context.span_id) for s in at.kept.get_finished_spans()}) == 12


async def test_what_is_not_sampled_and_what_an_earlier_process_sent_stays_here() -> None:
    at = Exporting(since=AT + 2.0)
    unsampled = fleet.traceparent(SEED).removesuffix("01") + "00"
    at.take(fleet.fact(fleet.finished("r", "m", AT, 9.0, dispatched_s=0.1), AT + 9, 1, unsampled))
    at.take(*fleet.cold_trace(SEED + 1, AT, "m", "r"))
    assert await at.names() == ["engine.generate", "router.request"], "all else had ended before"


async def test_a_start_that_no_request_caused_is_sent() -> None:
    at = Exporting()
    (ready,) = (event for event in fleet.cold_trace(SEED, AT, "m", "r") if isinstance(event.data, InstanceReady))
    at.take(replace(ready, traceparent=""))
    assert "agent.start" in await at.names()


async def test_a_receiver_that_is_down_costs_the_spans_and_is_counted() -> None:
    with TraceSink() as sink:
        url = sink.url
    at = Exporting(url)
    at.take(*fleet.warm_trace(SEED, AT, "m", "r"))
    async with asyncio.timeout(30):
        await at.spans.flush(AT)
    assert at.counted("dropped") == 2 and at.counted("exported") == 0


@pytest.mark.parametrize("more", [1, 5])
async def test_stories_that_wait_are_bounded(more: int) -> None:
    at = Exporting()
    for seed in range(MAX_WAITING + more):
        at.take(*fleet.warm_trace(seed, AT, "m", f"r-{seed}"))
    assert at.counted("dropped") == more
