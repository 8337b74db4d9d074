"""Errors of scenarios: one line that names the field."""

import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_TYPE = re.compile(r"(str|int|float)$|literal\[|[A-Z]\w*Words$")


class ScenarioError(ValueError):
    """The message is `field: problem`, after the file if known."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field, self.problem = field, problem

    def __reduce__(self) -> tuple[type["ScenarioError"], tuple[str, str]]:
        """Pickle the arguments."""
        return type(self), (self.field, self.problem)


def join(*parts: object) -> str:
    return ".".join(str(part) for part in parts if part != "")


def from_pydantic(error: ValidationError, path: str) -> ScenarioError:
    """Report the first error, with the number of others."""
    errors = error.errors(include_url=False)
    field = _field(errors[0])
    same = [one for one in errors if _field(one)[: len(field)] == field]
    first = max(same, key=lambda one: len(_field(one)))  # most specific
    given_path = join(path, *_field(first))
    given = "" if isinstance(first["input"], dict | list) else f"{str(first['input'])[:60]!r}: "
    problem = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "too_short":
        given, problem = "", "is empty"
    if first["type"] in ("missing", "extra_forbidden"):
        given, problem = "", "is missing" if first["type"] == "missing" else "is not a field of a scenario"
    more = f" (and {len(errors) - len(same)} more)" if len(errors) > len(same) else ""
    return ScenarioError(given_path, f"{given}{problem.removeprefix('value error, ')}{more}")


def _field(error: ErrorDetails) -> tuple[int | str, ...]:
    """Omits pydantic's type names."""
    return tuple(part for part in error["loc"] if not _TYPE.match(str(part)))
