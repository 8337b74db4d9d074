"""The envelope of every event, and its JSON codec (msgspec; proto3-JSON compatible, see proto/)."""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Any, Final, TypeVar, get_args

import msgspec

from glowplug.events import commands, facts

# Check decoded values for numbers, ids and nesting that no writer of Glowplug sends.
#
# JSON allows integers of thousands of digits, "nan" and "inf" as text where a number is expected, names of any length
# and unbounded nesting. Such a value has the right type but breaks code that computes with it or writes it again. The
# checks of a type are built once.

# 64 bits: what the wire contract (proto/) holds. Epoch seconds and bytes stay far below it.
MAX_NUMBER: Final = 2**63 - 1
# Engine arguments are the only free JSON in the contract; two levels are in use.
MAX_DEPTH: Final = 32
MAX_ID_CHARS: Final = 1024
IDS: Final = frozenset({"key", "model_key", "digest", "name", "issuer", "target", "tenant", "tenant_name"})  # and *_id
Check = Callable[[Any], None]


class Unsound(ValueError):
    """A decoded value holds a number, an id or a nesting that no writer sends."""


def check_of(hint: Any) -> Check | None:
    """Return a function that raises Unsound for an unsound value of the annotation `hint`; None where none can be
    unsound."""
    known: Check | None = _made(hint)
    return known


@cache
def _made(hint: Any) -> Check | None:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float):
        return _number
    if hint is Any or origin in (UnionType, typing.Union):
        return _anything
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "__struct_fields__")):
        return _fields_of(hint)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _each(check_of(args[1]), is_mapping=True)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Sequence):
        return _each(check_of(args[0]), is_mapping=False)
    return None


def _number(value: float) -> None:
    if not -MAX_NUMBER <= value <= MAX_NUMBER:  # NaN is in no range
        raise Unsound(f"a number is out of range: {str(value)[:40]}")


def _each(check: Check | None, *, is_mapping: bool) -> Check | None:
    if check is None:
        return None

    def items(value: Any) -> None:
        for item in value.values() if is_mapping else value:
            check(item)

    return items


def _fields_of(cls: type[Any]) -> Check | None:
    """Build the check of a class. Its numbers and ids are read at once: most events have nothing else to check."""
    hints = typing.get_type_hints(cls)
    names = [n for n in hints if typing.get_origin(hints[n]) is not typing.ClassVar and not n.startswith("__")]
    numbers = [name for name in names if hints[name] in (int, float)]
    ids = [name for name in names if hints[name] is str and (name in IDS or name.endswith("_id"))]
    inner = [(attrgetter(name), check) for name in names if name not in numbers and (check := check_of(hints[name]))]
    if not numbers and not ids and not inner:
        return None
    read = attrgetter(*numbers) if len(numbers) > 1 else None
    only = attrgetter(numbers[0]) if len(numbers) == 1 else None
    read_ids = attrgetter(*ids, *ids[:1]) if ids else None  # one twice, so that it returns a tuple

    def fields(value: Any) -> None:
        given = read(value) if read else (only(value),) if only else ()
        for name, number in zip(numbers, given, strict=True):
            if not -MAX_NUMBER <= number <= MAX_NUMBER:
                raise Unsound(f"{cls.__name__}.{name} is out of range: {str(number)[:40]}")
        if read_ids and max(map(len, read_ids(value))) > MAX_ID_CHARS:
            name = max(ids, key=lambda name: len(getattr(value, name)))
            raise Unsound(f"{cls.__name__}.{name} is longer than {MAX_ID_CHARS} characters")
        for of, check in inner:
            check(of(value))

    return fields


def _anything(value: Any, depth: int = 0) -> None:
    """Check free JSON, or a value of one of several types."""
    if isinstance(value, int | float):
        _number(value)
    elif isinstance(value, Mapping | list | tuple):
        if depth == MAX_DEPTH:
            raise Unsound(f"it is nested more than {MAX_DEPTH} levels deep")
        for item in value.values() if isinstance(value, Mapping) else value:
            _anything(item, depth + 1)
    elif (check := check_of(type(value))) is not None:
        check(value)


SCHEMA = 1
# Of one event or row: the bus's limit for an event (max_payload), since an event announces each row.
MAX_BYTES = 4 << 20
SAID = 200  # characters kept of an error, which may quote input of any length
T = TypeVar("T")
PAYLOADS: dict[str, type[Any]] = {cls.TYPE: cls for cls in (*get_args(facts.Fact), *get_args(commands.Command))}
COMMANDS: frozenset[str] = frozenset(cls.TYPE for cls in get_args(commands.Command))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One payload with its origin. `occurred_at` is epoch seconds by the issuer's clock; `epoch` fences commands (0 for
    facts)."""

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
    """Bytes that are not an event or row of Glowplug; they are counted and skipped, never retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wire(Event):
    """An event whose payload is still JSON: its `type` says how to decode it."""

    data: msgspec.Raw


_encoder = msgspec.json.Encoder()
_wire = msgspec.json.Decoder(_Wire, strict=False)
_data = {name: (msgspec.json.Decoder(cls, strict=False), check_of(cls)) for name, cls in PAYLOADS.items()}
_check_wire: Any = check_of(_Wire)
# All errors of decoding: not JSON, not UTF-8, another shape, numbers out of range (each a ValueError), deep nesting.
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
