"""Jaeger's JSON, field by field, and its search."""

import pytest

from services.console import jaeger
from services.console.jaeger import BadQuery, Search
from services.console.trace_store import TraceStore
from tests import console_story as story

NOW = 10_000.0


@pytest.fixture
def store() -> TraceStore:
    kept = TraceStore()
    for request in (
        story.cold_trace(0, NOW - 100, "m", "r-0"),
        story.warm_trace(1, NOW - 50, "m", "r-1"),
        story.failed_trace(2, NOW - 10, "n", "r-2"),
    ):
        kept.add(story.received(request).spans)
    return kept


def ids(found: list[dict[str, object]]) -> list[object]:
    return [trace["traceID"] for trace in found]


def test_a_trace_has_jaegers_shape(store: TraceStore) -> None:
    trace = jaeger.trace_json(store.get(story.trace_id(2)) or [])
    root, stream, orphan = trace["spans"]
    assert trace["processes"][root["processID"]]["serviceName"] == "glowplug-router"
    assert trace["processes"][orphan["processID"]]["serviceName"] == "glowplug-agent"
    assert root["startTime"] == int((NOW - 10) * 1e6) and root["duration"] == 310_000 and root["references"] == []
    assert stream["references"] == [{"refType": "CHILD_OF", "traceID": story.trace_id(2), "spanID": "0000000000000001"}]
    tags = {tag["key"]: (tag["type"], tag["value"]) for tag in root["tags"]}
    assert tags["error"] == ("bool", True)
    assert tags["otel.status_code"] == ("string", "ERROR")
    assert tags["otel.status_description"] == ("string", "engine_failed")
    assert tags["span.kind"] == ("string", "server")
    assert tags["glowplug.emulated"] == ("bool", True)
    assert orphan["warnings"] and root["warnings"] is None
    assert ("int64", -9) in [(tag["type"], tag["value"]) for tag in orphan["tags"]]


def test_events_are_logs(store: TraceStore) -> None:
    root = jaeger.trace_json(store.get(story.trace_id(0)) or [])["spans"][0]
    assert root["logs"][0]["fields"][0] == {"key": "event", "type": "string", "value": "first byte"}
    assert root["logs"][0]["timestamp"] == pytest.approx((NOW - 100 + 1.79) * 1e6, abs=2)


@pytest.mark.parametrize(
    ("query", "seeds"),
    [
        ({"service": "glowplug-router"}, [2, 1, 0]),
        ({"service": "glowplug-router", "limit": "1"}, [2]),
        ({"service": "glowplug-engine"}, [0]),
        ({"service": "unknown"}, []),
        ({"service": "glowplug-router", "lookback": "1m"}, [2, 1]),
        ({"service": "glowplug-router", "lookback": "1m", "start": "0"}, [2, 1, 0]),
        ({"end": str(int((NOW - 60) * 1e6))}, [0]),
        ({"operation": "prefill"}, [0]),
        ({"operation": "all"}, [2, 1, 0]),
        ({"minDuration": "2s"}, [0]),
        ({"maxDuration": "60ms", "service": "glowplug-agent"}, [2]),
        ({"tags": '{"error":"true"}'}, [2]),
        ({"tags": '{"glowplug.request_id":"r-1"}'}, [1]),
        ({"tags": '{"service.instance.id":"engine"}'}, [0]),
    ],
)
def test_search(store: TraceStore, query: dict[str, str], seeds: list[int]) -> None:
    found = jaeger.find(store, jaeger.parse_search(query, NOW))
    assert ids(found) == [story.trace_id(seed) for seed in seeds]


@pytest.mark.parametrize(
    "query",
    [
        {"limit": "many"},
        {"start": "1.5"},
        {"lookback": "2 weeks"},
        {"minDuration": "1"},
        {"tags": "error=true"},
        {"tags": '["error"]'},
    ],
)
def test_a_query_that_cannot_be_read_names_the_parameter(query: dict[str, str]) -> None:
    with pytest.raises(BadQuery, match=next(iter(query))):
        jaeger.parse_search(query, NOW)


def test_durations_are_gos() -> None:
    assert jaeger.duration_us("1h30m", "x") == 5400e6
    assert jaeger.duration_us("1.5ms", "x") == 1500
    assert jaeger.duration_us("", "x") is None


def test_limit_is_bounded() -> None:
    assert jaeger.parse_search({"limit": "999999"}, NOW).limit == jaeger.MAX_LIMIT
    assert jaeger.parse_search({}, NOW) == Search(limit=20)


def test_operations_and_dependencies(store: TraceStore) -> None:
    found = jaeger.operations(store, "glowplug-engine")
    assert [op["name"] for op in found] == ["chat", "decode", "prefill"]
    assert found[0]["spanKind"] == "server"
    calls = {(d["parent"], d["child"]): d["callCount"] for d in jaeger.dependencies(store, 0, NOW * 1e6)}
    assert calls["glowplug-router", "glowplug-engine"] == 1
    assert calls["glowplug-placer", "glowplug-agent"] == 1
    assert jaeger.dependencies(store, 0, 1) == []


def test_tags_are_asked_for_in_both_of_jaegers_ways(store: TraceStore) -> None:
    def found(**query: str) -> list[object]:
        return ids(jaeger.find(store, jaeger.parse_search({"service": "glowplug-router", **query}, NOW)))

    assert found(tags='{"glowplug.request_id": "r-2"}') == found(tag="glowplug.request_id:r-2") == [story.trace_id(2)]
    with pytest.raises(BadQuery, match="key:value"):
        found(tag="no colon")
