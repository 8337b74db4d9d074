"""Errors of scenarios, each one line that names the field."""

import difflib
import re
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_TYPE = re.compile(r"(str|int|float)$|literal\[|[A-Z]\w*Words$")


class ScenarioError(ValueError):
    """A scenario cannot be run. The message is `field: problem`, with the file in front where one is known."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field, self.problem = field, problem

    def __reduce__(self) -> tuple[type["ScenarioError"], tuple[str, str]]:
        """Pickle the error as its arguments, for worker processes."""
        return type(self), (self.field, self.problem)


def join(*parts: object) -> str:
    """Join the parts that are not empty to a dotted path."""
    return ".".join(str(part) for part in parts if part != "")


def known(name: str, names: Iterable[str], what: str = "there are") -> str:
    """'(did you mean x? there are: a, b, x)' for an unknown name, with all known `names`."""
    choices = sorted(names)
    near = difflib.get_close_matches(name, choices, 1)
    return f"({f'did you mean {near[0]}? ' if near else ''}{what}: {', '.join(choices) or 'none'})"


def from_pydantic(error: ValidationError, path: str) -> ScenarioError:
    """Make one line of the first of pydantic's errors, with the number of further ones at its end."""
    errors = error.errors(include_url=False)
    field = _field(errors[0])
    same = [one for one in errors if _field(one)[: len(field)] == field]  # one for each type that the field may have
    first = max(same, key=lambda one: len(_field(one)))  # the most specific one
    given_path = join(path, *_field(first))
    given = "" if isinstance(first["input"], dict | list) else f"{str(first['input'])[:60]!r}: "
    problem = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "too_short":
        given, problem = "", "is empty"
    if first["type"] in ("missing", "extra_forbidden"):
        given, problem = "", "is missing" if first["type"] == "missing" else "is no field of a scenario"
    more = f" (and {len(errors) - len(same)} more)" if len(errors) > len(same) else ""
    return ScenarioError(given_path, f"{given}{problem.removeprefix('value error, ')}{more}")


def _field(error: ErrorDetails) -> tuple[int | str, ...]:
    """The path to an error's field, without the names of types that pydantic puts into it."""
    return tuple(part for part in error["loc"] if not _TYPE.match(str(part)))
