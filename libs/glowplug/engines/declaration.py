"""A driver's declaration of its engine: accepted arguments and readable weights.

Deployments are checked by it before anything starts (runtime/model_files.py), and again at launch.
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

_SHOWN_CHARS = 80
MOST_WHOLE = (1 << 31) - 1  # engines use 32 bits
MAX_NESTED = 16  # depth of lists and mappings in a passed-on argument


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """`allowed` continues the sentence "allowed is ...". `wrong` returns None for an allowed value, else the fault;
    '' when `allowed` says it all."""

    meaning: str
    allowed: str
    wrong: Callable[[Any], str | None]


def _unless(is_allowed: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    return lambda value: None if is_allowed(value) else ""


def whole(meaning: str, least: int = 0, most: int = MOST_WHOLE) -> Argument:
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
    return Argument(meaning=meaning, allowed="true or false", wrong=_unless(lambda value: isinstance(value, bool)))


def choice(meaning: str, options: Sequence[str]) -> Argument:
    def is_allowed(value: Any) -> bool:
        return isinstance(value, str) and value in options

    return Argument(meaning=meaning, allowed=f"one of {', '.join(options)}", wrong=_unless(is_allowed))


def text(meaning: str, most_chars: int, wrong: Callable[[str], str | None] = lambda _: None) -> Argument:
    """A text of one to `most_chars` characters; `wrong` returns any other fault, None for none."""

    def what(value: Any) -> str | None:
        return wrong(value) if isinstance(value, str) and 0 < len(value) <= most_chars and "\0" not in value else ""

    return Argument(meaning=meaning, allowed=f"a text of at most {most_chars} characters", wrong=what)


def plain(meaning: str) -> Argument:
    """Any value that a command line or a JSON document can carry."""
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
    """The `engine_args` of one engine. Where names are passed on, dashes count as underscores. `together` raises
    EngineMisconfigured for conflicting values."""

    engine: str
    known: Mapping[str, Argument] = field(default_factory=dict)
    reserved: Mapping[str, str] = field(default_factory=dict)  # name -> its other setter
    passed_on: Argument | None = None  # checks values under all other names; None: no other names
    together: Callable[[Mapping[str, Any]], None] = lambda _: None

    def check(self, engine_args: Mapping[str, Any]) -> None:
        """Raises EngineMisconfigured for the first wrong argument."""
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
    """`kind` continues the sentence "the engine reads ...".

    `unreadable`: '' or the reason why the engine cannot read local weights; raises OSError. `check` compares them with
    the model's other fields, and raises EngineMisconfigured. `num_slots`: concurrent requests of one instance.
    """

    kind: str
    form: WeightsForm
    required: bool = True
    other_suffixes: tuple[str, ...] = ()  # of addresses certainly of another kind
    unreadable: Callable[[Path], str] = _anything
    check: Callable[[Model, Path], None] = _any_model
    num_slots: Callable[[Model, Path], int] = _as_declared
