"""The OTLP door and the read APIs over real HTTP, with the exporter everybody uses."""

import asyncio
import gzip
import time

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests import console_story as story
from tests.console_server import ConsoleUnderTest, serving

PROTOBUF = {"Content-Type": "application/x-protobuf"}


async def post(at: ConsoleUnderTest, body: bytes, headers: dict[str, str]) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.post(f"{at.url}/v1/traces", content=body, headers=headers)


async def get(at: ConsoleUnderTest, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(at.url + path)


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
async def test_the_official_exporter_is_understood(compression: Compression) -> None:
    async with serving() as at:
        provider = TracerProvider(resource=Resource.create({"service.name": "shop"}))
        exporter = OTLPSpanExporter(endpoint=f"{at.url}/v1/traces", compression=compression, timeout=5)
        provider.add_span_processor(SimpleSpanProcessor(exporter))

        def work() -> str:
            with provider.get_tracer("t").start_as_current_span("checkout") as span:
                span.set_attribute("glowplug.request_id", "req-77")
                return f"{span.get_span_context().trace_id:032x}"

        trace_id = await asyncio.to_thread(work)
        found = (await get(at, f"/api/v1/traces/{trace_id}")).json()
        assert (found["name"], found["service"], found["request_ids"]) == ("checkout", "shop", ["req-77"])
        by_request = (await get(at, "/api/v1/requests/req-77/trace")).json()
        assert by_request == found
        await asyncio.to_thread(provider.shutdown)


async def test_export_answers_in_the_senders_encoding() -> None:
    async with serving() as at:
        body = story.warm_trace(0, time.time(), "m", "r").SerializeToString()
        answer = await post(at, body, PROTOBUF)
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/x-protobuf"
        assert ExportTraceServiceResponse.FromString(answer.content) == ExportTraceServiceResponse()
        text = await post(at, b'{"resourceSpans": []}', {"Content-Type": "application/json"})
        assert text.status_code == 200 and text.json() == {}
        assert at.registry.get_sample_value("glowplug_spans_received_total") == 2


async def test_bad_exports_are_refused_and_counted() -> None:
    async with serving(otlp_max_body_bytes=10_000, otlp_max_plain_bytes=50_000) as at:
        bomb = gzip.compress(b"\0" * 5_000_000)
        cases = [
            (b"\xff\xff", PROTOBUF, 400),
            (b"{", {"Content-Type": "application/json"}, 400),
            (b"x", {"Content-Type": "text/plain"}, 415),
            (b"x", {}, 415),
            (b"x", {**PROTOBUF, "Content-Encoding": "br"}, 415),
            (b"x" * 20_000, PROTOBUF, 413),
            (bomb, {**PROTOBUF, "Content-Encoding": "gzip"}, 413),
        ]
        for body, headers, status in cases:
            answer = await post(at, body, headers)
            assert answer.status_code == status, (headers, answer.content)
            assert answer.content
        assert at.registry.get_sample_value("glowplug_exports_refused_total", {"code": "413"}) == 2
        assert len(at.console.traces) == 0


async def test_a_body_without_a_length_is_bounded_too() -> None:
    async with serving(otlp_max_body_bytes=10_000) as at:

        async def endless():  # type: ignore[no-untyped-def]
            for _ in range(200):
                yield b"x" * 1000

        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{at.url}/v1/traces", content=endless(), headers=PROTOBUF)
        assert answer.status_code == 413


async def test_too_many_bodies_at_once_are_asked_to_come_again() -> None:
    async with serving(otlp_max_held_bytes=1024) as at:
        answer = await post(at, b"x" * 5000, PROTOBUF)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        body = story.warm_trace(0, time.time(), "m", "r").SerializeToString()
        assert (await post(at, body, PROTOBUF)).status_code == 200


async def test_jaegers_api_over_http() -> None:
    async with serving() as at:
        for seed in range(3):
            await post(at, story.cold_trace(seed, time.time() - 5, "m", f"r-{seed}").SerializeToString(), PROTOBUF)
        services = (await get(at, "/api/services")).json()
        assert services["data"][-1] == "glowplug-router" and services["total"] == 6 and services["errors"] is None
        found = (await get(at, "/api/traces?service=glowplug-router&limit=2&lookback=1h")).json()
        assert [trace["traceID"] for trace in found["data"]] == [story.trace_id(2), story.trace_id(1)]
        one = (await get(at, f"/api/traces/{story.trace_id(1)}")).json()
        assert len(one["data"]) == 1 and len(one["data"][0]["spans"]) == 15
        short = (await get(at, "/api/traces/2")).json()
        assert short == one
        several = (await get(at, f"/api/traces?traceID={story.trace_id(0)}&traceID=beef")).json()
        assert [trace["traceID"] for trace in several["data"]] == [story.trace_id(0)]
        operations = (await get(at, "/api/services/glowplug-engine/operations")).json()
        assert operations["data"] == ["chat", "decode", "prefill"]
        kinds = (await get(at, "/api/operations?service=glowplug-engine&spanKind=server")).json()
        assert kinds["data"] == [{"name": "chat", "spanKind": "server"}]
        calls = (await get(at, f"/api/dependencies?endTs={int(time.time() * 1000)}&lookback=600000")).json()
        assert {"parent": "glowplug-router", "child": "glowplug-engine", "callCount": 3} in calls["data"]


async def test_what_is_not_there_is_a_404_in_each_ones_shape() -> None:
    async with serving() as at:
        theirs = await get(at, "/api/traces/beef")
        assert theirs.status_code == 404 and theirs.json()["errors"] == [{"code": 404, "msg": "trace not found"}]
        ours = await get(at, "/api/v1/requests/nobody/trace")
        assert ours.status_code == 404 and ours.json()["error"]["code"] == "not_found"
        bad = await get(at, "/api/traces?service=x&limit=abc")
        assert bad.status_code == 400 and bad.json()["errors"][0]["code"] == 400
        assert (await get(at, "/api/v1/traces?limit=0")).status_code == 400


async def test_the_list_is_filtered_and_bounded() -> None:
    async with serving(trace_max_traces=5) as at:
        for seed in range(8):
            body = story.warm_trace(seed, time.time(), f"model-{seed % 2}", f"r-{seed}").SerializeToString()
            await post(at, body, PROTOBUF)
        page = (await get(at, "/api/v1/traces?q=MODEL-1")).json()
        assert [line["request_ids"] for line in page["traces"]] == [["r-7"], ["r-5"], ["r-3"]]
        assert (page["num_kept"], page["num_evicted"]) == (5, 3)
