"""The spans of a request, and its row in /v1/requests."""

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from glowplug.domain.instance import InstanceState
from glowplug.telemetry.tracing import Tracing
from services.router.tracing import Sampler
from tests.contract.data_port_rig import a_rig, an_instance, chat

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"traceparent: 00-{TRACE}-b7ad6b7169203331-01\r\n".encode()
UNSAMPLED = SAMPLED.replace(b"-01\r", b"-00\r")


class KeptSpans(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def by_name(self) -> dict[str, ReadableSpan]:
        assert len({s.name for s in self.spans}) == len(self.spans)
        return {s.name: s for s in self.spans}


async def test_a_warm_request_is_two_spans_under_the_clients() -> None:
    kept = KeptSpans()
    tracing = Tracing("router", "router-1", exporter=kept)
    async with a_rig(tracing=tracing) as rig:
        engine = await rig.engine()
        answer = await rig.ask(chat(stream=True, extra=SAMPLED))
        await rig.until(lambda: any(p.TYPE == "request.finished" for p in rig.reported))
        told = engine.served[0].header("traceparent")
    tracing.shutdown()
    spans = kept.by_name()
    assert set(spans) == {"router.request", "engine.generate"}
    root, generate = spans["router.request"], spans["engine.generate"]
    assert root.context is not None and generate.context is not None and root.parent is not None
    assert f"{root.context.trace_id:032x}" == TRACE and f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert generate.parent is not None and generate.parent.span_id == root.context.span_id
    assert told is not None and told[36:52] == f"{generate.context.span_id:016x}"
    assert answer.headers["traceparent"][3:35] == TRACE
    assert generate.attributes is not None and generate.attributes["glowplug.instance_id"] == "i-1"
    assert generate.attributes["gen_ai.usage.output_tokens"] == 3
    (first,) = generate.events
    assert first.name == "first token"
    assert generate.start_time is not None and generate.end_time is not None
    assert generate.start_time < first.timestamp <= generate.end_time


async def test_a_held_request_has_its_hold_and_its_cause_carries_the_trace() -> None:
    kept = KeptSpans()
    tracing = Tracing("router", "router-1", exporter=kept)
    async with a_rig(tracing=tracing) as rig:
        client = await rig.held(chat(extra=SAMPLED))
        await rig.engine()
        assert (await client.answer()).status == 200
        await rig.until(lambda: any(p.TYPE == "request.finished" for p in rig.reported))
        waiting = next(p for p in rig.published if p.payload.TYPE == "request.waiting")
    tracing.shutdown()
    spans = kept.by_name()
    assert set(spans) == {"router.request", "router.hold", "engine.generate"}
    hold, generate = spans["router.hold"], spans["engine.generate"]
    assert hold.end_time == generate.start_time
    assert waiting.cause is not None and waiting.cause.traceparent[3:35] == TRACE


async def test_an_unsampled_request_makes_no_span() -> None:
    kept = KeptSpans()
    tracing = Tracing("router", "router-1", exporter=kept)
    async with a_rig(tracing=tracing, sampler=Sampler(ratio=0.0)) as rig:
        await rig.engine()
        await rig.ask(chat(extra=UNSAMPLED))
        await rig.ask(chat())
        await rig.until(lambda: sum(p.TYPE == "request.finished" for p in rig.reported) == 2)
    tracing.shutdown()
    assert kept.spans == []


async def test_rows_show_live_then_finished_requests_and_no_prompt() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(max_concurrency=1)
        await rig.ask(chat(stream=True, extra=b"x-request-id: done-1\r\n"))
        await rig.until(lambda: not rig.table.exchanges)
        rig.tell(an_instance("i-1", engine.url, InstanceState.DRAINING, revision=2))
        await rig.sent(chat("m", extra=b"x-request-id: held-1\r\n"))
        await rig.until(lambda: len(rig.table.exchanges) == 1)
        rows = rig.reports.rows(10)
    assert [row["request_id"] for row in rows] == ["held-1", "done-1"]
    assert rows[1]["state"] == "finished" and rows[1]["response_tokens"] == 3 and not rows[1]["tokens_exact"]
    assert "hi" not in {str(v) for row in rows for v in row.values()}
