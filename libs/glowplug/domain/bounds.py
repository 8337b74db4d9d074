"""Bound numbers and words where a field is declared, wherever its type is made: setting, option, scenario, file, REST
or wire.

    late_ratio: float = 1.2                                        at least 0, as every number without bounds
    num_steps: Count = 4                                           at least 1
    keep_alive_s: Annotated[float, Bounds(least=-1)] = 30.0
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from glowplug.domain.errors import BadRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of a number: at least `least`, or above `above`, and at most `most`; never NaN."""

    least: float = 0
    above: float | None = None
    most: float = math.inf

    def problem(self, value: float) -> str:
        """ "" if there is none."""
        if value != value:
            return f"{value} is not a number"
        if self.above is not None and not value > self.above:
            return f"{value} is not above {self.above}"
        if self.above is None and value < self.least:
            return f"{value} is below {self.least}"
        return f"{value} is above {self.most}" if value > self.most else ""


@dataclass(frozen=True, slots=True)
class Checked:
    """Of a word: `parse` takes it, or raises ValueError or BadRequest."""

    parse: Callable[[str], object]

    def problem(self, value: str) -> str:
        try:
            self.parse(value)
        except (ValueError, BadRequest) as error:
            return str(error)
        return ""


Positive = Annotated[float, Bounds(above=0)]
Count = Annotated[int, Bounds(least=1)]
Share = Annotated[float, Bounds(most=1)]
NOT_NEGATIVE = Bounds()


class OutOfBounds(ValueError):
    """A field has an impossible value. `problem` omits its name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem

    def __reduce__(self) -> tuple[type["OutOfBounds"], tuple[str, str]]:
        """Pickle by constructor arguments."""
        return type(self), (self.field, self.problem)


class Bounded:
    """A dataclass that checks its bounds when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_bounds(self)


def check_bounds(owner: Any) -> None:
    """Check the numbers and words of a dataclass. Raises OutOfBounds for the first bad field."""
    cls: Any = type(owner)
    for name, marks in _bounded(cls):
        if said := problem_of(getattr(owner, name), marks):
            raise OutOfBounds(name, said)


def problem_of(value: Any, marks: tuple[object, ...]) -> str:
    """`marks`: of the field's Annotated."""
    if isinstance(value, str):
        return next((said for mark in marks if isinstance(mark, Checked) and (said := mark.problem(value))), "")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    return next((mark for mark in marks if isinstance(mark, Bounds)), NOT_NEGATIVE).problem(value)


def marks_of(kind: Any) -> tuple[object, ...]:
    return getattr(kind, "__metadata__", ())


@cache
def kinds_of(cls: Any) -> dict[str, Any]:
    """Field -> its type, with marks; those of the constructor."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


@cache
def _bounded(cls: type) -> tuple[tuple[str, tuple[object, ...]], ...]:
    return tuple((name, marks_of(kind)) for name, kind in kinds_of(cls).items() if kind not in (str, bool))


def word(pattern: str, max_chars: int = 10_000) -> Checked:
    """A word that matches `pattern` whole."""
    compiled = re.compile(pattern)

    def parse(given: str) -> None:
        if len(given) > max_chars or not compiled.fullmatch(given):
            longest = f" of at most {max_chars} characters" if len(given) > max_chars else ""
            raise ValueError(f"{given!r} is not a word {pattern}{longest}")

    return Checked(parse)
