"""OTLP/HTTP in both encodings, and refusals."""

import base64
import gzip
import json
from collections.abc import Callable

import pytest
from google.protobuf import json_format
from google.rpc import status_pb2  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue

from glowplug.services.console import otlp
from glowplug.services.console.otlp import JSON, PROTOBUF, OtlpError
from glowplug.services.console.spans import MAX_ATTRIBUTES, MAX_VALUE_CHARS
from tests import console_story as story


def as_otlp_json(request: ExportTraceServiceRequest) -> bytes:
    """OTLP's JSON: protobuf's mapping with hex ids and numeric enums."""
    tree = json_format.MessageToDict(request, use_integers_for_enums=True)
    for resource_spans in tree["resourceSpans"]:
        for scope_spans in resource_spans["scopeSpans"]:
            for span in scope_spans["spans"]:
                for key in ("traceId", "spanId", "parentSpanId"):
                    if key in span:
                        span[key] = base64.b64decode(span[key]).hex()
    return json.dumps(tree).encode()


def test_protobuf_and_json_give_the_same_spans() -> None:
    request = story.cold_trace(3, 1000.0, "smol-chat", "req-1")
    binary = story.received(request)
    text = otlp.decode(as_otlp_json(request), JSON)
    assert binary == text
    assert len(binary.spans) == 15
    root, resource = binary.spans[0]
    assert (root.trace_id, root.span_id, root.parent_id) == (story.trace_id(3), "0" * 15 + "1", "")
    assert (root.start_ns, root.end_ns) == (1000 * 10**9, int(1002.61 * 1e9))
    assert root.attribute("glowplug.request_id") == "req-1"
    assert root.events[0].name == "first byte"
    assert resource.service == "glowplug-router"


def test_unknown_json_fields_are_ignored() -> None:
    tree = json.loads(as_otlp_json(story.warm_trace(1, 5.0, "m", "r")))
    tree["fromTheFuture"] = {"a": [1]}
    assert len(otlp.decode(json.dumps(tree).encode(), JSON).spans) == 2


@pytest.mark.parametrize(
    ("status", "read"),
    [
        (400, lambda: otlp.decode(b"\xff\xff not protobuf", PROTOBUF)),
        (400, lambda: otlp.decode(b"{", JSON)),
        (400, lambda: otlp.decode(b"[]", JSON)),
        (400, lambda: otlp.decode(b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}', JSON)),
        (400, lambda: otlp.decode(b'{"resourceSpans": [{"scopeSpans": [{"spans": ["text"]}]}]}', JSON)),
        (400, lambda: otlp.decode(b'{"resourceSpans": 3}', JSON)),
        (400, lambda: otlp.decode(b"[" * 100_000, JSON)),
        (400, lambda: otlp.decode(b"\xff\xfe", JSON)),
        (415, lambda: otlp.media_type("")),
        (415, lambda: otlp.media_type("text/plain")),
        (415, lambda: otlp.media_type("application/grpc")),
        (413, lambda: otlp.decompress(gzip.compress(b"\0" * 10_000_000), "gzip", max_bytes=1000)),
        (400, lambda: otlp.decompress(gzip.compress(b"abc")[:-9], "gzip", max_bytes=1000)),
        (400, lambda: otlp.decompress(b"plain", "gzip", max_bytes=1000)),
        (415, lambda: otlp.decompress(b"abc", "br", max_bytes=1000)),
    ],
)
def test_what_is_not_otlp_is_refused_with_its_status(status: int, read: Callable[[], object]) -> None:
    with pytest.raises(OtlpError) as error:
        read()
    assert error.value.status == status


def test_either_media_type_and_gzip_are_understood() -> None:
    assert otlp.media_type("application/json; charset=utf-8") == JSON
    assert otlp.media_type("Application/X-Protobuf") == PROTOBUF
    assert otlp.decompress(gzip.compress(b"abc"), "gzip", max_bytes=3) == b"abc"
    assert otlp.decompress(b"abc", "", max_bytes=3) == b"abc"


def test_broken_spans_are_refused_and_the_rest_is_kept() -> None:
    request = story.warm_trace(1, 5.0, "m", "r")
    spans = request.resource_spans[0].scope_spans[0].spans
    spans.add().CopyFrom(spans[0])
    spans[-1].trace_id = b"short"
    spans.add().CopyFrom(spans[0])
    spans[-1].span_id = b"\0" * 8
    batch = story.received(request)
    assert (len(batch.spans), batch.num_rejected) == (2, 2)
    answer = ExportTraceServiceResponse.FromString(otlp.encode_response(batch, PROTOBUF))
    assert answer.partial_success.rejected_spans == 2 and answer.partial_success.error_message
    assert json.loads(otlp.encode_response(batch, JSON))["partialSuccess"]["rejectedSpans"] == "2"


def test_partial_success_is_left_out_when_all_went_well() -> None:
    """OTLP: "servers MUST leave the partial_success field unset in case of a full success"."""
    batch = story.received(story.warm_trace(1, 5.0, "m", "r"))
    assert otlp.encode_response(batch, PROTOBUF) == b""
    assert json.loads(otlp.encode_response(batch, JSON)) == {}


def test_errors_are_google_rpc_status() -> None:
    error = OtlpError(413, "too large")
    assert status_pb2.Status.FromString(otlp.encode_error(error, PROTOBUF)).message == "too large"
    assert json.loads(otlp.encode_error(error, JSON))["message"] == "too large"


def test_every_span_is_bounded_and_prompts_are_dropped() -> None:
    request = story.warm_trace(1, 5.0, "m", "r")
    span = request.resource_spans[0].scope_spans[0].spans[0]
    span.attributes.extend(story.pairs({"gen_ai.prompt.0.content": "secret", "gen_ai.input.messages": "secret"}))
    span.attributes.extend(story.pairs({"long": "x" * 5000}))
    span.attributes.extend(story.pairs({f"a{i}": i for i in range(200)}))
    found = story.received(request).spans[0][0]
    assert "secret" not in repr(found)
    assert len(found.attributes) == MAX_ATTRIBUTES
    assert len(str(found.attribute("long"))) == MAX_VALUE_CHARS
    kept = story.received(request, keep_content=True).spans[0][0]
    assert "secret" in repr(kept)


def test_lists_become_json_text() -> None:
    request = story.warm_trace(1, 5.0, "m", "r")
    values = ArrayValue(values=[AnyValue(string_value="é"), AnyValue(int_value=2), AnyValue(bytes_value=b"\0")])
    span = request.resource_spans[0].scope_spans[0].spans[0]
    span.attributes.append(KeyValue(key="list", value=AnyValue(array_value=values)))
    found = story.received(request).spans[0][0]
    assert found.attribute("list") == '["é", 2, "AA=="]'
