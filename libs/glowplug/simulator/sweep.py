"""Variants and seeds: what one command runs side by side."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from glowplug.simulator.scenario.errors import ScenarioError
from glowplug.simulator.scenario.tree import Tree, override

_COMMA = re.compile(r",(?![^\[{]*[\]}])")  # not inside a YAML list or mapping
MAX_CASES = 10_000


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a scenario: settings, and what people call it."""

    label: str
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a whole scenario, as written, and a seed. It travels to another process as it is."""

    variant: str
    seed: int
    tree: Tree
    beside: Path
    check: bool = False  # watch the invariants after every event
    kept: Path | None = None  # where the files `beside` are afterwards, when they do not stay there
    settings: tuple[str, ...] = ()  # what its variant sets: they are in `tree` already
    again: str = ""  # the command line that runs this case alone


def variants(compare: Sequence[str]) -> list[Variant]:
    """Each 'key=a,b' doubles what there is. Raises ScenarioError. Without any there is one, without settings."""
    choices: list[list[tuple[str, str]]] = []
    for text in compare:
        key, equals, values = text.partition("=")
        named = [value.strip() for value in _COMMA.split(values) if value.strip()]
        if not equals or not key.strip() or not named:
            raise ScenarioError("--compare", f"{text!r} is not key=a,b")
        if len(set(named)) < len(named):
            raise ScenarioError("--compare", f"{text!r} names a value twice")
        choices.append([(key.strip(), value) for value in named])
    short = len(choices) == 1
    made = [
        Variant(
            ", ".join(value if short else f"{key.rpartition('.')[2]}={value}" for key, value in some) or "as written",
            tuple(f"{key}={value}" for key, value in some),
        )
        for some in product(*choices)
    ]
    if len(made) > MAX_CASES:
        raise ScenarioError("--compare", f"{len(made)} variants are more than {MAX_CASES}")
    return made


def parse_seeds(text: str) -> tuple[int, ...]:
    """'0..9', '1,2,5', '7', or a mix; in order, each once. Raises ScenarioError."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+))?\s*", part)
        if match is None:
            raise ScenarioError("--seeds", f"{text!r} is not like 0..9 or 1,2,5")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= MAX_CASES:
            raise ScenarioError("--seeds", f"{part.strip()!r} is no range")
        seeds += range(first, last + 1)
    return tuple(dict.fromkeys(seeds))


def cases(tree: Tree, beside: Path, some: Iterable[Variant], seeds: Sequence[int]) -> list[Case]:
    """Every variant with every seed, variants outermost."""
    return [
        Case(
            variant.label,
            seed,
            override(tree, (*variant.settings, f"seed={seed}"), beside),
            beside,
            settings=variant.settings,
        )
        for variant in some
        for seed in seeds
    ]
