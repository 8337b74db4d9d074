"""Mark the fields that are times, and move them all from one clock to another.

ready_at: Moment = 0.0      epoch seconds by its writer's clock; 0: none
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Mover = Callable[[Any, float], Any]  # (value, by_s) -> the same with other times
_MARK: Final = "moment"
Moment = Annotated[float, _MARK]


def moved(value: T, by_s: float) -> T:
    """Return the dataclass `value` with all its times, also those within its fields, later by `by_s`."""
    cls: Any = type(value)
    move = mover_of(cls)
    changed: T = value if move is None else move(value, by_s)
    return changed


@cache
def mover_of(kind: Any) -> Mover | None:
    """Return how values of this type are moved; None if they hold no time."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _later if _MARK in kind.__metadata__ else mover_of(args[0])
    if origin in (Union, types.UnionType):
        return moved if any(mover_of(one) for one in args) else None
    if isinstance(kind, type) and is_dataclass(kind):
        return _mover_of_fields(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mover_of_values(mover_of(args[1]))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return _mover_of_items(mover_of(args[0]))
    return None


def _later(at: float, by_s: float) -> float:
    return at and at + by_s


def _mover_of_fields(cls: Any) -> Mover | None:
    hints = get_type_hints(cls, include_extras=True)
    names = cls.__dataclass_fields__
    movers = {name: move for name in names if name in hints and (move := mover_of(hints[name])) is not None}
    if not movers:
        return None

    def fields(value: Any, by_s: float) -> Any:
        return replace(value, **{name: move(getattr(value, name), by_s) for name, move in movers.items()})

    return fields


def _mover_of_values(move: Mover | None) -> Mover | None:
    if move is None:
        return None
    return lambda values, by_s: {key: move(value, by_s) for key, value in values.items()}


def _mover_of_items(move: Mover | None) -> Mover | None:
    if move is None:
        return None
    return lambda items, by_s: tuple(move(item, by_s) for item in items)
