"""Fields of a scenario laid over a dataclass of the simulator or of a controller: whatever it has, can be set."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from glowplug.domain.bounds import OutOfBounds
from glowplug.simulator.scenario.errors import ScenarioError, from_pydantic, join, known

T = TypeVar("T")


def overlay(default: T, given: Mapping[str, Any], path: str) -> T:
    """`default`, a dataclass, with the fields of `given`, which are checked against their types; inner dataclasses are
    laid over in turn. Raises ScenarioError naming the field."""
    if not isinstance(given, Mapping):
        raise ScenarioError(path, f"{given!r} is no mapping of fields to values")
    types = _types(type(default))  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if name not in types:
            raise ScenarioError(join(path, name), f"there is no such field {known(name, types)}")
        old = getattr(default, name)
        if is_dataclass(old) and not isinstance(old, type) and isinstance(value, Mapping):
            changes[name] = overlay(old, value, join(path, name))
        else:
            changes[name] = _checked(types[name], value, join(path, name))
    try:
        return replace(default, **changes)  # type: ignore[type-var]
    except OutOfBounds as error:
        raise ScenarioError(join(path, error.field), error.problem) from error
    except ValueError as error:
        raise ScenarioError(path, str(error)) from error


def _checked(kind: Any, value: Any, path: str) -> Any:
    if isinstance(value, bool) and kind is not bool:
        raise ScenarioError(path, f"{value!r} is no number or word")
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise from_pydantic(error, path) from error


@cache
def _types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls) if field.init}


_ADAPTERS: dict[str, TypeAdapter[Any]] = {}


def _adapter(kind: Any) -> TypeAdapter[Any]:
    found = _ADAPTERS.get(repr(kind))
    if found is None:
        found = _ADAPTERS[repr(kind)] = TypeAdapter(kind)
    return found
