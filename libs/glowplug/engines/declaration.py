"""What a driver declares of its engine: the arguments it takes and the weights it reads.

Each driver holds one `EngineArguments` and one `EngineWeights`. A deployment is checked by them before anything starts
(runtime/model_files.py), and the driver checks by the same ones when it launches.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineMisconfigured
from glowplug.domain.model import Model

_SHOWN_CHARS = 80  # of a wrong value, in the message
MOST_WHOLE = (1 << 31) - 1  # engines keep such numbers in 32 bits
MAX_NESTED = 16  # lists and mappings inside one another, of an argument that is passed on


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One engine argument. `allowed` continues the sentence "allowed is ...". `wrong` gives None for a value that is
    allowed, otherwise what is wrong with it; '' when `allowed` says it all."""

    meaning: str
    allowed: str
    wrong: Callable[[Any], str | None]


def _unless(is_allowed: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    return lambda value: None if is_allowed(value) else ""


def whole(meaning: str, least: int = 0, most: int = MOST_WHOLE) -> Argument:
    """A whole number within bounds, both inclusive."""

    def is_allowed(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return Argument(meaning=meaning, allowed=f"a whole number from {least} to {most}", wrong=_unless(is_allowed))


def number(meaning: str, most: float, *, above_zero: bool = False) -> Argument:
    """A finite number from 0 (or above it) to `most`."""

    def is_allowed(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return (value > 0 if above_zero else value >= 0) and value <= most

    least = "above 0 and up to" if above_zero else "from 0 to"
    return Argument(meaning=meaning, allowed=f"a number {least} {most:g}", wrong=_unless(is_allowed))


def flag(meaning: str) -> Argument:
    """true or false."""
    return Argument(meaning=meaning, allowed="true or false", wrong=_unless(lambda value: isinstance(value, bool)))


def choice(meaning: str, options: Sequence[str]) -> Argument:
    """One of these values."""

    def is_allowed(value: Any) -> bool:
        return isinstance(value, str) and value in options

    return Argument(meaning=meaning, allowed=f"one of {', '.join(options)}", wrong=_unless(is_allowed))


def text(meaning: str, most_chars: int, wrong: Callable[[str], str | None] = lambda _: None) -> Argument:
    """A text of one to `most_chars` characters; `wrong` says what else is wrong with it, None when nothing is."""

    def what(value: Any) -> str | None:
        return wrong(value) if isinstance(value, str) and 0 < len(value) <= most_chars and "\0" not in value else ""

    return Argument(meaning=meaning, allowed=f"a text of at most {most_chars} characters", wrong=what)


def plain(meaning: str) -> Argument:
    """Whatever a command line or a JSON document can carry."""
    allowed = "text, a finite number, true, false, or a list or mapping of these"
    return Argument(meaning=meaning, allowed=allowed, wrong=_unless(_is_plain))


def _is_plain(value: Any, depth: int = 0) -> bool:
    if depth > MAX_NESTED:
        return False
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, str):
        return "\0" not in value
    if isinstance(value, Mapping):
        return all(isinstance(k, str) and _is_plain(v, depth + 1) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item, depth + 1) for item in value)
    return value is None or isinstance(value, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """The `engine_args` of one engine. Dashes in a name count as underscores where names are passed on. `together`
    raises EngineMisconfigured for values that are allowed each and not with one another."""

    engine: str
    known: Mapping[str, Argument] = field(default_factory=dict)
    reserved: Mapping[str, str] = field(default_factory=dict)  # name -> what sets it instead
    passed_on: Argument | None = None  # how values under every other name must be; None: there is no other name
    together: Callable[[Mapping[str, Any]], None] = lambda _: None

    def check(self, engine_args: Mapping[str, Any]) -> None:
        """Raises EngineMisconfigured naming the first argument that is wrong, and what is allowed."""
        for name, value in engine_args.items():
            key = name.replace("-", "_") if self.passed_on else name
            if key in self.reserved:
                raise _refused(name, f"is set by {self.reserved[key]}")
            argument = self.known.get(key) or (self.passed_on if _is_name(key) else None)
            if argument is None:
                raise _refused(name, self._unknown(name))
            wrong = argument.wrong(value)
            if wrong is not None:
                more = f" ({wrong})" if wrong else ""
                raise _refused(name, f"cannot be {_shown(value)}{more}; allowed is {argument.allowed}")
        self.together(engine_args)

    def _unknown(self, name: str) -> str:
        if self.passed_on:
            return f"is not the name of an argument of {self.engine}: letters, digits, dashes and underscores"
        near = difflib.get_close_matches(name, self.known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return f"is not known to {self.engine}{hint}; allowed are {', '.join(sorted(self.known))}"


def _is_name(key: str) -> bool:
    return len(key) <= 100 and key.isascii() and key.isidentifier() and not key.startswith("_")


def _refused(name: str, why: str) -> EngineMisconfigured:
    param = f"engine_args.{name[:_SHOWN_CHARS]}"
    return EngineMisconfigured(f"{param} {why}", param=param)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


class WeightsForm(StrEnum):
    """Whether weights are one file or a directory of files."""

    FILE = "file"
    DIRECTORY = "directory"
    ANY = "any"


def _anything(_: Path) -> str:
    return ""


def _any_model(_: Model, __: Path) -> None:
    return None


def _as_declared(model: Model, _: Path) -> int:
    return model.max_concurrency


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeights:
    """The weights an engine reads. `kind` continues the sentence "the engine reads ...".

    `unreadable` looks at weights that lie on this machine: '' or why the engine cannot read them; it raises OSError
    when the file system does not let it. `check` holds the other fields of the model against them, and raises
    EngineMisconfigured. `num_slots`: how many requests one instance runs at once, at most its `max_concurrency`.
    """

    kind: str
    form: WeightsForm
    required: bool = True
    other_suffixes: tuple[str, ...] = ()  # of addresses that are certainly not of this kind
    unreadable: Callable[[Path], str] = _anything
    check: Callable[[Model, Path], None] = _any_model
    num_slots: Callable[[Model, Path], int] = _as_declared
