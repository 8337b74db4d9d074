"""Lay names and values over a dataclass: the environment over settings, options over a policy's params, a scenario over
its fleet. A value may be text. Each surface names the field of a Misread in its own way.
"""

import difflib
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

from glowplug.domain.bounds import OutOfBounds, kinds_of, marks_of, problem_of

T = TypeVar("T")
TRUE: Final = ("1", "true", "yes", "on", "y", "t")
FALSE: Final = ("0", "false", "no", "off", "n", "f")


class Misread(ValueError):
    """`path`: names of fields, outermost first; () is the whole. `problem` omits them."""

    def __init__(self, path: tuple[str, ...], problem: str) -> None:
        super().__init__(f"{'.'.join(path)}: {problem}" if path else problem)
        self.path, self.problem = path, problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Marks a params' field that the environment may set, by the field's name or by `name`. Of an advanced one, the
    documentation has the name alone. `read`: False for one that only a constructor sets."""

    name: str = ""
    advanced: bool = False
    read: bool = True


SETTING: Final = Setting()
ADVANCED: Final = Setting(advanced=True)
CONSTANT: Final = Setting(read=False)  # in a settings class


def laid_over(default: T, given: Mapping[str, Any]) -> T:
    """Replace fields of the dataclass `default`, recursively. Raises Misread."""
    changes = _changes(type(default), given, default)
    return _made(lambda: replace(default, **changes))  # type: ignore[type-var]


def nested(given: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """{("a", "b"): 1} becomes {"a": {"b": 1}}. Raises Misread for a value in place of fields."""
    tree: dict[str, Any] = {}
    for path, value in given.items():
        inner = tree
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise Misread(path, f"{name} has a value")
        inner[path[-1]] = value
    return tree


def known(name: str, names: Iterable[str], what: str = "there are") -> str:
    """'(did you mean x? there are: a, b, x)' for an unknown name."""
    choices = sorted(names)
    near = difflib.get_close_matches(name, choices, 1)
    return f"({f'did you mean {near[0]}? ' if near else ''}{what}: {', '.join(choices) or 'none'})"


def _changes(cls: type, given: Any, default: Any = None) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise Misread((), f"{given!r} is not a mapping of fields to values")
    kinds, found = kinds_of(cls), {}
    for name, value in given.items():
        if name not in kinds:
            raise Misread((str(name),), f"there is no such field {known(str(name), kinds)}")
        old = getattr(default, name, None)
        try:
            inside = is_dataclass(old) and isinstance(value, Mapping)
            found[name] = laid_over(old, value) if inside else _value(kinds[name], value)
            if said := problem_of(found[name], marks_of(kinds[name])):
                raise ValueError(said)
        except Misread as error:
            raise Misread((name, *error.path), error.problem) from error
        except ValueError as error:
            raise Misread((name,), str(error)) from error
    return found


def _made(make: Callable[[], T]) -> T:
    try:
        return make()
    except OutOfBounds as error:
        raise Misread((error.field,), error.problem) from error
    except ValueError as error:
        raise Misread((), str(error)) from error


def _value(kind: Any, given: Any) -> Any:
    """Raises ValueError; inside a value, Misread."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _value(args[0], given)
    if kind is Any:
        return given
    if origin in (Union, types.UnionType):  # of one type and None
        return None if given is None else _value(args[0], given)
    if origin is Literal:
        return _named(args, given)
    if origin is not None:
        return _many(origin, args, given)
    if isinstance(given, kind) and not isinstance(given, int | float):
        return given
    if is_dataclass(kind):
        return _new(kind, given)
    if issubclass(kind, Enum):
        return kind(_named([one.value for one in kind], given))
    return _plain(kind, given)


def _named(names: Sequence[Any], given: Any) -> Any:
    if given not in names:
        raise ValueError(f"{given!r} is not one of {', '.join(str(name) or repr(name) for name in names)}")
    return given


def _plain(kind: type, given: Any) -> Any:
    if kind is Path and isinstance(given, str):
        return Path(given)
    if kind is bool:
        if str(given).lower() not in TRUE + FALSE:
            raise ValueError(f"{given!r} is neither true nor false")
        return str(given).lower() in TRUE
    if kind not in (int, float) or isinstance(given, bool):
        raise ValueError(f"{given!r} is not a {'number or ' * (kind in (int, float))}word")
    try:
        number = kind(given)
        if kind is int and isinstance(given, float) and number != given:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{given!r} is not a {'whole ' * (kind is int)}number") from None
    if isinstance(given, str) and not math.isfinite(number):
        raise ValueError(f"{given!r} is not a number")
    return number


def _many(origin: Any, kinds: tuple[Any, ...], given: Any) -> Any:
    if issubclass(origin, Mapping):
        if not isinstance(given, Mapping):
            raise ValueError(f"{given!r} is not a mapping")
        return {_value(kinds[0], name): _value(kinds[1], value) for name, value in given.items()}
    if not isinstance(given, list | tuple | set | frozenset):
        raise ValueError(f"{given!r} is not a list")
    if origin is tuple and kinds[-1] is not Ellipsis and len(kinds) != len(given):
        raise ValueError(f"{given!r} has not {len(kinds)} parts")
    of_each = kinds if origin is tuple and kinds[-1] is not Ellipsis else (kinds[0],) * len(given)
    found = []
    for number, (kind, one) in enumerate(zip(of_each, given, strict=True)):
        try:
            found.append(_value(kind, one))
        except Misread as error:
            raise Misread((str(number), *error.path), error.problem) from error
    return origin(found)


def _new(kind: Any, given: Any) -> Any:
    found = _changes(kind, given)
    for field in fields(kind):
        if field.init and field.name not in found and field.default is field.default_factory is MISSING:
            raise Misread((field.name,), "is missing")
    return _made(lambda: kind(**found))
