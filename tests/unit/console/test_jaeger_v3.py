"""Jaeger's stable read API: what it gives is OTLP, so that it can be sent back in and is the same."""

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from services.console import jaeger, jaeger_v3, otlp
from services.console.trace_store import TraceStore
from tests import console_story as story

NOW = 1_800_000_000.0


@pytest.fixture
def store() -> TraceStore:
    kept = TraceStore()
    for request in (story.cold_trace(0, NOW - 100, "m", "r-0"), story.failed_trace(2, NOW - 10, "n", "r-2")):
        kept.add(otlp.decode(request.SerializeToString(), otlp.PROTOBUF).spans)
    return kept


async def ask(store: TraceStore, path: str, **query: str) -> httpx.Response:
    app = FastAPI()
    app.include_router(jaeger_v3.routes(store, lambda: NOW))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://c") as client:
        return await client.get(path, params=query)


@pytest.mark.parametrize("seed", [0, 2])
async def test_a_trace_given_out_and_taken_in_again_is_the_same(store: TraceStore, seed: int) -> None:
    answer = (await ask(store, f"/api/v3/traces/{story.trace_id(seed)}")).json()["result"]
    again = TraceStore()
    again.add(otlp.decode(json.dumps(answer).encode(), otlp.JSON).spans)
    assert again.get(story.trace_id(seed)) == store.get(story.trace_id(seed))


async def test_it_is_traces_data_of_otlp_with_nothing_unknown(store: TraceStore) -> None:
    answer = (await ask(store, f"/api/v3/traces/{story.trace_id(0)}")).json()["result"]
    otlp._hex_ids_to_base64(answer)
    data = json_format.ParseDict(answer, TracesData(), ignore_unknown_fields=False)
    names = {
        kv.value.string_value for rs in data.resource_spans for kv in rs.resource.attributes if kv.key == "service.name"
    }
    assert names == {f"glowplug-{s}" for s in ("router", "autoscaler", "placer", "prefetcher", "agent", "engine")}


async def test_services_and_operations(store: TraceStore) -> None:
    assert "glowplug-router" in (await ask(store, "/api/v3/services")).json()["services"]
    found = (await ask(store, "/api/v3/operations", service="glowplug-router", span_kind="SERVER")).json()
    assert found == {"operations": [{"name": "POST /v1/chat/completions", "spanKind": "server"}]}


@pytest.mark.parametrize(
    ("query", "num"),
    [
        ({"query.service_name": "glowplug-router"}, 2),
        ({"query.service_name": "glowplug-engine"}, 1),
        ({"query.service_name": "glowplug-router", "query.search_depth": "1"}, 1),
        ({"query.service_name": "glowplug-router", "query.start_time_min": "2027-01-15T07:59:00Z"}, 1),
        ({"query.service_name": "glowplug-router", "query.start_time_max": "2027-01-15T07:59:00Z"}, 1),
        ({"query.duration_min": "2s"}, 1),
        ({"query.service_name": "nobody"}, 0),
    ],
)
async def test_search(store: TraceStore, query: dict[str, str], num: int) -> None:
    found = (await ask(store, "/api/v3/traces", **query)).json()["result"]["resourceSpans"]
    ids = {span["traceId"] for rs in found for ss in rs["scopeSpans"] for span in ss["spans"]}
    assert len(ids) == num


@pytest.mark.parametrize("query", [{"query.start_time_min": "yesterday"}, {"query.search_depth": "x"}])
async def test_what_cannot_be_read_is_refused_by_name(store: TraceStore, query: dict[str, str]) -> None:
    answer = await ask(store, "/api/v3/traces", **query)
    error: dict[str, Any] = answer.json()["error"]
    assert (
        answer.status_code == error["httpCode"] == 400 and next(iter(query)).removeprefix("query.") in error["message"]
    )
    assert (await ask(store, "/api/v3/traces/77")).status_code == 404


def test_tags_are_asked_for_in_both_of_jaegers_ways(store: TraceStore) -> None:
    def ids(**query: str) -> list[str]:
        wanted = jaeger.parse_search({"service": "glowplug-router", **query}, NOW)
        return [trace["traceID"] for trace in jaeger.find(store, wanted)]

    assert ids(tags='{"glowplug.request_id": "r-2"}') == ids(tag="glowplug.request_id:r-2") == [story.trace_id(2)]
    with pytest.raises(jaeger.BadQuery, match="key:value"):
        ids(tag="no colon")
