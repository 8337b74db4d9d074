"""Seeds of a simulation: some fixed, and as many chosen by the commit.

Fixed seeds make failures comparable; the commit's look elsewhere each time. The fast lane runs the first fixed one, the
long lane the others: a new seed's finding is a bug report, not a reason to reject an unrelated change.
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
    """`num_each` fixed ones and as many of the commit's; few for a slow run. All but the first are marked `long`."""
    if named := os.environ.get(VARIABLE):
        return [*read(named)]
    chance = random.Random(_commit())
    first, *others = (seed for fixed in range(num_each) for seed in (fixed, chance.randrange(1000, 1_000_000)))
    return [first, *(pytest.param(seed, marks=pytest.mark.long) for seed in others)]


def read(text: str) -> tuple[int, ...]:
    """Read "17", "3,5" or "0..199". Raises ValueError."""
    found: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        found += range(int(first), int(last) + 1) if dots else [int(first)]
    return tuple(found)


@cache
def _commit() -> str:
    """Empty without git or history."""
    asked = ["git", "rev-parse", "HEAD"]
    try:
        ended = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return ended.stdout.strip()
