"""Jaeger's JSON, field by field."""

import pytest

from glowplug.services.console import jaeger
from glowplug.services.console.trace_store import TraceStore
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
