"""The envelope of every event, and its JSON codec (msgspec; proto3-JSON compatible, see proto/)."""

from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import msgspec

from glowplug.events import commands, facts
from glowplug.events.soundness import check_of

SCHEMA = 1
# Of one event or row: the bus's limit for an event (max_payload), since an event announces each row.
MAX_BYTES = 4 << 20
SAID = 200  # characters kept of an error, which may quote input of any length
T = TypeVar("T")
PAYLOADS: dict[str, type[Any]] = {cls.TYPE: cls for cls in (*get_args(facts.Fact), *get_args(commands.Command))}
COMMANDS: frozenset[str] = frozenset(cls.TYPE for cls in get_args(commands.Command))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One payload with its origin. `occurred_at` is epoch seconds; `epoch` fences commands (0 for facts)."""

    event_id: str
    type: str
    occurred_at: float
    issuer: str  # service_id of the writer
    data: Any  # a Fact or a Command
    cause_id: str = ""
    traceparent: str = ""
    epoch: int = 0
    schema: int = SCHEMA


class MalformedEvent(ValueError):
    """Bytes are no event or row of Glowplug's; they are counted and skipped, never retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wire(Event):
    """An event whose payload is still JSON: its `type` says how to decode it."""

    data: msgspec.Raw


_encoder = msgspec.json.Encoder()
_wire = msgspec.json.Decoder(_Wire, strict=False)
_data = {name: (msgspec.json.Decoder(cls, strict=False), check_of(cls)) for name, cls in PAYLOADS.items()}
_check_wire: Any = check_of(_Wire)
# All that decoding raises: no JSON, no UTF-8, another shape, numbers out of range (each a ValueError), deep nesting.
UNREADABLE = (ValueError, RecursionError)


def _check_size(raw: bytes, max_bytes: int = MAX_BYTES) -> None:
    if len(raw) > max_bytes:
        raise MalformedEvent(f"{len(raw)} bytes, at most {max_bytes} are read")


def encode(event: Event) -> bytes:
    """Encode one event as UTF-8 JSON."""
    return _encoder.encode(event)


def decode(raw: bytes) -> Event:
    """Decode one event. Unknown fields are ignored, since the writer may be newer. Raises MalformedEvent."""
    try:
        _check_size(raw)
        wire = _wire.decode(raw)
        decoder, check = _data[wire.type]
        data = decoder.decode(wire.data)
        _check_wire(wire)
        if check is not None:
            check(data)
    except KeyError as error:
        raise MalformedEvent(f"unknown event type {error}"[:SAID]) from error
    except UNREADABLE as error:
        raise MalformedEvent(str(error)[:SAID]) from error
    return Event(**{name: getattr(wire, name) for name in Event.__slots__} | {"data": data})


def wrong_with(kind: str, data: object) -> str:
    """Say what is wrong with a payload decoded from JSON, as 'field: problem'; '' when it is of this type. Unknown
    fields are ignored. Raises KeyError for an unknown type."""
    try:
        msgspec.convert(data, PAYLOADS[kind])
    except (msgspec.ValidationError, RecursionError) as error:
        problem, _, place = str(error).partition(" - at `$")
        problem = problem[:1].lower() + problem[1:].replace("`", "")
        return f"data{place.rstrip('`')}: {problem}"
    return ""


def to_json(value: object) -> bytes:
    """Encode any domain value as JSON, for the store and REST."""
    return _encoder.encode(value)


def from_json(raw: bytes, cls: type[T], *, max_bytes: int = MAX_BYTES) -> T:
    """Decode a domain value encoded by `to_json`. Raises MalformedEvent."""
    try:
        _check_size(raw, max_bytes)
        value = msgspec.json.decode(raw, type=cls, strict=False)
        if (check := check_of(cls)) is not None:
            check(value)
    except UNREADABLE as error:
        raise MalformedEvent(f"{getattr(cls, '__name__', cls)}: {error}"[:SAID]) from error
    return value
