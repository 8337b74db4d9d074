"""Checks of decoded values for numbers and nesting that no writer of Glowplug's can mean.

JSON allows integers of thousands of digits, "nan" and "inf" as text where a number is expected, and unbounded nesting
of lists. Such a value has the right type but breaks the code that computes with it or writes it again, so it is refused
at decoding. The checks of a type are built once.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from types import UnionType
from typing import Any, Final

# 64 bits: what the wire contract (proto/) holds. Epoch seconds and bytes stay far below it.
MAX_NUMBER: Final = 2**63 - 1
# Engine arguments are the only free JSON in the contract; two levels are in use.
MAX_DEPTH: Final = 32
Check = Callable[[Any], None]


class Unsound(ValueError):
    """A decoded value holds a number or a nesting that no writer can mean."""


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
    """Build the check of a class. All its numbers are read at once, since most events have nothing else to check."""
    hints = typing.get_type_hints(cls)
    names = [n for n in hints if typing.get_origin(hints[n]) is not typing.ClassVar and not n.startswith("__")]
    numbers = [name for name in names if hints[name] in (int, float)]
    inner = [(attrgetter(name), check) for name in names if name not in numbers and (check := check_of(hints[name]))]
    if not numbers and not inner:
        return None
    read = attrgetter(*numbers) if len(numbers) > 1 else None
    only = attrgetter(numbers[0]) if len(numbers) == 1 else None

    def fields(value: Any) -> None:
        given = read(value) if read else (only(value),) if only else ()
        for name, number in zip(numbers, given, strict=True):
            if not -MAX_NUMBER <= number <= MAX_NUMBER:
                raise Unsound(f"{cls.__name__}.{name} is out of range: {str(number)[:40]}")
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
