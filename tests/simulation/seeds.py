"""The seeds a simulation runs with: some that stay the same, and as many that the commit chooses.

Fixed seeds make a failure comparable from one day to the next; those of the commit look elsewhere each time, and are
the same wherever that commit is checked out. The fast lane runs the first fixed one, the long lane the others: what a
new seed finds is a bug report, and no reason that an unrelated change does not pass.
`GLOWPLUG_SIM_SEEDS` names others instead: "17", "3,5" or "0..199". `bench/seeds.py` runs 200.
"""

import os
import random
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "GLOWPLUG_SIM_SEEDS"
EACH = 3


def seeds(num_each: int = EACH) -> list[Any]:
    """The seeds of one test, for `parametrize`: `num_each` fixed ones and as many of the commit's; few where a run
    takes long. All but the first one are marked `long`."""
    if named := os.environ.get(VARIABLE):
        return [*read(named)]
    chance = random.Random(_commit())
    first, *others = (seed for fixed in range(num_each) for seed in (fixed, chance.randrange(1000, 1_000_000)))
    return [first, *(pytest.param(seed, marks=pytest.mark.long) for seed in others)]


def read(text: str) -> tuple[int, ...]:
    """Seeds from "17", "3,5" or "0..199". Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        found += range(int(first), int(last) + 1) if dots else [int(first)]
    return tuple(found)


@cache
def _commit() -> str:
    """The commit that is checked out; "" where git or the history is missing."""
    asked = ["git", "rev-parse", "HEAD"]
    try:
        ended = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ended.stdout.strip()
