"""W3C trace contexts."""

import re
from dataclasses import dataclass

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`trace_id` and `span_id` in lower-case hexadecimal digits."""

    trace_id: str
    span_id: str
    sampled: bool


def parse_traceparent(text: str) -> TraceContext | None:
    """Parse a W3C traceparent header; None if malformed or all zero. Version 00 has four lower-case fields, later ones
    may have more."""
    match = _TRACEPARENT.fullmatch(text)
    if match is None or match["version"] == "ff" or (match["version"] == "00" and match["more"]):
        return None
    if not (match["trace"].strip("0") and match["span"].strip("0")):
        return None
    return TraceContext(match["trace"], match["span"], bool(int(match["flags"], 16) & 1))


def is_sampled(traceparent: str) -> bool:
    context = parse_traceparent(traceparent)
    return context is not None and context.sampled


def trace_id_of(traceparent: str) -> str:
    """ "" unless sampled."""
    context = parse_traceparent(traceparent)
    return context.trace_id if context is not None and context.sampled else ""
