"""Finished spans, bounded in size. Times are epoch nanoseconds, ids lower-case hex (32 characters for a trace, 16 for a
span)."""

from collections.abc import Sequence

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Status

AttributeValue = bool | int | float | str
Attributes = tuple[tuple[str, AttributeValue], ...]

MAX_NAME_CHARS = 256
MAX_VALUE_CHARS = 1024
MAX_ATTRIBUTES = 64
MAX_EVENTS = 32
MAX_LINKS = 16

# Attributes of OpenTelemetry instrumentation with prompts and answers, dropped on arrival unless opted in.
CONTENT_ATTRIBUTES = frozenset(
    {
        "gen_ai.prompt",
        "gen_ai.completion",
        "gen_ai.input.messages",
        "gen_ai.output.messages",
        "gen_ai.system_instructions",
        "gen_ai.tool.call.arguments",
        "gen_ai.tool.call.result",
        "input.value",
        "output.value",
    }
)
CONTENT_PREFIXES = (
    "gen_ai.prompt.",
    "gen_ai.completion.",
    "llm.prompts",
    "llm.completions",
    "llm.input_messages",
    "llm.output_messages",
    "traceloop.entity.input",
    "traceloop.entity.output",
)


class SpanEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    time_ns: int
    name: str
    attributes: Attributes = ()


class SpanLink(msgspec.Struct, frozen=True, array_like=True, gc=False):
    trace_id: str
    span_id: str


class Resource(msgspec.Struct, frozen=True, array_like=True):
    service: str
    attributes: Attributes = ()


class Span(msgspec.Struct, frozen=True, array_like=True):
    """`parent_id`: "" for a root; `kind` and `status`: OTLP's numbers."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    status: int = 0
    status_message: str = ""
    scope: str = ""
    attributes: Attributes = ()
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()

    def attribute(self, key: str) -> AttributeValue | None:
        return next((value for name, value in self.attributes if name == key), None)

    @property
    def is_error(self) -> bool:
        return self.status == Status.STATUS_CODE_ERROR


def is_content(key: str) -> bool:
    return key in CONTENT_ATTRIBUTES or key.startswith(CONTENT_PREFIXES)


def clip(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def bounded(attributes: Sequence[tuple[str, AttributeValue]], *, keep_content: bool) -> Attributes:
    """Keep the first MAX_ATTRIBUTES attributes, values clipped; content only if opted in."""
    kept = [
        (clip(key, MAX_NAME_CHARS), clip(value, MAX_VALUE_CHARS) if isinstance(value, str) else value)
        for key, value in attributes
        if keep_content or not is_content(key)
    ]
    return tuple(kept[:MAX_ATTRIBUTES])


def without_texts(span: Span, resource: Resource) -> tuple[Span, Resource]:
    """Drop prompts and answers."""
    events = tuple(SpanEvent(e.time_ns, e.name, bounded(e.attributes, keep_content=False)) for e in span.events)
    attributes = bounded(span.attributes, keep_content=False)
    clean = msgspec.structs.replace(span, attributes=attributes, events=events)
    return clean, Resource(resource.service, bounded(resource.attributes, keep_content=False))
