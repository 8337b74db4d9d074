"""What is wrong with a scenario: one line that names the field."""

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


class ScenarioError(ValueError):
    """A scenario that cannot be run. The message is `field: problem`, with the file in front where one is known."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field, self.problem = field, problem


def join(*parts: object) -> str:
    """A dotted path of the parts that are not empty."""
    return ".".join(str(part) for part in parts if part != "")


def known(name: str, names: Iterable[str], what: str = "there are") -> str:
    """'(did you mean x? there are: a, b, x)' for a name that is none of `names`."""
    choices = sorted(names)
    near = difflib.get_close_matches(name, choices, 1)
    return f"({f'did you mean {near[0]}? ' if near else ''}{what}: {', '.join(choices) or 'none'})"


def from_pydantic(error: ValidationError, path: str) -> ScenarioError:
    """The first of pydantic's complaints as one line; how many more there are stands at its end."""
    errors = error.errors(include_url=False)
    first = errors[0]
    field = join(path, *first["loc"])
    given = "" if isinstance(first["input"], dict | list) else f"{str(first['input'])[:60]!r}: "
    problem = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] in ("missing", "extra_forbidden"):
        given, problem = "", "is missing" if first["type"] == "missing" else "is no field of a scenario"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return ScenarioError(field, f"{given}{problem.removeprefix('value error, ')}{more}")
