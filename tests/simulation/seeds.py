"""The seeds a simulation runs with: some that stay the same, and as many that the commit chooses.

Fixed seeds make a failure comparable from one day to the next; those of the commit look elsewhere each time, and are
the same wherever that commit is checked out. `GLOWPLUG_SIM_SEEDS` names others instead: "17", "3,5" or "0..199".
`bench/seeds.py` runs 200.
"""

import os
import random
import subprocess
from functools import cache
from pathlib import Path

VARIABLE = "GLOWPLUG_SIM_SEEDS"
EACH = 8


def seeds(num_each: int = EACH) -> tuple[int, ...]:
    """The seeds of one test: `num_each` fixed ones and as many of the commit's. Few where a run takes long."""
    if named := os.environ.get(VARIABLE):
        return read(named)
    chance = random.Random(_commit())
    return (*range(num_each), *(chance.randrange(1000, 1_000_000) for _ in range(num_each)))


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
