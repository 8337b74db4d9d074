"""Times of the tests: `python -m tests.times LANE.xml ...` prints them from pytest's reports."""

import sys
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests import lanes

NUM_SLOWEST = 5
HEAD = """# Where the minutes go

From the last `make test` and `make test-system`. Seconds of a test include its fixtures;
several files run at a time, so that they add up to more than the lane took. Other machines will differ.
"""


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    wall_s: float
    tests: tuple[tuple[str, str, float], ...]  # file, test, seconds


def read(path: Path) -> Lane:
    suite = next(ET.parse(path).iter("testsuite"))
    tests = [
        (
            case.get("classname", "").replace(".", "/") + ".py",
            lanes.without_group(case.get("name", "")),
            float(case.get("time", 0)),
        )
        for case in suite.iter("testcase")
    ]
    return Lane(path.stem, float(suite.get("time", 0)), tuple(tests))


def page(runs: list[Lane]) -> str:
    parts = [HEAD]
    for lane in runs:
        parts.append(f"## `make {'test' if lane.name == 'fast' else 'test-' + lane.name}`\n")
        parts.append(f"{len(lane.tests):,} tests in {minutes(lane.wall_s)}.\n")
        parts.append(_table("folder", _by(lane, depth=2)))
        slowest = sorted(lane.tests, key=lambda test: -test[2])[:NUM_SLOWEST]
        rows = [f"| `{file}` | {name.replace('|', ' ')} | {seconds:.1f} |" for file, name, seconds in slowest]
        parts.append("\n".join(["| slowest, file | test | seconds |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"


def _by(lane: Lane, depth: int) -> list[tuple[str, int, float]]:
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for file, _, took_s in lane.tests:
        folder = "/".join(file.split("/")[:depth])
        seconds[folder] += took_s  # type: ignore[assignment]
        number[folder] += 1
    return [(folder, number[folder], took_s) for folder, took_s in seconds.most_common()]


def _table(what: str, rows: list[tuple[str, int, float]]) -> str:
    lines = [f"| `{name}` | {number:,} | {seconds:.0f} |" for name, number, seconds in rows]
    return "\n".join([f"| {what} | tests | seconds |", "|---|---|---|", *lines]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page([read(Path(name)) for name in sys.argv[1:]]))
