"""Bound numbers wherever a type is made: model file, REST, scenario or wire."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any


class OutOfBounds(ValueError):
    """A field has an impossible value. `problem` omits its name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem

    def __reduce__(self) -> tuple[type["OutOfBounds"], tuple[str, str]]:
        """Pickle by constructor arguments."""
        return type(self), (self.field, self.problem)


def check_bounds(
    owner: Any, *, above_0: Collection[str] = (), most: Mapping[str, float] = MappingProxyType({}), **least: float
) -> None:
    """Check the numbers of a dataclass: no NaN; above 0 if in `above_0`, else at least `least` (default 0); at most
    `most`. Raises OutOfBounds for the first bad field."""
    for field in fields(owner):
        value = getattr(owner, field.name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if field.name in most and value > most[field.name]:
            raise OutOfBounds(field.name, f"{value} is above {most[field.name]}")
        if field.name in above_0:
            if not value > 0:
                raise OutOfBounds(field.name, f"{value} is not above 0")
        elif not value >= (bound := least.get(field.name, 0)):
            raise OutOfBounds(field.name, f"{value} is below {bound}" if value == value else f"{value} is no number")
